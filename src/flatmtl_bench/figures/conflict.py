"""Conflict of task gradients over training: figures 3 and 11 of Phan et al. (2025), and what its theory claims."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from flatmtl import SAM
from flatmtl_bench import assembly
from flatmtl_bench.analysis.conflict import BINS, conflict
from flatmtl_bench.analysis.trained import Trained, at_snapshots
from flatmtl_bench.figures.base import Figure, Record
from flatmtl_bench.figures.over_training import few_tasks
from flatmtl_bench.figures.style import curve, grid, legend, look, values, where
from flatmtl_bench.reports.reading import Run
from flatmtl_bench.runs import finite

STATISTICS = ("conflict", "cosine", "conflict_flat", "cosine_flat", "intra_conflict", "inter_conflict")
HISTOGRAMS = ("cosines", "cosines_flat")
PANELS = {
    ("training", "conflict"): "share in conflict,\nas training went on",
    ("snapshot", "conflict"): "share in conflict\nat snapshots",
    ("snapshot", "cosine"): "cosine of\nloss gradients",
    ("snapshot", "cosine_flat"): "cosine of\nflat gradients",
    ("snapshot", "intra_conflict"): "intra-conflict\n(share)",
    ("snapshot", "inter_conflict"): "inter-conflict\n(share)",
}
"""What is drawn over the epochs, and the labels of the axes."""
LAST = "share of pairs,\nlast snapshot"
"""The label of the distribution of cosines."""


@dataclass(frozen=True)
class ConflictFigure(Figure):
    """Share of mini-batches in which gradients conflict, and their cosines, over training.

    First as training recorded it, of the weights of each step, which loss weightings do not. Then of single
    mini-batches at each snapshot (--keep-every), in training mode, with the flat gradients of plain SAM for all runs.
    """

    rho: float = 0.05
    """Radius of the flat gradients at snapshots, in the shared parameters and in the head each."""
    samples: int = 1024
    """Training samples, evenly spaced and not augmented, for the mini-batches at snapshots; 0: read only what training
    recorded, for which no snapshots are needed."""
    batch_size: int | None = None
    """Samples in a mini-batch at snapshots; None: as in the run."""
    seed: int = 0
    """Of the order of the samples, and of dropout at snapshots."""

    def __post_init__(self) -> None:
        if self.rho <= 0.0:
            raise ValueError(f"--rho must be above 0, got {self.rho}. At 0 there is no flat gradient.")

    def measure(self, run: Run) -> Iterator[Record]:
        """Yield each statistic of each epoch, of each task if it is of one; and the histograms of cosines."""
        for row in run.rows:
            means = {name.removeprefix("train/"): value for name, value in row.items() if name.startswith("train/")}
            yield from _records("training", row["epoch"], means)
        for model in at_snapshots(run, "train", self.device) if self.samples else ():
            yield from self._of_snapshot(model)

    def _of_snapshot(self, model: Trained) -> Iterator[Record]:
        closures = model.closures(self.samples, self.batch_size, self.seed)
        aggregator = assembly.flat_mtl(model.config, len(model.tasks)).aggregator
        options: dict[str, Any] = {"aggregator": aggregator, "seed": self.seed}
        found = conflict(model.model, closures, model.parameters, SAM(self.rho), **options)
        yield from _records("snapshot", model.epoch, found.means)
        for name in HISTOGRAMS:
            counts = getattr(found, name)
            yield {"measured": "snapshot", "epoch": model.epoch, "statistic": name, "task": None, "value": counts}

    def draw(self, records: Sequence[Record]) -> Drawing:
        """Return a column of panels for each data set: over the epochs, then the cosines at the last snapshot."""
        epochs = [record for record in records if record["statistic"] in STATISTICS]
        drawn: list[Record] = [
            {**record, "label": _label(record)}
            for panel in PANELS
            for record in few_tasks(where(epochs, measured=panel[0], statistic=panel[1]))
        ]
        drawn += _shares(records)
        columns, rows, looks = values(records, "data"), values(drawn, "label"), look(records)
        drawing, axes = _panels(rows, columns)
        for (data, row), axis in axes.items():
            some = where(drawn, data=data, label=row)
            x = "cosine" if row == LAST else "epoch"
            for method in values(some, "method"):
                curve(axis, where(some, method=method), x, "value", label=method, **looks[method])
            _finish(axis, row)
        legend(drawing, np.array(list(axes.values())))
        return drawing


def _panels(rows: Sequence[str], columns: Sequence[str]) -> tuple[Drawing, dict[tuple[str, str], Axes]]:
    """Return a drawing and the axis of each column and row; one column alone is broken into two."""
    size = (3.2, 1.7)
    if len(columns) > 1 or len(rows) == 1:
        drawing, axes = grid(rows, columns, size=size)
        return drawing, {(data, row): axes[i, j] for i, row in enumerate(rows) for j, data in enumerate(columns)}
    drawing, axes = grid([""] * math.ceil(len(rows) / 2), ["", ""], size=size)
    drawing.suptitle(columns[0])
    for axis, label in zip_longest(axes.T.flat, rows):
        axis.set_ylabel(label or "")
        axis.set_visible(label is not None)
    return drawing, {(columns[0], row): axis for row, axis in zip(rows, axes.T.flat, strict=False)}


def _records(measured: str, epoch: int, means: Mapping[str, Any]) -> Iterator[Record]:
    """Yield a record of each statistic that is there."""
    for name, value in finite(means).items():
        statistic, _, task = name.partition("/")
        if statistic in STATISTICS:
            of = {"measured": measured, "epoch": epoch, "statistic": statistic}
            yield {**of, "task": task or None, "value": value}


def _label(record: Record) -> str:
    label = PANELS[record["measured"], record["statistic"]]
    return label if record["task"] is None else f"{label}\n{record['task']}"


def _shares(records: Sequence[Record]) -> Iterator[Record]:
    """Yield the share of each bin among the cosines of loss gradients, of the last snapshot of each run."""
    found = where(records, measured="snapshot", statistic="cosines")
    last = {(record["data"], record["method"], record["seed"]): record for record in found}
    for record in last.values():
        total = sum(record["value"])
        for k, count in enumerate(record["value"]):
            share = count / total if total else None
            yield {**record, "label": LAST, "cosine": (2 * k + 1) / BINS - 1.0, "value": share}


def _finish(axis: Axes, row: str) -> None:
    axis.set_xlabel("cosine of loss gradients" if row == LAST else "epoch")
    if "cosine of" in row:
        axis.axhline(0.0, color="black", linewidth=0.5)
    elif row != LAST:
        axis.set_ylim(-0.03, 1.03)
