"""What the paper claims of its tables, each answered by an interval over our seeds."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from flatmtl_bench.reports.columns import Column, Values
from flatmtl_bench.reports.difference import Difference, difference
from flatmtl_bench.reports.grid import Cell, Grid
from flatmtl_bench.reports.results import Row as Found
from flatmtl_bench.reproduce.beside import Beside, interval_cell
from flatmtl_bench.reproduce.tables import ALONE

FLAT_IS_BETTER = "A method is better when it is flat"
WITH_SPREAD = ("pcgrad", "imtl_g", "cagrad")
"""The methods whose results the paper says come closer to each other when they are flat."""


@dataclass(frozen=True)
class Answer:
    """A claim and what our runs say to it.

    Attributes:
        claim: of the paper, in a sentence.
        data: of our runs.
        what: the number that answers it, in words: the claim says that it is on its good side of 0.
        found: it, with its interval; None if runs are lacking or have failed.
        form: how it is written.
    """

    claim: str
    data: str
    what: str
    found: Difference | None
    form: str = ".2f"

    @property
    def verdict(self) -> str:
        """Say ``yes`` or ``no`` if the interval lies on one side of 0, else ``open``."""
        found = self.found
        if found is None:
            return "not measured"
        if found.clear:
            return "yes"
        against = found.low is not None and found.high is not None and not found.low <= 0 <= found.high
        return "no" if against else "open"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        found = None if self.found is None else self.found.to_dict()
        return {"claim": self.claim, "data": self.data, "what": self.what, "found": found, "verdict": self.verdict}

    def cells(self) -> list[Cell]:
        """Return a line of the table of claims."""
        return [
            *map(Cell, (self.claim, self.data, self.what)),
            interval_cell(self.found, self.form),
            Cell(self.verdict),
        ]


def grid(answers: Sequence[Answer]) -> Grid:
    """Return the claims and their answers as a table."""
    caption = (
        "Each claim is that a number lies on its good side of 0: mean [95 % interval over the seeds, Student's t] and "
        "with how many seeds it does. yes, no: the interval lies on one side; open: it holds 0."
    )
    headings = ["the paper claims", "data", "number", "here", "seen"]
    return Grid("claims", [caption], headings, [answer.cells() for answer in answers], names=3)


def answers(beside: Beside) -> list[Answer]:
    """Return the claims that a table is about, with their answers."""
    about = {1: (_flat_is_better, _spread_shrinks, _best_flat_beats_stl, _more_than_sam), 2: (_flat_is_better,)}
    about |= dict.fromkeys((3, 4), (_flat_is_better, _mgda_favours, _best_flat_beats_stl))
    about |= {5: (_apart_is_better,), 7: (_more_than_sam,), 8: (_flat_is_better,), 9: (_flat_is_better,)}
    found = about.get(beside.part.table.number, ())
    return [answer for claim in found for answer in claim(beside)]


def _main(beside: Beside) -> Column:
    """Return the column that sums a table up: its last one, an average or Delta m."""
    return list(beside.columns.values())[-1]


def _flat_is_better(beside: Beside) -> Iterator[Answer]:
    column = _main(beside)
    for gains in beside.gains():
        gain = gains[-1]
        if not gain.flat.beside:
            what = f"{column.heading}: {gain.flat.label} less {gain.plain.label}"
            yield Answer(FLAT_IS_BETTER, beside.part.data, what, gain.ours, column.form)


def _spread_shrinks(beside: Beside) -> Iterator[Answer]:
    """Compare the range of three methods, seed by seed."""
    if not {*WITH_SPREAD} <= {row.method for row in beside.part.rows}:
        return
    column, ranges = _main(beside), []
    for flat in (False, True):
        rows = [row for row in beside.part.rows if row.method in WITH_SPREAD and row.flat == flat and not row.combine]
        ranges.append(_range([beside.ours(row) for row in rows], lambda row: beside.values(row, column)))
    what = f"range of {column.heading} over PCGrad, IMTL, CAGrad: flat less plain"
    claim = "The methods come closer to each other when they are flat"
    yield Answer(claim, beside.part.data, what, _paired(*ranges, better="lower"), column.form)


BySeed = dict[int, float | None]


def _range(rows: Sequence[Found | None], values: Callable[[Found], Values]) -> BySeed:
    """Return of each seed that all rows have the highest less the lowest value."""
    if not rows or None in rows:
        return {}
    each = [_by_seed(row, values(row)) for row in rows if row is not None]
    shared = [seed for seed in each[0] if all(seed in other for other in each)]
    return {seed: _width([other[seed] for other in each]) for seed in shared}


def _width(numbers: Values) -> float | None:
    """Return the highest less the lowest; None if one was not finite."""
    known = [number for number in numbers if number is not None]
    return max(known) - min(known) if len(known) == len(numbers) else None


def _by_seed(row: Found, values: Values) -> BySeed:
    return dict(zip(row.seeds, values, strict=True)) if values else {}


def _paired(first: BySeed, second: BySeed, better: str) -> Difference | None:
    seeds = sorted({*first} & {*second})
    return difference([first[k] for k in seeds], [second[k] for k in seeds], better) if seeds else None


def _best_flat_beats_stl(beside: Beside) -> Iterator[Answer]:
    """Compare the flat method that validation prefers with single-task learning."""
    rows = [row for row in beside.part.rows if row.flat and row.method != ALONE and beside.ours(row) is not None]
    scored = [(score, row) for row in rows if (score := _validation(beside.ours(row))) is not None]
    stl = next((row for row in beside.part.rows if row.method == ALONE and not row.flat), None)
    if not scored or stl is None:
        return
    best, column = max(scored, key=lambda pair: pair[0])[1], _main(beside)
    what = f"{column.heading}: {best.label}, the best flat one by validation, less STL"
    found = beside.paired(stl, best, column)
    yield Answer("The best flat method beats single-task learning", beside.part.data, what, found, column.form)


def _validation(row: Found | None) -> float | None:
    scores = [] if row is None else [result.score for result in row.results]
    return None if not scores or None in scores else fmean(score for score in scores if score is not None)


def _mgda_favours(beside: Beside) -> Iterator[Answer]:
    """Compare MGDA with the summed loss in each task, and its flat form with itself in segmentation."""
    rows = {(row.method, row.flat): row for row in beside.part.rows}
    ls, mgda, flat = (rows.get(key) for key in (("ls", False), ("mgda", False), ("mgda", True)))
    if mgda is None:
        return
    for printed, column in beside.columns.items():
        task = column.metrics[0].partition("/")[2] if column.metrics else ""
        if printed in ("depth abs err", "normal angle mean") and ls is not None:
            claim, what = "MGDA favours depth and normals", f"{column.heading}: MGDA less LS"
            yield Answer(claim, beside.part.data, what, beside.paired(ls, mgda, column), column.form)
        if task == "segmentation" and printed == "mIoU" and flat is not None:
            found = beside.paired(flat, mgda, column)
            what = f"{column.heading}: MGDA less F-MGDA"
            yield Answer("F-MGDA loses mIoU against MGDA", beside.part.data, what, found, column.form)


def _more_than_sam(beside: Beside) -> Iterator[Answer]:
    """Compare the flat forms of multi-task methods with SAM on single tasks."""
    alone = next((row for row in beside.part.rows if row.method == ALONE and row.flat), None)
    if alone is None:
        return
    column = _main(beside)
    for row in beside.part.rows:
        if row.flat and row.method not in (ALONE, "ls"):
            what = f"{column.heading}: {row.label} less F-STL"
            found = beside.paired(alone, row, column)
            claim = "Flat multi-task learning is more than single-task SAM" + " (said of NYUv2)" * alone.beside
            yield Answer(claim, beside.part.data, what, found, column.form)


def _apart_is_better(beside: Beside) -> Iterator[Answer]:
    """Compare aggregating loss and flat gradients apart with aggregating SAM gradients."""
    rows = {row.combine: row for row in beside.part.rows if row.flat}
    apart, direct = rows.get(""), rows.get("direct")
    if apart is None or direct is None:
        return
    for column in beside.columns.values():
        claim, what = "Aggregating apart is better than directly", f"{column.heading}: apart less directly"
        yield Answer(claim, beside.part.data, what, beside.paired(direct, apart, column), column.form)
