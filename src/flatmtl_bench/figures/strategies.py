"""Gradient norms and losses as training went on, of each way to combine gradients: figure 2 of Phan et al. (2025)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from flatmtl_bench.figures.base import Figure, Record
from flatmtl_bench.figures.curves import LOSS_UNITS
from flatmtl_bench.figures.over_training import few_tasks
from flatmtl_bench.figures.style import curves, values, where
from flatmtl_bench.output import say
from flatmtl_bench.reports.reading import Run

QUANTITIES = {
    "norm": "norm of the loss gradient",
    "norm_flat": "norm of the flat gradient",
    "loss": "training loss",
}
"""What training records of each task, and the titles of the columns."""
LETTERS = 30
"""Of the name of the data in a line beside a panel."""


@dataclass(frozen=True)
class StrategiesFigure(Figure):
    """Gradient norms and training loss of each task as training recorded them; no snapshots and no models are needed.

    It is for runs that differ in --method.combine, and plain ones beside them. They are means over the steps of an
    epoch, of mini-batches in training mode; norms are over the shared parameters. Flat gradients are recorded where
    they are aggregated apart, which is by individual and second.
    """

    def measure(self, run: Run) -> Iterator[Record]:
        """Yield each quantity of each task at each epoch, of those that the run has recorded."""
        series = {(task, name): run.series(f"train/{name}/{task}") for task in run.tasks for name in QUANTITIES}
        recorded = {what: found for what, found in series.items() if any(value is not None for value in found)}
        if not any(name == "norm" for _, name in recorded):
            say(f"{run.path} has no gradient norms: {run.config.label} does not look at the gradients of tasks.")
        for (task, name), found in recorded.items():
            unit = LOSS_UNITS.get(run.main.get(task, ""), "nats")
            for epoch, value in zip(run.epochs, found, strict=True):
                yield {"epoch": epoch, "task": task, "quantity": name, "unit": unit, "value": value}

    def draw(self, records: Sequence[Record]) -> Drawing:
        """Return a row of panels for each data set and task: norms on the left, the loss on the right."""
        several = len(values(records, "data")) > 1
        shown = few_tasks(records)
        placed = [
            {**record, "row": _row(record, several=several), "data": title}
            for name, title in QUANTITIES.items()
            for record in where(shown, quantity=name)
        ]
        text = {"xlabel": "epoch", "ylabel": "", "rows": "row"}
        return curves(placed, "epoch", "value", **text, size=(2.8, 2.1), prepare=_say_if_empty)


def _row(record: Record, *, several: bool) -> str:
    whose = f"{fill(str(record['data']), LETTERS)}\n" * several
    return f"{whose}{record['task']}\n(loss: {record['unit']})"


def _say_if_empty(axis: Axes) -> None:
    if not axis.lines:
        axis.set(xticks=[], yticks=[])
        axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center", va="center")
