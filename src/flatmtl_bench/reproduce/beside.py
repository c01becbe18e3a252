"""The paper's table beside ours: what is printed, what our runs came to, and how they differ."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

from flatmtl_bench.reports import paper
from flatmtl_bench.reports.columns import Column, Values
from flatmtl_bench.reports.difference import Difference, difference
from flatmtl_bench.reports.grid import Cell, Grid
from flatmtl_bench.reports.results import Row as Found
from flatmtl_bench.reproduce.plan import Part
from flatmtl_bench.reproduce.tables import Row

QUOTED, LOSES = "†", "‡"
"""Marks of rows whose numbers the paper quotes, and of its cells in which the flat form is worse than the plain."""
QUOTES = f"{QUOTED} the paper quotes these numbers from elsewhere: they may come from other code."
LOST = f"{LOSES} in the paper the flat form is worse than the plain one here."
SPREADS = (
    "paper: what is printed, ± its standard deviation where there is one. here: mean ± standard deviation over the "
    "seeds."
)


@dataclass(frozen=True)
class Compared:
    """One cell of a table: the paper's number and ours.

    Attributes:
        row: of the table.
        column: of our metrics.
        paper: what is printed; None if nothing is.
        loses: whether the flat form is worse than the plain one there.
        seeds: of our runs.
        values: of each seed, in the unit of the paper; None where a metric was not finite.
    """

    row: Row
    column: Column
    paper: paper.Number | None
    loses: bool
    seeds: Sequence[int]
    values: Values

    @property
    def mean(self) -> float | None:
        """Ours, over the seeds; None if one has failed or there is none."""
        known = [value for value in self.values if value is not None]
        return fmean(known) if known and len(known) == len(self.values) else None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        return None if self.mean is None or self.paper is None else self.mean - self.paper.mean

    def cells(self) -> list[Cell]:
        """Return the paper's number, ours and the difference."""
        return [self._paper_cell(), self.column.cell(self.values), self._difference_cell()]

    def _paper_cell(self) -> Cell:
        if self.paper is None:
            return Cell("-")
        form = self.column.form.lstrip("+z")
        sd = "" if self.paper.sd is None else f" ± {self.paper.sd:{form}}"
        return Cell(f"{self.paper.mean:{self.column.form}}{sd}{LOSES * self.loses}", self.paper.mean)

    def _difference_cell(self) -> Cell:
        form = self.column.form.lstrip("+z")
        return Cell("-") if self.difference is None else Cell(f"{self.difference:+{form}}", self.difference)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold, in the units of the paper."""
        known = [value for value in self.values if value is not None]
        printed = self.paper and {"mean": self.paper.mean, "sd": self.paper.sd}
        sd = stdev(known) if self.mean is not None and len(known) > 1 else None
        return {
            "method": self.row.label,
            "metric": self.column.heading,
            "better": self.column.better,
            "paper": printed,
            "quoted": self.row.quoted,
            "flat_loses_in_paper": self.loses,
            "ours": {"mean": self.mean, "sd": sd, "seeds": list(self.seeds), "values": list(self.values)},
            "difference": self.difference,
        }


@dataclass(frozen=True)
class Gain:
    """What the flat form of a method has more than the plain one, in the paper and in ours.

    Attributes:
        plain: row of the table.
        flat: row of the table.
        column: of our metrics.
        paper: flat less plain; None if one is not printed.
        ours: paired by seed; None if there is nothing to pair, or a metric was not finite.
    """

    plain: Row
    flat: Row
    column: Column
    paper: float | None
    ours: Difference | None

    @property
    def label(self) -> str:
        """What is compared."""
        return f"{self.flat.label} less {self.plain.label}"

    def cells(self) -> list[Cell]:
        """Return the paper's gain and ours."""
        form = self.column.form.lstrip("+z")
        printed = Cell("-") if self.paper is None else Cell(f"{self.paper:+{form}}", self.paper)
        return [printed, interval_cell(self.ours, self.column.form)]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        return {
            "flat": self.flat.label,
            "plain": self.plain.label,
            "metric": self.column.heading,
            "better": self.column.better,
            "paper": self.paper,
            "ours": None if self.ours is None else self.ours.to_dict(),
        }


def interval_cell(found: Difference | None, form: str) -> Cell:
    """Return a paired difference; it stands out if its interval lies on the good side of 0."""
    return Cell("-") if found is None else Cell(found.text(form), found.mean, found.clear)


@dataclass(frozen=True)
class Beside:
    """A table of the paper on one data set beside ours.

    Attributes:
        part: which table and data.
        found: our row of each recipe.
        values: of our row and a column a value of each seed.
    """

    part: Part
    found: Mapping[str, Found]
    values: Callable[[Found, Column], Values]

    @cached_property
    def columns(self) -> Mapping[str, Column]:
        """How our runs have what is printed, by its name."""
        return self.part.table.columns(self.part.tasks)

    def ours(self, row: Row) -> Found | None:
        """Return our row, if there is one."""
        return self.found.get(self.part.recipe(row))

    def compared(self) -> list[list[Compared]]:
        """Return the cells of each row."""
        return [[self._compared(row, name, column) for name, column in self.columns.items()] for row in self.part.rows]

    def _compared(self, row: Row, name: str, column: Column) -> Compared:
        numbers, ours = self._printed(row), self.ours(row)
        plain = self.plain_of(row)
        other = {} if plain is None else self._printed(plain)
        loses = row.flat and name in numbers and name in other and other[name].is_better_than(numbers[name])
        seeds = [] if ours is None else ours.seeds
        values = [] if ours is None else self.values(ours, column)
        return Compared(row, column, numbers.get(name), loses, seeds, values)

    def _printed(self, row: Row) -> dict[str, paper.Number]:
        table = self.part.table.number
        return {} if row.beside else paper.printed(table, self.part.printed, row.printed, flat=row.flat)

    def plain_of(self, row: Row) -> Row | None:
        """Return the plain form of a flat row, if the table has it."""
        forms = (other for other in self.part.rows if not other.flat and other.method == row.method)
        return next(forms, None) if row.flat else None

    def gains(self) -> list[list[Gain]]:
        """Return of each flat row with a plain one what it gains in each column."""
        pairs = [(plain, row) for row in self.part.rows if (plain := self.plain_of(row)) is not None]
        return [[self._gain(*pair, name, column) for name, column in self.columns.items()] for pair in pairs]

    def _gain(self, plain: Row, flat: Row, name: str, column: Column) -> Gain:
        first, second = (self._printed(row).get(name) for row in (plain, flat))
        printed = None if first is None or second is None else second.mean - first.mean
        return Gain(plain, flat, column, printed, self.paired(plain, flat, column))

    def paired(self, first: Row, second: Row, column: Column) -> Difference | None:
        """Return our second row less the first one, over the seeds that both have."""
        each = [self._by_seed(row, column) for row in (first, second)]
        seeds = sorted({*each[0]} & {*each[1]})
        return difference([each[0][k] for k in seeds], [each[1][k] for k in seeds], column.better) if seeds else None

    def _by_seed(self, row: Row, column: Column) -> dict[int, float | None]:
        ours = self.ours(row)
        values = [] if ours is None else self.values(ours, column)
        return {} if ours is None or not values else dict(zip(ours.seeds, values, strict=True))

    def grids(self) -> list[Grid]:
        """Return the tables to show: side by side, and what flatness gains."""
        return [grid for grid in (self.side_by_side(), self.gained()) if grid.rows]

    def side_by_side(self) -> Grid:
        """Return the paper's numbers, ours and the difference."""
        headings = [f"{c.heading}: {which}" for c in self.columns.values() for which in ("paper", "here", "difference")]
        compared = self.compared()
        rows = [self._line(cells) for cells in compared]
        chosen = any(self.part.tuned(row) for row in self.part.rows)
        rho = "rho: the radius that validation chose." if chosen else "rho: the radius, which is not tuned."
        quoted = [QUOTES] * any(row.quoted for row in self.part.rows)
        lost = [LOST] * any(cell.loses for cells in compared for cell in cells)
        return Grid(
            "side by side", [f"{SPREADS} {rho}", *quoted, *lost], ["method", "rho", "seeds", *headings], rows, names=3
        )

    def _line(self, cells: Sequence[Compared]) -> list[Cell]:
        row, seeds, ours = cells[0].row, cells[0].seeds, self.ours(cells[0].row)
        name, number = Cell(row.label + QUOTED * row.quoted), Cell(str(len(seeds)) if seeds else "-", len(seeds))
        rho = Cell("-") if ours is None or not row.flat else Cell(f"{ours.config.rho:g}", ours.config.rho)
        return [name, rho, number, *(cell for each in cells for cell in each.cells())]

    def gained(self) -> Grid:
        """Return what flat forms gain over plain ones, in the paper and in ours."""
        headings = [f"{c.heading}: {which}" for c in self.columns.values() for which in ("paper", "here")]
        rows = [[Cell(gains[0].label), *(cell for gain in gains for cell in gain.cells())] for gains in self.gains()]
        caption = (
            "What the flat form gains. Here it is paired by seed: mean [95 % interval, Student's t] and with how many "
            "of the seeds it is better; it stands out where the interval lies on the good side of 0."
        )
        return Grid("gains", [caption], ["difference", *headings], rows)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        return {
            "table": self.part.table.number,
            "paper_data": self.part.printed,
            "data": self.part.data,
            "cells": [cell.to_dict() for cells in self.compared() for cell in cells],
            "gains": [gain.to_dict() for gains in self.gains() for gain in gains],
        }

    def lacking(self) -> Iterator[str]:
        """Yield in sentences which rows have fewer runs than were wanted."""
        for row in self.part.rows:
            ours = self.ours(row)
            count = 0 if ours is None else len(ours.seeds)
            if count < self.part.size.seeds:
                yield f"{row.label} has the results of {count} of {self.part.size.seeds} seeds."
