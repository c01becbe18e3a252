"""One table of a report: its numbers, what Delta m is relative to, and what there is to say of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from flatmtl_bench.reports.baseline import Baseline
from flatmtl_bench.reports.columns import DELTA_M, Column, Values, best
from flatmtl_bench.reports.grid import Cell, Grid
from flatmtl_bench.reports.results import FLAT, Row, Table
from flatmtl_bench.reports.settings import text


@dataclass(frozen=True)
class Section:
    """A table with its baseline.

    Attributes:
        table: the results.
        baseline: of Delta m; None if there is none.
        reason: why there is none.
    """

    table: Table
    baseline: Baseline | None = None
    reason: str = ""

    def lines(self) -> list[str]:
        """Return what stands above the table, a sentence or more in each line."""
        if self.baseline is None:
            delta = f"No Delta m: {self.reason}"
        else:
            delta = (
                f"Delta m: mean change of {len(self.baseline.better)} metrics, in per cent, against "
                f"{self.baseline.text}. Each seed is compared with that; negative is better."
            )
        return [line for line in (self.table.title, self._common(), delta, *self.table.lacking) if line]

    def _common(self) -> str:
        """Return the radius and perturbation of the flat methods, if they have them in common."""
        flat = [row.settings for row in self.table.rows if row.flat]
        names = [name for name in FLAT[:2] if len({settings[name] for settings in flat}) == 1]
        return f"Flat methods: {text({name: flat[0][name] for name in names})}" if names else ""

    def grids(self) -> list[Grid]:
        """Return the tables to show, none of them empty."""
        return [self.results()] if self.table.rows else []

    def results(self) -> Grid:
        """Return a row for each method, the best of each column marked."""
        columns = self._columns()
        marks = {column.heading: best(column, list(values.values())) for column, values in columns}
        same_seeds = len({tuple(row.seeds) for row in self.table.rows}) == 1
        rows: list[list[Cell]] = []
        for k, (row, settings) in enumerate(zip(self.table.rows, self.table.distinct(), strict=True)):
            seeds = Cell(str(len(row.seeds)) if same_seeds else ",".join(map(str, row.seeds)), len(row.seeds))
            numbers = [column.cell(values[row], strong=marks[column.heading][k]) for column, values in columns]
            rows.append([Cell(f"{row.config.label} {text(settings)}".strip()), seeds, *numbers])
        legend = "Mean ± standard deviation over the seeds; the best of each column is marked."
        return Grid("results", [legend], ["method", "seeds", *(column.heading for column, _ in columns)], rows)

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
            "notes": [note for note in (self.reason, *self.table.lacking) if note],
            "rows": [
                self._row(row, settings) for row, settings in zip(self.table.rows, self.table.distinct(), strict=True)
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
            "delta_m": None if self.baseline is None else _over_seeds(self.baseline.delta_m(row)),
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
