"""How figures look: colours that the colour-blind can tell apart, lines that differ in print, and the spread of seeds.

The colours are those of Okabe and Ito (2008), Color Universal Design.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from statistics import fmean, stdev
from textwrap import fill
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator

from flatmtl_bench.figures.base import Record

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
SPREAD = "mean over the seeds;\nband or bar: one standard deviation"

PANEL = (3.2, 2.5)
"""Width and height of one panel, in inches."""
LETTERS, HANDLE, LINE = 15, 0.5, 0.16
"""Of a legend: how many letters an inch holds, how wide a line's sample with its gaps is, how high a line of text."""
RULES: dict[Any, Any] = {
    "font.size": 8.0,
    "axes.titlesize": 8.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "savefig.dpi": 200,
    "figure.dpi": 100,
    "pdf.fonttype": 42,  # text stays text
}


@contextmanager
def style() -> Iterator[None]:
    """Within it matplotlib draws as all figures here are drawn."""
    with mpl.rc_context(RULES):
        yield


def values(records: Sequence[Record], name: str) -> list[Any]:
    """Return the values of a field, each once, in the order in which they come.

    Example:
        >>> values([{"task": "left"}, {"task": "right"}, {"task": "left"}], "task")
        ['left', 'right']
    """
    return list(dict.fromkeys(record[name] for record in records))


def where(records: Sequence[Record], **wanted: Any) -> list[Record]:
    """Return the records that have these values.

    Example:
        >>> where([{"task": "left", "x": 1}, {"task": "right", "x": 2}], task="right")
        [{'task': 'right', 'x': 2}]
    """
    return [record for record in records if all(record[name] == value for name, value in wanted.items())]


def look(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Return for each method its colour, marker and line: dashed for plain methods, solid for flat ones."""
    flat = {record["method"]: record["flat"] for record in records}
    looks = zip(flat.items(), cycle(COLOURS), cycle(MARKERS), strict=False)
    return {
        method: {"color": colour, "marker": marker, "linestyle": "-" if is_flat else "--"}
        for (method, is_flat), colour, marker in looks
    }


def grid(rows: Sequence[str], columns: Sequence[str], *, size: tuple[float, float] = PANEL) -> tuple[Drawing, Any]:
    """Return a drawing and its axes, ``axes[i, j]``: the columns have titles, the rows have labels on the left."""
    drawing = Drawing(figsize=(size[0] * len(columns), size[1] * len(rows)), layout="constrained")
    axes = drawing.subplots(len(rows), len(columns), squeeze=False)
    for axis, title in zip(axes[0], columns, strict=True):
        axis.set_title(title)
    for axis, label in zip(axes[:, 0], rows, strict=True):
        axis.set_ylabel(_wrapped(label, size[1]))
    drawing.align_ylabels()
    return drawing, axes


def mean_and_spread(records: Sequence[Record], x: str, y: str) -> tuple[list[Any], list[float], list[float]]:
    """Return the values of ``x``, and the mean and the standard deviation of ``y`` over the records of each.

    What is None is left out; the standard deviation of one value is 0.

    Example:
        >>> mean_and_spread([{"x": 2, "y": 1.0}, {"x": 1, "y": 4.0}, {"x": 1, "y": 6.0}, {"x": 3, "y": None}], "x", "y")
        ([1, 2], [5.0, 1.0], [1.4142135623730951, 0.0])
    """
    known = [record for record in records if record[y] is not None]
    points = {at: [record[y] for record in known if record[x] == at] for at in sorted(values(known, x))}
    spread = [stdev(found) if len(found) > 1 else 0.0 for found in points.values()]
    return list(points), [fmean(found) for found in points.values()], spread


def curve(axis: Axes, records: Sequence[Record], x: str, y: str, *, label: str, **looks: Any) -> None:
    """Draw the mean over the seeds of ``y`` against ``x``, with a band of one standard deviation.

    Values that are None or of fewer seeds than others are means of those that are there.
    """
    points, middle, spread = mean_and_spread(records, x, y)
    above = 2.1 if looks.get("linestyle") == "--" else 2.0  # of lines on each other both are seen
    looks = {"markersize": 2.5, "markevery": max(len(points) // 10, 1), "zorder": above} | looks
    axis.plot(points, middle, label=label, **looks)
    low, high = ([m + sign * s for m, s in zip(middle, spread, strict=True)] for sign in (-1, 1))
    axis.fill_between(points, low, high, color=looks.get("color"), alpha=0.2, linewidth=0.0)
    if all(isinstance(point, int) for point in points):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def curves(
    records: Sequence[Record],
    x: str,
    y: str,
    *,
    xlabel: str,
    ylabel: str,
    rows: str = "task",
    size: tuple[float, float] = PANEL,
    prepare: Callable[[Axes], Any] = lambda axis: None,
) -> Drawing:
    """Return a drawing with a column for each data set and a row for each value of ``rows``, a curve for each method.

    Args:
        records: with ``data``, ``method``, ``flat`` and ``seed``.
        x: field of the horizontal axis.
        y: field of the vertical one.
        xlabel: with its unit.
        ylabel: with its unit.
        rows: field that tells the rows apart.
        size: of one panel, in inches.
        prepare: is called with each axis at last, e.g. to set a scale.
    """
    columns, looks = values(records, "data"), look(records)
    drawing, axes = grid([f"{ylabel}\n{row}".strip() for row in values(records, rows)], columns, size=size)
    for i, row in enumerate(values(records, rows)):
        for j, data in enumerate(columns):
            some = where(records, data=data, **{rows: row})
            for method in values(some, "method"):
                curve(axes[i, j], where(some, method=method), x, y, label=method, **looks[method])
            prepare(axes[i, j])
            axes[-1, j].set_xlabel(xlabel)
    legend(drawing, axes)
    return drawing


def legend(drawing: Drawing, axes: Any, title: str = SPREAD) -> None:
    """Put one legend below a drawing, no wider than it, with each label once, and say what the spread is.

    The drawing becomes higher by the legend, so that no panel loses its place to it.
    """
    width = drawing.get_figwidth()
    title = _wrapped(title, width)
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        handles |= dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))
    texts = [_wrapped(label, width - HANDLE) for label in handles]
    widest = max((len(line) for text in texts for line in text.split("\n")), default=0) / LETTERS + HANDLE
    columns = min(4, max(1, int(width / widest)))
    box = drawing.legend(handles.values(), texts, loc="outside lower center", ncols=columns, title=title)
    box.get_title().set_multialignment("center")
    rows = [texts[start : start + columns] for start in range(0, len(texts), columns)]
    lines = title.count("\n") + 1 + sum(1 + max(text.count("\n") for text in row) for row in rows)
    drawing.set_figheight(drawing.get_figheight() + LINE * lines)


def _wrapped(text: str, width: float) -> str:
    """Return a text with its lines broken so that none is wider than so many inches."""
    return "\n".join(fill(line, int(LETTERS * width)) for line in text.split("\n"))
