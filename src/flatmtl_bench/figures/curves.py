"""Loss and metric of each task over training: figures 12 and 13 of Phan et al. (2025)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator

from flatmtl_bench.analysis.trained import at_snapshots
from flatmtl_bench.checkpoints import snapshots
from flatmtl_bench.figures.base import Figure, Record
from flatmtl_bench.figures.style import curve, grid, legend, look, values, where
from flatmtl_bench.output import say
from flatmtl_bench.recipes.config import Split
from flatmtl_bench.reports.columns import SHARES, UNITS
from flatmtl_bench.reports.reading import Run
from flatmtl_bench.runs import finite

STEPS = "train, steps"
"""Mean over the steps of an epoch, in training mode while the weights change; `train` is of the weights at its end."""
METRIC_UNITS = {**UNITS, "abs_err": "in units of the depth"}
LOSS_UNITS = {"abs_err": "in units of the depth", "mean": "1 - cosine"}
"""Of the losses of depth and normals, by the first metric of the task; all others are cross-entropies, in nats."""


@dataclass(frozen=True)
class CurvesFigure(Figure):
    """Loss and main metric of each task over training; those of training data are of runs with --keep-every."""

    splits: tuple[Split, ...] = ("train", "test")
    """Which data."""
    samples: int | None = 1000
    """Training samples, evenly spaced, on which the snapshots are evaluated; None: all."""

    def __post_init__(self) -> None:
        if not self.splits or len({*self.splits}) < len(self.splits):
            raise ValueError(f"--splits names {' '.join(self.splits) or 'none'}; expected at least one, each once.")

    def measure(self, run: Run) -> Iterator[Record]:
        """Yield the loss and the first metric of each task at each epoch, on each split.

        On validation and test data they are what the run's metrics have, and so is the loss of the steps. On training
        data they are those of the snapshots, in eval mode and without augmentation.
        """
        for split, rows in self._splits(run):
            if not any(rows.values()):
                hint = " They are those of snapshots: train it with --keep-every 1." if split == "train" else ""
                say(f"{run.path} has no metrics of {split} data.{hint}")
            for epoch, found in rows.items():
                for task, name, unit, better in _quantities(run):
                    if (key := f"{name}/{task}") in found:
                        value = None if found[key] is None else found[key] * (100.0 if name in SHARES else 1.0)
                        what = {"task": task, "metric": name, "unit": unit, "better": better}
                        yield {"epoch": epoch, "split": split, **what, "value": value}

    def _splits(self, run: Run) -> Iterator[tuple[str, dict[int, dict[str, Any]]]]:
        """Yield splits, and for each epoch their metrics by name, such as ``loss/left``."""
        for split in self.splits:
            rows = {row["epoch"]: _under(f"{split}/", row) for row in run.rows}
            yield (STEPS if split == "train" else split), rows
        if "train" in self.splits:
            models = at_snapshots(run, "train", self.device) if snapshots(run.path) else ()
            yield "train", {model.epoch: finite(model.evaluate(self.samples)) for model in models}

    def draw(self, records: Sequence[Record]) -> Drawing:
        """Return a row of panels for each task and metric, and for each data set a column for each split."""
        names, tasks = values(records, "data"), values(records, "task")
        rows = [(t, m) for t in tasks for m in sorted(values(where(records, task=t), "metric"), key="loss".__eq__)]
        labels = [_label(where(records, task=task, metric=metric)[0]) for task, metric in rows]
        titles = [f"{data}, {split} data" for data in names for split in self.splits]
        drawing, axes = grid(labels, titles, size=(3.2, 1.9))
        looks = look(records)
        for i, (task, metric) in enumerate(rows):
            for j, data in enumerate(names):
                panels = axes[i, j * len(self.splits) :][: len(self.splits)]
                some = where(records, data=data, task=task, metric=metric)
                for axis, split in zip(panels, self.splits, strict=True):
                    axis.sharex(panels[0])
                    axis.sharey(panels[0])
                    _draw(axis, some, split, looks)
        for axis in axes.flat:
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        for axis in axes[-1]:
            axis.set_xlabel("epoch")
        legend(drawing, axes)
        return drawing


def _draw(axis: Axes, records: Sequence[Record], split: str, looks: Mapping[str, Any]) -> None:
    """Draw a curve for each method; of training data the steps' values, unless all runs have those of snapshots."""
    shown = where(records, split=split)
    steps = where(records, split=STEPS)
    if split == "train" and _runs(shown) != _runs(records) and steps:
        shown = steps
        _note(axis, "mean over the steps, as the weights change")
    if not shown:
        _note(axis, "not in these runs" + (": no snapshots" if split == "train" else ""))
    for method in values(shown, "method"):
        curve(axis, where(shown, method=method), "epoch", "value", label=method, **looks[method])


def _note(axis: Axes, text: str) -> None:
    axis.text(0.97, 0.97, text, transform=axis.transAxes, ha="right", va="top", fontsize=6)


def _runs(records: Sequence[Record]) -> set[tuple[str, int]]:
    """Return method and seed of the runs that records are of."""
    return {(record["method"], record["seed"]) for record in records}


def _label(record: Record) -> str:
    """Return the label of the axis of a task's metric, with unit and direction."""
    unit = f" ({record['unit']})" if record["unit"] else ""
    return f"{record['task']}: {record['metric'].replace('_', ' ')}{unit}\n{record['better']} is better"


def _quantities(run: Run) -> Iterator[tuple[str, str, str, str]]:
    """Yield of each task, loss and first metric: the task, the name, the unit, and which direction is good."""
    for task, metric in run.main.items():
        yield task, metric, METRIC_UNITS.get(metric, ""), run.better[f"{metric}/{task}"]
        yield task, "loss", LOSS_UNITS.get(metric, "nats"), "lower"


def _under(prefix: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values whose names begin so, without that."""
    return {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}
