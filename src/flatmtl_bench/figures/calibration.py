"""Calibration of class probabilities: figures 5 to 7 and tables 8 and 9 of Phan et al. (2025)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from torch import Tensor

from flatmtl_bench import assembly
from flatmtl_bench.analysis.batches import Batches
from flatmtl_bench.analysis.calibration import (
    Calibration,
    calibration,
    entropy_auroc,
    entropy_histogram,
    highest_entropy,
    pooled,
    predictive_entropies,
)
from flatmtl_bench.analysis.trained import Trained, trained
from flatmtl_bench.choices import whole_number
from flatmtl_bench.figures.base import Figure, Record
from flatmtl_bench.figures.style import curve, grid, legend, look, values, where
from flatmtl_bench.metrics import Classification
from flatmtl_bench.recipes.config import Source, Split
from flatmtl_bench.reports.comparison import spread
from flatmtl_bench.reports.reading import Run
from flatmtl_bench.runs import finite

POOLED, AVERAGE = "tasks pooled", "average of tasks"
"""What stands for a task in the records of all tasks together."""
Place = Literal["best", "lower right"]
LEAST = 10
"""Items that a bin must hold for its accuracy to be drawn; the records have it of all bins."""


@dataclass(frozen=True)
class CalibrationFigure(Figure):
    """Reliability, expected calibration error, Brier score and predictive entropy of classifiers."""

    split: Split = "test"
    """Part of the run's data, and of those out of domain, on which it is measured."""
    samples: int | None = None
    """Items of it, evenly spaced; None: all."""
    bins: int = 10
    """Bins of the confidence, of one width from 0 to 1."""
    entropy_bins: int = 20
    """Bins of the predictive entropy, of one width from 0 to the highest there is."""
    out_of_domain: tuple[str, ...] = ()
    """Data sets that models meet for the first time, e.g. multimnist multifashion; its own is none for a run."""
    out_of_domain_source: Source | None = None
    """Where those come from; None: as the run's own."""
    out_of_domain_root: str | None = None
    """Folder of those; None: that of the run's own."""

    def __post_init__(self) -> None:
        whole_number("--bins", self.bins, 1, 1001)
        whole_number("--entropy-bins", self.entropy_bins, 1, 1001)

    def measure(self, run: Run) -> Iterator[Record]:
        """Yield records of two kinds: ``reliability`` and ``entropy``, the latter of each task on each data set.

        The former are of each task, of all tasks pooled, and, scores alone, the average of the tasks.

        Raises:
            ValueError, OSError: no task of the run names a class, or there are no such data.
        """
        model = trained(run, self.split, device=self.device)
        classes = {task: len(o.classes) for task, o in model.objectives.items() if isinstance(o, Classification)}
        if not classes:
            raise ValueError(
                f"{run.path} has no task that names one of several classes, which calibration is about; its tasks: "
                f"{', '.join(model.tasks)}. Choose runs on multimnist, multifashion or multifashionmnist."
            )
        found = calibration(model.model, model.batches(self.samples), list(classes), self.bins)
        inside = {task: c.entropy for task, c in found.items()}
        for record in (*_reliability(found), *self._entropies(model, inside, classes)):
            yield {"epoch": model.epoch, "split": self.split, **record}

    def _entropies(
        self, model: Trained, inside: Mapping[str, Tensor], classes: Mapping[str, int]
    ) -> Iterator[dict[str, Any]]:
        """Yield the records of entropies in domain and out of it."""
        own = model.config.data.name
        for name in (own, *(name for name in self.out_of_domain if name != own)):
            is_own = name == own
            measured = inside if is_own else predictive_entropies(model.model, self._other(model, name), list(classes))
            for task, entropies in measured.items():
                yield {
                    "kind": "entropy",
                    "task": task,
                    "measured_on": name,
                    "mean": float(entropies.mean()),
                    "highest": highest_entropy(classes[task]),
                    "count": entropy_histogram(entropies, classes[task], self.entropy_bins),
                    "auroc": None if is_own else entropy_auroc(inside[task], entropies),
                }

    def _other(self, model: Trained, name: str) -> Batches:
        """Return other data, read as the run reads its own.

        Raises:
            ValueError: their pictures are of another shape.
        """
        config = model.config
        source, root = self.out_of_domain_source or config.source, self.out_of_domain_root or config.root
        options = replace(config.data, name=name)
        dataset = assembly.dataset(replace(config, data=options, source=source, root=root), self.split).clean
        given, expected = (tuple(data[0][0].shape) for data in (dataset, model.dataset))
        if given != expected:
            raise ValueError(
                f"the pictures of {name} are of shape {given}, those of {config.data.name} of {expected}. Give a data "
                "set with pictures of one shape to --out-of-domain."
            )
        return Batches(dataset, config.batch_size, self.samples, model.device)

    def draw(self, records: Sequence[Record]) -> Drawing:
        """Return a row of panels for each data set and task: reliability, confidence, entropies."""
        looks = look(records)
        rows = [
            (data, task)
            for data in values(records, "data")
            for task in values(where(records, data=data), "task")
            if task != AVERAGE
        ]
        measured = [values(where(records, kind="entropy", data=data, task=task), "measured_on") for data, task in rows]
        others = max(map(len, measured)) - 1
        titles = [f"reliability (bins of {LEAST} items or more)", "confidence", "predictive entropy in domain"]
        titles += ["predictive entropy out of domain"] * others
        drawing, axes = grid([f"{data}, {task}\naccuracy (%)" for data, task in rows], titles)
        for (data, task), row, names in zip(rows, axes, measured, strict=True):
            some = where(records, data=data, task=task)
            _draw_reliability(row[:2], where(some, kind="reliability"), looks)
            for axis, name in zip(row[2:], names, strict=False):
                _draw_entropy(axis, where(some, kind="entropy", measured_on=name), looks)
            for axis in row[2 + len(names) :]:
                axis.set_visible(False)
        legend(drawing, axes)
        return drawing


def _reliability(found: Mapping[str, Calibration]) -> Iterator[dict[str, Any]]:
    """Yield the records of reliability."""
    parts = {**found, **({POOLED: pooled(list(found.values()))} if len(found) > 1 else {})}
    for task, part in parts.items():
        bins = {name: finite(getattr(part, name).tolist()) for name in ("count", "accuracy", "confidence")}
        yield {"kind": "reliability", "task": task, "ece": part.ece, "brier": part.brier, **bins}
    if len(found) > 1:
        means = {name: fmean(getattr(part, name) for part in found.values()) for name in ("ece", "brier")}
        yield {"kind": "reliability", "task": AVERAGE, **means}


def _draw_reliability(axes: Sequence[Axes], records: Sequence[Record], looks: Mapping[str, Any]) -> None:
    """Draw accuracy against confidence, and how many items have which confidence."""
    bins = [part for record in records for part in _bins(record, 1.0)]
    axes[0].plot([0, 1], [0, 100], color="0.5", linewidth=0.8, linestyle=":")
    _draw(axes[0], bins, "accuracy", looks)
    _draw(axes[1], bins, "items", looks)
    axes[0].set_ylim(0, 103)
    axes[1].set_ylim(bottom=0)
    axes[1].set_ylabel("items (%)")
    for axis in axes:
        axis.set_xlim(0, 1.02)
        axis.set_xlabel("confidence (largest probability)")
    _write(axes[0], records, "ece", "ECE", "lower right")
    _write(axes[1], records, "brier", "Brier score")


def _draw_entropy(axis: Axes, records: Sequence[Record], looks: Mapping[str, Any]) -> None:
    """Draw how many items have which entropy."""
    _draw(axis, [part for record in records for part in _bins(record, record["highest"])], "items", looks)
    axis.set_xlim(0, records[0]["highest"])
    axis.set_ylim(bottom=0)
    axis.set_xlabel(f"entropy on {records[0]['measured_on']} (nats, times 1/C)")
    axis.set_ylabel("items (%)")
    if records[0]["auroc"] is None:
        _write(axis, records, "mean", "mean")
    else:
        _write(axis, records, "auroc", "AUROC, in against out")


def _bins(record: Record, width: float) -> Iterator[dict[str, Any]]:
    """Yield a record for each bin of one from 0 to ``width``, with its middle and its values in per cent."""
    counts = record["count"]
    for k, count in enumerate(counts):
        accuracy = record["accuracy"][k] if "accuracy" in record and count >= LEAST else None
        yield {
            "method": record["method"],
            "middle": width * (k + 0.5) / len(counts),
            "items": 100 * count / sum(counts),
            "accuracy": None if accuracy is None else 100 * accuracy,
        }


def _draw(axis: Axes, bins: Sequence[Record], name: str, looks: Mapping[str, Any]) -> None:
    """Draw a value against the middles of the bins, a curve for each method."""
    for method in values(bins, "method"):
        curve(axis, where(bins, method=method), "middle", name, label=method, **looks[method])


def _write(axis: Axes, records: Sequence[Record], name: str, title: str, place: Place = "best") -> None:
    """Write a number of each method into a panel, beside its line."""
    handles, methods = axis.get_legend_handles_labels()
    texts = [spread([record[name] for record in where(records, method=method)], ".3f") for method in methods]
    axis.legend(handles, texts, title=title, loc=place, fontsize=6, title_fontsize=6)
