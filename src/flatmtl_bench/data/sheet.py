"""Contact sheets: a few items of a data set on one page, to see with one's own eyes what a model is given and says.

How a target is drawn depends on its objective: maps are painted beside the picture, labels are written below it.
"""

import os
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from flatmtl_bench.data.base import TaskDataset
from flatmtl_bench.data.painting import DEPTHS, answer, class_colour, hatched, paint
from flatmtl_bench.metrics import Attribute, Classification, Depth, Normals, Segmentation

DPI = 100
SIDE = 108  # pixels that a picture is about high: the nearest whole multiple of its own, so 36 become 108
GAP, LINE, NEXT = (
    0.12,
    0.18,
    0.125,
)  # between pictures, of a line of text, and from one caption line to the next, in inches
KEY = 1.2  # of a name in the legend, in inches
ACROSS = 8  # pictures side by side, unless told otherwise

Outputs = Mapping[str, Any]


@dataclass(frozen=True)
class Shown:
    """An item to be drawn.

    Attributes:
        picture: the input of a model, ``(1, H, W)`` or ``(3, H, W)``.
        truth: task -> target.
        prediction: task -> what is predicted, in the form of a target; None: nothing is.
    """

    picture: Tensor
    truth: Mapping[str, Any]
    prediction: Mapping[str, Any] | None = None


def contact_sheet(
    dataset: TaskDataset,
    path: str | Path,
    rows: int = 8,
    columns: int | None = None,
    *,
    seed: int = 0,
    overwrite: bool = False,
) -> Path:
    """Write a PNG of ``rows * columns`` random items, each with its targets, and return its path.

    Maps stand beside the picture, labels below it: classes by their names, attributes as a list of those that the
    item has. ``columns`` is by default as many as make eight pictures and maps side by side. ``seed`` chooses the
    items: the same arguments give the same file. The file appears only when it is complete.

    Raises:
        FileExistsError: ``path`` exists and ``overwrite`` is False.
        ValueError: ``path`` does not end in ``.png``, or the sheet would be empty.
    """
    path = _free(path, overwrite)
    columns = max(1, ACROSS // (1 + len(_maps(dataset)))) if columns is None else columns
    total = len(dataset)
    count = min(rows * columns, total)
    if min(rows, columns, count) < 1:
        raise ValueError(f"nothing to show: {rows} rows, {columns} columns, {total} items. Each must be at least 1.")
    chosen = np.random.RandomState(seed).permutation(total)[:count].tolist()
    _write(_draw(dataset, [Shown(*dataset[index]) for index in chosen], min(columns, count)), path)
    return path


def prediction_sheet(
    dataset: TaskDataset,
    outputs: Mapping[int, Outputs],
    path: str | Path,
    columns: int = 1,
    *,
    overwrite: bool = False,
) -> Path:
    """Write a PNG of items with their targets and, beside each, what a model predicts, and return its path.

    Args:
        dataset: whose items they are.
        outputs: index of an item -> task -> output of a model for it, without the dimension of the batch; they are
            drawn in this order.
        path: of the file.
        columns: items side by side.
        overwrite: replace the file if it exists.

    Raises:
        FileExistsError: ``path`` exists and ``overwrite`` is False.
        ValueError: ``path`` does not end in ``.png``, the sheet would be empty, or a task has no output.
    """
    path = _free(path, overwrite)
    if columns < 1 or not outputs:
        raise ValueError(f"nothing to show: {columns} columns, {len(outputs)} items. Each must be at least 1.")
    items = []
    for index, of_item in outputs.items():
        if lacking := [task for task in dataset.objectives if task not in of_item]:
            raise ValueError(f"item {index} has no output for {lacking}; expected one for each task of the data set.")
        predicted = {task: answer(objective, of_item[task]) for task, objective in dataset.objectives.items()}
        items.append(Shown(*dataset[index], predicted))
    _write(_draw(dataset, items, min(columns, len(items))), path)
    return path


def _maps(dataset: TaskDataset) -> list[str]:
    """Return the tasks whose targets are maps."""
    return [t for t, objective in dataset.objectives.items() if isinstance(objective, Segmentation | Depth | Normals)]


def _draw(dataset: TaskDataset, items: Sequence[Shown], columns: int) -> Figure:
    maps, predicted = _maps(dataset), items[0].prediction is not None
    headings = ["picture", *(name for task in maps for name in [task, *["predicted"] * predicted])]
    captions = [_caption(dataset, item) for item in items]
    lines = max(len(caption) for caption in captions)
    side, aspect = _side(items[0].picture), items[0].picture.shape[-1] / items[0].picture.shape[-2]
    place = _Places(side, aspect, columns, len(headings), LINE + (lines - 1) * NEXT if lines else 0.0)
    rows, width = -(-len(items) // columns), max(columns * place.group, 3 * KEY)
    title, legend = [*textwrap.wrap(str(dataset), int(14 * width)), *_explanation(dataset)], _legend(dataset, width)
    below = len(legend) * LINE
    height = rows * place.row + (len(title) + 1 + bool(maps)) * LINE + below
    figure = Figure(figsize=(width, height), dpi=DPI)
    figure.text(0.5, 1 - LINE / 2 / height, "\n".join(title), fontsize=9, ha="center", va="top")
    farthest = _farthest(dataset, items)
    for number, item in enumerate(items):
        panels = [dataset.to_look_at(item.picture).permute(1, 2, 0).numpy(), *_painted(dataset, item, farthest)]
        for panel, (heading, shown) in enumerate(zip(headings, panels, strict=True)):
            left, bottom = place.left(number, panel), place.bottom(number, rows) + below
            axes = figure.add_axes((left / width, bottom / height, side * aspect / width, side / height))
            axes.set_axis_off()
            axes.imshow(shown, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            if maps and number < columns:
                axes.text(0.5, 1.03, heading, fontsize=7, ha="center", va="bottom", transform=axes.transAxes)
            if panel == 0:
                text = "\n".join(captions[number])
                axes.text(0.5, -0.03, text, fontsize=7, ha="center", va="top", transform=axes.transAxes)
    _draw_legend(figure, legend, farthest)
    return figure


def _side(picture: Tensor) -> float:
    """Return how high a picture is drawn, in inches: so that each of its pixels has the same size, if it is small."""
    height = picture.shape[-2]
    return min(height * max(1, round(SIDE / height)), 3 * SIDE) / DPI


@dataclass(frozen=True)
class _Places:
    """Where the pictures of a sheet are, in inches: items in columns, each a group of panels with a caption below."""

    side: float
    aspect: float
    columns: int
    panels: int
    caption: float

    @property
    def group(self) -> float:
        """The width of an item."""
        return self.panels * (self.side + GAP) * self.aspect

    @property
    def row(self) -> float:
        """The height of an item."""
        return self.side + GAP + self.caption

    def left(self, number: int, panel: int) -> float:
        """Return the left edge of a panel of an item."""
        return number % self.columns * self.group + (panel * (self.side + GAP) + GAP / 2) * self.aspect

    def bottom(self, number: int, rows: int) -> float:
        """Return the lower edge of an item's panels, above the legend."""
        return (rows - number // self.columns - 1) * self.row + self.caption


def _painted(dataset: TaskDataset, item: Shown, farthest: float) -> Iterator[np.ndarray]:
    """Yield the maps of an item: of each task the truth and, if there is one, the prediction."""
    for task in _maps(dataset):
        for targets in (item.truth, item.prediction):
            if targets is not None:
                yield paint(dataset.objectives[task], targets[task], farthest)


def _farthest(dataset: TaskDataset, items: Sequence[Shown]) -> float:
    """Return the largest true depth that is shown; 1 if there is none."""
    depths = [task for task, objective in dataset.objectives.items() if isinstance(objective, Depth)]
    return max((float(item.truth[task].max()) for item in items for task in depths), default=1.0) or 1.0


def _caption(dataset: TaskDataset, item: Shown) -> list[str]:
    """Return the lines below an item: its labels, then those that are predicted."""
    if item.prediction is None:
        return _names(dataset, item.truth)
    truth, predicted = _names(dataset, item.truth), _names(dataset, item.prediction)
    return [*truth, *(["predicted:"] if predicted else []), *predicted]


def _names(dataset: TaskDataset, labels: Mapping[str, Any]) -> list[str]:
    """Return lines with the names of classes, then with the attributes that are there."""
    kinds = dataset.objectives
    classes = [t.classes[int(labels[task])] for task, t in kinds.items() if isinstance(t, Classification)]
    attributes = [task for task, kind in kinds.items() if isinstance(kind, Attribute)]
    there = [task.replace("_", " ") for task in attributes if int(labels[task])]
    listed = textwrap.wrap(", ".join(there) or "none", 18) if attributes else []
    return [*([" | ".join(classes)] if classes else []), *listed]


def _explanation(dataset: TaskDataset) -> list[str]:
    """Return a line that says what stands below a picture, if anything does."""
    classes = [task for task, objective in dataset.objectives.items() if isinstance(objective, Classification)]
    attributes = any(isinstance(objective, Attribute) for objective in dataset.objectives.values())
    below = [*([" | ".join(classes)] if classes else []), *(["the attributes it has"] if attributes else [])]
    return [f"below each picture: {', '.join(below)}"] if below else []


Key = tuple[str, tuple[float, ...] | None]
"""A name in a legend, and its colour; None: hatched."""


def _legend(dataset: TaskDataset, width: float) -> list[list[Key] | str]:
    """Return the lines that explain the maps: names with their colours, the scale of depths, or a sentence."""
    lines: list[list[Key] | str] = []
    for objective in dataset.objectives.values():
        match objective:
            case Segmentation():
                keys: list[Key] = [(name, class_colour(number)) for number, name in enumerate(objective.classes)]
                keys.append(("no label", None))
                each = max(1, int(width / KEY))
                lines += [keys[start : start + each] for start in range(0, len(keys), each)]
            case Depth():
                lines.append("depth")
            case Normals():
                lines.append("normals: the redder, the more to the right; green: up; blue: towards the camera")
    return [*lines, ""] if lines else []


def _draw_legend(figure: Figure, legend: Sequence[list[Key] | str], farthest: float) -> None:
    """Write the legend at the bottom."""
    width, height = figure.get_size_inches()

    def swatch(colours: np.ndarray, left: float, bottom: float, length: float) -> None:
        axes = figure.add_axes((left / width, bottom / height, length / width, 0.6 * LINE / height))
        axes.set_axis_off()
        axes.imshow(colours, aspect="auto", interpolation="nearest")

    def write(text: str, left: float, bottom: float) -> None:
        figure.text(left / width, bottom / height, text, fontsize=7, va="bottom")

    for number, line in enumerate(legend):
        bottom = (len(legend) - number - 1) * LINE
        if line == "depth":
            write("0", 0.1, bottom)
            swatch(DEPTHS(np.linspace(0, 1, 256))[None], 0.2, bottom, 1.6)
            write(f"{farthest:.3g}: depth, or inverse depth, in the unit of the data", 1.86, bottom)
        elif isinstance(line, str):
            write(line, 0.1, bottom)
        else:
            for place, (name, colour) in enumerate(line):
                left = 0.1 + place * KEY
                swatch(hatched(6, 9) if colour is None else np.array([[colour]]), left, bottom, 0.16)
                write(name, left + 0.22, bottom)


def _free(path: str | Path, overwrite: bool) -> Path:
    """Return where a sheet may be written to."""
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise ValueError(f"a contact sheet is a PNG, got the path {path}. Let it end in .png.")
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"{path} exists. Pass --overwrite (overwrite=True) to replace it, or choose another path."
        )
    return path


def _write(figure: Figure, path: Path) -> None:
    """Write beside ``path`` first and rename, so that no half file is ever seen."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            FigureCanvasAgg(figure).print_png(file, metadata={"Software": None})
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
