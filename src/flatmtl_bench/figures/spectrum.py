"""Largest eigenvalues and trace of the Hessian of each task's training loss, of the weights that count."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from flatmtl_bench.analysis.spectrum import spectrum
from flatmtl_bench.analysis.trained import trained
from flatmtl_bench.figures.base import Figure, Record
from flatmtl_bench.figures.over_training import few_tasks
from flatmtl_bench.figures.style import curve, grid, legend, look, mean_and_spread, values, where
from flatmtl_bench.reports.reading import Run

Looks = Mapping[str, Mapping[str, Any]]
WHOSE = ("data", "method", "flat", "seed", "task")
"""Fields that say of what a number is."""


@dataclass(frozen=True)
class SpectrumFigure(Figure):
    """The largest eigenvalues and the trace of the Hessian of each task's training loss, of the epoch that counts."""

    eigenvalues: int = 5
    """How many eigenvalues."""
    draws: int = 10
    """Random vectors for the trace."""
    samples: int = 500
    """Training samples, evenly spaced, on which the loss is taken."""
    heads: bool = False
    """Take the task's own parameters into the Hessian, too; otherwise it is that of the shared ones."""
    seed: int = 0
    """Of the random vectors."""

    def measure(self, run: Run) -> Iterator[Record]:
        """Yield the spectrum of each task."""
        model = trained(run, "train", None, self.device)
        found = spectrum(
            model.model,
            model.batches(self.samples),
            model.losses,
            model.parameters,
            eigenvalues=self.eigenvalues,
            draws=self.draws,
            heads=self.heads,
            seed=self.seed,
        )
        yield from ({"epoch": model.epoch, "task": task, **asdict(value)} for task, value in found.items())

    def draw(self, records: Sequence[Record]) -> Drawing:
        """Return for each data set a row with the eigenvalues of each task, and the traces of all tasks at its end."""
        ranked = [
            {**{name: record[name] for name in WHOSE}, "rank": rank, "value": value}
            for record in records
            for rank, value in enumerate(record["eigenvalues"], start=1)
        ]
        traces = [{**{name: record[name] for name in WHOSE}, "value": record["trace"]} for record in records]
        ranked, traces, looks = few_tasks(ranked), few_tasks(traces), look(records)
        rows = values(records, "data")
        widest = max(len(values(where(traces, data=data), "task")) for data in rows)
        drawing, axes = grid([f"{data}\neigenvalue (loss / weight²)" for data in rows], [""] * (widest + 1))
        for i, data in enumerate(rows):
            tasks = values(where(traces, data=data), "task")
            for j, task in enumerate(tasks):
                _draw_eigenvalues(axes[i, j], where(ranked, data=data, task=task), looks)
                axes[i, j].set_title(task)
            _draw_traces(axes[i, -1], where(traces, data=data), tasks, looks)
            for axis in axes[i, len(tasks) : -1]:
                axis.set_visible(False)
        legend(drawing, axes)
        return drawing


def _draw_eigenvalues(axis: Axes, records: Sequence[Record], looks: Looks) -> None:
    """Draw the eigenvalues of one task against their rank."""
    for method in values(records, "method"):
        curve(axis, where(records, method=method), "rank", "value", label=method, **looks[method])
    axis.set_xticks(values(records, "rank"))
    axis.set_xlabel("rank of the eigenvalue")
    _show_zero(axis)


def _draw_traces(axis: Axes, records: Sequence[Record], tasks: Sequence[str], looks: Looks) -> None:
    """Draw the traces of all tasks side by side."""
    methods = values(records, "method")
    for k, method in enumerate(methods):
        shift = 0.3 * ((k + 0.5) / len(methods) - 0.5)
        own = [{**record, "place": tasks.index(record["task"]) + shift} for record in where(records, method=method)]
        places, means, spreads = mean_and_spread(own, "place", "value")
        marks = {**looks[method], "linestyle": "", "markersize": 4.0, "capsize": 2.0}
        axis.errorbar(places, means, yerr=spreads, **marks)
    axis.set_title("all tasks")
    axis.set_xticks(range(len(tasks)), tasks)
    axis.set_xlim(-0.5, len(tasks) - 0.5)
    axis.set_ylabel("trace (loss / weight²)")
    _show_zero(axis)


def _show_zero(axis: Axes) -> None:
    """Let the vertical axis begin at zero, or below it where there are negative numbers."""
    axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
