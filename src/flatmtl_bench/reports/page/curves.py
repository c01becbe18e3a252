"""The curves of a table: what was measured after each epoch, of each method and seed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from flatmtl_bench.reports.columns import UNITS, Column, columns
from flatmtl_bench.reports.page.looks import Look
from flatmtl_bench.reports.results import Result, Row, Table

DIGITS = 5
"""Significant digits of a number on a curve, more than can be seen."""


@dataclass(frozen=True)
class Metric:
    """One quantity that is known of each epoch.

    Attributes:
        part: of the data: ``training``, ``validation`` or ``test``.
        title: with the unit.
        unit: as it stands behind a number.
        names: series of a run; their mean is the value.
        scale: what values are multiplied by.
    """

    part: str
    title: str
    unit: str
    names: Sequence[str]
    scale: float = 1.0

    def values(self, result: Result) -> list[float | None] | None:
        """Return the value of each epoch, None where it was not finite; None if there is no such series."""
        each = [_series(result, name) for name in self.names]
        known = [series for series in each if series is not None]
        if len(known) < len(each):
            return None
        if len(known) == 1:
            return [_rounded(value, self.scale) for value in known[0]]
        return [_rounded(_mean(values), self.scale) for values in zip_longest(*known)]


def _series(result: Result, name: str) -> list[float | None] | None:
    """Return a series of the run that has it; of single-task learning each run has those of one task."""
    for run in result.runs:
        values = run.series(name)
        if any(value is not None for value in values):
            return values
    return None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _rounded(value: float | None, scale: float) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{scale * value:.{DIGITS}g}")


def metrics(table: Table) -> list[Metric]:
    """Return what there are curves of: losses, conflict, and the main metric of each task with the mean of all."""
    main: dict[str, str] = {}
    for key in table.better:
        main.setdefault(key.partition("/")[2], key)
    losses = _means_first(columns({f"loss/{task}": "lower" for task in main}))
    results = _means_first(columns({key: table.better[key] for key in main.values()}))
    return [
        *(_metric("training", "train", column) for column in losses),
        Metric("training", "task pairs in conflict, %", "%", ["train/conflict"], 100.0),
        Metric("training", "norm of flat over loss gradients", "", [f"train/flat_to_loss/{task}" for task in main]),
        *(_metric(split, split, column) for split in ("validation", "test") for column in results),
    ]


def _means_first(found: Sequence[Column]) -> list[Column]:
    return sorted(found, key=lambda column: -len(column.metrics))


def _metric(part: str, prefix: str, column: Column) -> Metric:
    unit = UNITS.get(column.metrics[0].partition("/")[0], "")
    return Metric(part, column.heading, unit, [f"{prefix}/{name}" for name in column.metrics], column.scale)


def curves(table: Table, names: Sequence[str], look_of: Mapping[Row, Look]) -> dict[str, Any]:
    """Return the curves as plain values that JSON can hold: of each method, seed and metric a number for each epoch.

    Metrics that no run has are left out.
    """
    wanted = metrics(table)
    found = {row: [[metric.values(result) for metric in wanted] for result in row.results] for row in table.rows}
    there = [k for k in range(len(wanted)) if any(seed[k] is not None for seeds in found.values() for seed in seeds)]
    return {
        "metrics": [{"part": m.part, "title": m.title, "unit": m.unit} for m in (wanted[k] for k in there)],
        "methods": [
            {
                "name": name,
                "look": {"hue": look_of[row].hue, "flat": look_of[row].flat, "symbol": look_of[row].symbol},
                "seeds": row.seeds,
                "curves": [[seed[k] for k in there] for seed in found[row]],
            }
            for name, row in zip(names, table.rows, strict=True)
        ],
    }
