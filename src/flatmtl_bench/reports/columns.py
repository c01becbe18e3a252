"""The columns of a result table: which metrics they are of, and how their numbers are written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from flatmtl_bench.reports.comparison import spread
from flatmtl_bench.reports.grid import Cell

SHARES = ("accuracy", "miou", "pixel_accuracy", "within_11.25", "within_22.5", "within_30")
"""Metrics from 0 to 1, which tables have in per cent."""
UNITS = {"error": "%", "mean": "°", "median": "°", **dict.fromkeys(SHARES, "%")}
MOST = 12
"""Columns of single tasks; if there were more, means over the tasks take their place."""
Values = Sequence[float | None]
"""One for each seed; None where it was not finite."""


@dataclass(frozen=True)
class Column:
    """One metric of one task, or its mean over tasks.

    Attributes:
        heading: with the unit.
        metrics: names in the results of a run, as ``miou/segmentation``; their mean is the value.
        better: ``"higher"`` or ``"lower"``.
        scale: what values are multiplied by.
        form: how they are written.
    """

    heading: str
    metrics: Sequence[str]
    better: str
    scale: float = 1.0
    form: str = ".4f"

    @property
    def name(self) -> str:
        """The metric as the results of a run have it: ``miou/segmentation``, or ``accuracy`` for a mean over tasks."""
        return self.metrics[0] if len(self.metrics) == 1 else self.metrics[0].partition("/")[0]

    def value(self, results: Mapping[str, float | None]) -> float | None:
        """Return the value in the column's unit; None if a metric was not finite."""
        known = [value for name in self.metrics if (value := results[name]) is not None]
        return self.scale * fmean(known) if len(known) == len(self.metrics) else None

    def text(self, values: Values) -> str:
        """Return mean and standard deviation over the seeds; or with how many of them the method failed.

        Example:
            >>> column = Column("depth abs err", ["abs_err/depth"], "lower")
            >>> column.text([0.5, 0.25]), column.text([0.5, None]), column.text([])
            ('0.3750 ± 0.1768', 'failed 1/2', '-')
        """
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return f"failed {len(values) - len(known)}/{len(values)}"
        return spread(known, self.form) if known else "-"

    def cell(self, values: Values, *, strong: bool = False) -> Cell:
        """Return the same as a cell, with the value of each seed as its note."""
        known = [value for value in values if value is not None]
        mean = fmean(known) if known and len(known) == len(values) else None
        each = ", ".join("failed" if value is None else f"{value:{self.form}}" for value in values)
        return Cell(self.text(values), mean, strong, f"seeds: {each}" if len(values) > 1 else "")


DELTA_M = Column("Delta m, %", (), "lower", form="+z.2f")  # z: no minus before what rounds to zero


def columns(better: Mapping[str, str]) -> list[Column]:
    """Return the columns for metrics ``<metric>/<task>`` with their good directions.

    Where all tasks have the same metrics, the means over the tasks follow; of many tasks, they are all there is.

    Example:
        >>> [column.heading for column in columns({"miou/segmentation": "higher", "abs_err/depth": "lower"})]
        ['segmentation miou, %', 'depth abs err']
        >>> [column.heading for column in columns({"accuracy/left": "higher", "accuracy/right": "higher"})]
        ['left accuracy, %', 'right accuracy, %', 'average accuracy, %']
    """
    tasks: dict[str, list[str]] = {}
    for name in better:
        tasks.setdefault(name.partition("/")[0], []).append(name)
    single = [_column(name.partition("/")[2], [name], better[name]) for name in better]
    average = [_column("average", names, better[names[0]]) for names in tasks.values()]
    if len(single) > MOST:
        return average
    alike = len({tuple(name.partition("/")[2] for name in names) for names in tasks.values()}) == 1
    return [*single, *average] if alike and len(single) > len(average) else single


def _column(whose: str, names: Sequence[str], better: str) -> Column:
    metric = names[0].partition("/")[0]
    unit = UNITS.get(metric, "")
    heading = f"{whose} {metric.replace('_', ' ')}{unit and f', {unit}'}"
    scale = 100.0 if metric in SHARES else 1.0
    return Column(heading, names, better, scale, ".2f" if unit else ".4f")


def best(column: Column, rows: Sequence[Values]) -> list[bool]:
    """Return for each row whether its mean is the best of the column; a row that failed or has none is not.

    Example:
        >>> best(Column("error", ["error/hat"], "lower"), [[3.0, 1.0], [2.0], [1.0, None], []])
        [True, True, False, False]
    """
    means = [None if not values or None in values else fmean(v for v in values if v is not None) for values in rows]
    known = [mean for mean in means if mean is not None]
    if not known:
        return [False] * len(rows)
    goal = max(known) if column.better == "higher" else min(known)
    return [mean == goal for mean in means]
