"""One table of a report: its numbers, what Delta m is relative to, and what there is to say of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from flatmtl_bench.reports import pair_grids
from flatmtl_bench.reports.baseline import Baseline
from flatmtl_bench.reports.columns import DELTA_M, Column, Values, best
from flatmtl_bench.reports.grid import Cell, Chapter, Grid
from flatmtl_bench.reports.pairs import Pair, pairs
from flatmtl_bench.reports.results import FLAT, Row, Table
from flatmtl_bench.reports.settings import text

COUNTS = {
    "honest": "Test metrics are those of the epoch with the best score on validation data (protocol honest).",
    "paper": "Test metrics are means over the last ten epochs (protocol paper).",
    "official": "Test metrics are those of the epoch with the best score on the test data themselves, as in the "
    "authors' Multi-MNIST script, so they are optimistic (protocol official).",
}
"""Which epochs count, by the name of the protocol."""


@dataclass(frozen=True)
class Section:
    """A table with its baseline.

    Attributes:
        table: the results.
        baseline: of Delta m; None if there is none.
        reason: why there is none.
        compared: the names of two recipes that are paired; None: plain methods are, each with its flat forms.
    """

    table: Table
    baseline: Baseline | None = None
    reason: str = ""
    compared: tuple[str, str] | None = None

    def lines(self) -> list[str]:
        """Return what stands above the table, a sentence or more in each line."""
        if self.baseline is None:
            delta = f"No Delta m: {self.reason}"
        else:
            delta = (
                f"Delta m: mean change of {len(self.baseline.better)} metrics, in per cent, against "
                f"{self.baseline.text}. Each seed is compared with that; negative is better."
            )
        lines = (self.table.title, COUNTS[self.table.config.protocol], self._common(), delta, *self._notes())
        return [line for line in lines if line]

    def _notes(self) -> list[str]:
        """Return what runs are lacking, which rows have no Delta m, and which seeds are not compared."""
        return [*self.table.lacking, *self._without_delta_m(), *self._paired[1]]

    def _without_delta_m(self) -> list[str]:
        if self.baseline is None:
            return []
        other = {name: self.baseline.differing(row) for row, name in self.table.names().items()}
        return [
            f"No Delta m of {name}: it was trained on other data than STL ({', '.join(differ)})."
            for name, differ in other.items()
            if differ
        ]

    @property
    def pairs(self) -> Sequence[Pair]:
        """The rows that are compared seed by seed."""
        return self._paired[0]

    @cached_property
    def _paired(self) -> tuple[list[Pair], list[str]]:
        return pairs(self.table, self.compared)

    def _common(self) -> str:
        """Return the radius and perturbation of the flat methods, if they have them in common."""
        flat = [row.settings for row in self.table.rows if row.flat]
        names = [name for name in FLAT[:2] if len({settings[name] for settings in flat}) == 1]
        return f"Flat methods: {text({name: flat[0][name] for name in names})}" if names else ""

    def grids(self) -> list[Grid]:
        """Return the tables to show, none of them empty."""
        return [grid for grid in (self.results(), self.differences(), self.cost()) if grid.rows]

    def results(self) -> Grid:
        """Return a row for each method, the best of each column marked."""
        columns = self._columns()
        marks = {column.heading: best(column, list(values.values())) for column, values in columns}
        same_seeds = len({tuple(row.seeds) for row in self.table.rows}) == 1
        rows: list[list[Cell]] = []
        for k, (row, name) in enumerate(self.table.names().items()):
            seeds = Cell(str(len(row.seeds)) if same_seeds else ",".join(map(str, row.seeds)), len(row.seeds))
            numbers = [column.cell(values[row], strong=marks[column.heading][k]) for column, values in columns]
            rows.append([Cell(name), seeds, *numbers])
        legend = ["Mean ± standard deviation over the seeds; the best of each column is marked."]
        if not same_seeds:
            legend.append("The methods have unequal seeds: a mean of fewer may be the best by chance.")
        headings = ["method", "seeds", *(column.heading for column, _ in columns)]
        return Grid("results", legend, headings, rows, gaps=self._gaps())

    def _gaps(self) -> list[int]:
        """Return the rows that begin another method than the row before, of which they are not the flat form."""
        methods = [(row.alone, row.config.method.aggregator) for row in self.table.rows]
        return [k for k, (before, own) in enumerate(pairwise(methods), start=1) if before != own]

    def differences(self) -> Grid:
        """Return a row for each pair, with the paired differences and their intervals."""
        columns = [column for column, _ in self._columns()]
        return pair_grids.differences(self._called(), columns, self.baseline, self._words())

    def cost(self) -> Grid:
        """Return a row for each pair, with time and memory of a step, and how often gradients conflict."""
        return pair_grids.costs(self._called(), self._words())

    def _called(self) -> dict[Pair, str]:
        names = self.table.names()
        return {pair: f"{names[pair.flat]} vs {names[pair.plain]}" for pair in self.pairs}

    def _words(self) -> tuple[str, str]:
        """Return what the two rows of a pair are called."""
        return ("plain", "flat") if self.compared is None else self.compared

    def _columns(self) -> list[tuple[Column, Mapping[Row, Values]]]:
        """Return each column with its values, Delta m after the metrics if there is a baseline."""
        rows = self.table.rows
        columns: list[tuple[Column, Mapping[Row, Values]]] = [
            (column, {row: row.values(column) for row in rows}) for column in self.table.columns
        ]
        if self.baseline is not None:
            columns.append((DELTA_M, {row: self.baseline.delta_m(row) for row in rows}))
        return columns

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain values that JSON can hold; metrics have the units of ``summary.json``."""
        config, baseline = self.table.config, self.baseline
        return {
            "data": config.data.name,
            "source": config.source,
            "fingerprint": self.table.fingerprint,
            "model": config.model,
            "epochs": config.epochs,
            "protocol": config.protocol,
            "averaging": config.averaging,
            "better": dict(self.table.better),
            "baseline": None if baseline is None else {"text": baseline.text, "metrics": dict(baseline.metrics)},
            "notes": [note for note in (self.reason, *self._notes()) if note],
            "rows": [
                self._row(row, settings) for row, settings in zip(self.table.rows, self.table.distinct(), strict=True)
            ],
            "pairs": [
                {"name": name, **pair_grids.to_dict(pair, self.table.columns, self.baseline)}
                for pair, name in self._called().items()
            ],
        }

    def _row(self, row: Row, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "method": row.config.label,
            "flat": row.flat,
            "recipe": row.config.recipe,
            "settings": dict(settings),
            "seeds": row.seeds,
            "metrics": {name: _over_seeds([r.metrics.get(name) for r in row.results]) for name in self.table.better},
            "delta_m": _over_seeds(self.baseline.delta_m(row))
            if self.baseline and not self.baseline.differing(row)
            else None,
            "runs": [run.name for run in row.runs],
        }


def _over_seeds(values: Sequence[float | None]) -> dict[str, Any]:
    """Return mean, standard deviation and each value; a mean over some of the seeds only would mislead."""
    known = [value for value in values if value is not None]
    whole = len(known) == len(values)
    return {
        "mean": fmean(known) if whole else None,
        "sd": stdev(known) if whole and len(known) > 1 else None,
        "values": list(values),
    }


def titles(sections: Sequence[Section]) -> list[str]:
    """Return the title of each section, with the fingerprint of the test data where it would not be its alone."""
    plain = [section.table.title for section in sections]
    often = Counter(plain)
    return [
        title if often[title] == 1 else f"{title}, test data {section.table.fingerprint}"
        for title, section in zip(plain, sections, strict=True)
    ]


def chapters(sections: Sequence[Section]) -> list[Chapter]:
    """Return what is shown of each section, whatever the format."""
    titled = zip(titles(sections), sections, strict=True)
    return [Chapter(title, section.lines()[1:], section.grids()) for title, section in titled]
