"""Surfaces of each task's loss around the trained weights: figure 9 of Phan et al. (2025)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure as Drawing
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch.optim.swa_utils import update_bn

from flatmtl_bench.analysis.landscape import landscape
from flatmtl_bench.analysis.trained import Trained, trained
from flatmtl_bench.choices import whole_number
from flatmtl_bench.figures.base import Figure, Record
from flatmtl_bench.figures.curves import LOSS_UNITS
from flatmtl_bench.figures.style import PANEL, values, where
from flatmtl_bench.recipes.config import Split
from flatmtl_bench.reports.reading import Run
from flatmtl_bench.runs import finite

LEVELS = 13
"""Contours of a row of panels."""
STATISTICS = {
    "none": "no BatchNorm",
    "frozen": "BatchNorm statistics frozen",
    "re-estimated": "BatchNorm statistics re-estimated at each point",
}


@dataclass(frozen=True)
class LandscapeFigure(Figure):
    """Surfaces of each task's test loss around the trained weights, along two random filter-normalised directions."""

    span: float = 1.0
    """How far the surface reaches along both directions, in norms of each filter."""
    steps: int = 10
    """Points on each side of the trained weights: 10 make 21 x 21."""
    split: Split = "test"
    """Which data."""
    samples: int = 1000
    """Samples, evenly spaced, that are held in memory."""
    batch_norm: Literal["frozen", "re-estimated"] = "frozen"
    """Statistics of BatchNorm: those of the trained weights, or at each point those of as many training samples."""
    seed: int = 0
    """Of the directions."""

    def __post_init__(self) -> None:
        whole_number("--steps", self.steps, 1)
        if not 0 < self.span < float("inf"):
            raise ValueError(f"--span must be a finite number above 0, got {self.span}. The usual one is 1.")

    def measure(self, run: Run) -> Iterator[Record]:
        """Yield the surface of each task."""
        model = trained(run, self.split, device=self.device)
        batches = list(model.batches(self.samples))
        positions = [self.span * k / self.steps for k in range(-self.steps, self.steps + 1)]
        statistics, reestimate = self._batch_norm(run, model)
        surface = landscape(
            model.model, lambda: model.evaluate(batches=batches), positions, seed=self.seed, reestimate=reestimate
        )
        of_run = {"epoch": model.epoch, "split": self.split, "samples": sum(len(inputs) for inputs, _ in batches)}
        for task, objective in model.objectives.items():
            loss = surface[f"loss/{task}"]
            centre = loss[self.steps, self.steps]
            numbers = {"centre": float(centre), "rise": float((loss - centre).mean()), "loss": loss.tolist()}
            unit = LOSS_UNITS.get(next(iter(objective.better)), "nats")
            what = {"task": task, "unit": unit, "batch_norm": statistics, "positions": positions}
            yield {**of_run, **what, **finite(numbers)}

    def _batch_norm(self, run: Run, model: Trained) -> tuple[str, Callable[[], None] | None]:
        """Return what becomes of the statistics of BatchNorm, and the function that estimates them."""
        if not any(name.endswith("running_mean") for name, _ in model.model.named_buffers()):
            return "none", None
        if self.batch_norm == "frozen":
            return "frozen", None
        inputs = [inputs for inputs, _ in trained(run, "train", device=self.device).batches(self.samples)]
        return "re-estimated", lambda: update_bn(inputs, model.model)

    def draw(self, records: Sequence[Record]) -> Drawing:
        """Return a row for each task of each data set: contours for each method, then surfaces for each."""
        rows = list(dict.fromkeys((record["data"], record["task"]) for record in records))
        methods = values(records, "method")
        size = PANEL[0] * 0.75 * 2 * len(methods) + 0.8, PANEL[1] * 0.95 * len(rows) + 0.5
        drawing = Drawing(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.1))
        for i, (data, task) in enumerate(rows):
            _draw_row(drawing, where(records, data=data, task=task), methods, i, len(rows))
        drawing.supxlabel(_caption(records, self.span, self.seed), fontsize=7)
        return drawing


def _draw_row(drawing: Drawing, records: Sequence[Record], methods: Sequence[str], row: int, rows: int) -> None:
    """Draw the surfaces of one task, of the first seed of each method, on one scale of colours and heights."""
    shown = {method: where(records, method=method)[0] for method in values(records, "method")}
    scale = _scale([record["loss"] for record in shown.values()])
    columns, axes = 2 * len(methods), []
    for method, record in shown.items():
        place = row * columns + methods.index(method) + 1
        contours = drawing.add_subplot(rows, columns, place)
        contours.set_title(f"{method}, seed {record['seed']}")
        surface = drawing.add_subplot(rows, columns, place + len(methods), projection="3d")
        surface.set_title(f"{method}: {_numbers(where(records, method=method))}", fontsize=7)
        axes += [contours, surface]
        if scale is None:
            contours.text(0.5, 0.5, "no finite loss", transform=contours.transAxes, ha="center")
            continue
        _draw_contours(contours, record, scale)
        _draw_surface(surface, record, scale)
        contours.set_xlabel("direction 1 (filter norms)" if row == rows - 1 else "")
    axes[0].set_ylabel(f"{records[0]['data']}, {records[0]['task']}\ndirection 2 (filter norms)")
    if scale is not None:
        bar = drawing.colorbar(ScalarMappable(scale, "viridis"), ax=axes, shrink=0.8, pad=0.02)
        bar.set_label(f"{records[0]['split']} loss ({records[0]['unit']})")
        losses, labels = _ticks(scale)
        bar.set_ticks(losses, labels=labels)
        bar.minorticks_off()


def _scale(surfaces: Sequence[Any]) -> Normalize | None:
    """Return the scale of colours of all finite losses, logarithmic if they are positive; None if there are none."""
    losses = np.concatenate([_array(surface).compressed() for surface in surfaces])
    if not losses.size:
        return None
    low, high = float(losses.min()), float(losses.max())
    if low <= 0:
        return Normalize(low, high if high > low else low + 1)
    return LogNorm(low, high if high > low else 2 * low)


def _array(surface: Any) -> Any:
    """Return a surface as an array in which what is None is masked."""
    return np.ma.masked_invalid(np.array(surface, dtype=float))


def _draw_contours(axis: Axes, record: Record, scale: Normalize) -> None:
    """Draw contours of one loss on levels that are evenly spaced on the scale; the cross is the trained model."""
    positions, loss = record["positions"], _array(record["loss"]).T  # the first direction goes to the right
    levels = np.asarray(scale.inverse(np.linspace(0, 1, LEVELS)))
    axis.contourf(positions, positions, loss, levels, norm=scale, cmap="viridis", extend="both")
    lines = axis.contour(positions, positions, loss, levels, colors="black", linewidths=0.4)
    axis.clabel(lines, levels[::2], fmt="%.2g", fontsize=5)
    axis.plot(0, 0, "+", color="white", markersize=6)
    axis.set_aspect("equal")
    axis.grid(visible=False)


def _draw_surface(axis: Any, record: Record, scale: Normalize) -> None:
    """Draw one loss as a surface whose height is its place on the scale."""
    x, y = np.meshgrid(record["positions"], record["positions"])
    height = scale(_array(record["loss"]).T)
    axis.plot_surface(x, y, height, cmap="viridis", vmin=0, vmax=1, rstride=1, cstride=1, linewidth=0.1, edgecolor="k")
    axis.set_zlim(0, 1)
    axis.set(xticks=(x.min(), 0, x.max()), yticks=(x.min(), 0, x.max()))
    losses, labels = _ticks(scale)
    axis.set_zticks(scale(losses), labels)
    axis.tick_params(labelsize=5, pad=-3)


def _ticks(scale: Normalize) -> tuple[Any, list[str]]:
    """Return some losses that are evenly spaced on a scale, and how they are written."""
    losses = scale.inverse(np.linspace(0, 1, 4))
    return losses, [f"{loss:.2g}" for loss in losses]


def _numbers(records: Sequence[Record]) -> str:
    """Return the loss of the model and the mean rise over the square, over the seeds, in words."""
    words = []
    for name, text in (("centre", "loss"), ("rise", "mean rise")):
        known = [record[name] for record in records if record[name] is not None]
        spread = f" ± {stdev(known):.2g}" if len(known) > 1 else ""
        words.append(f"{text} {fmean(known):.3g}{spread}" if len(known) == len(records) else f"{text}: not finite")
    return ",\n".join(words)


def _caption(records: Sequence[Record], span: float, seed: int) -> str:
    """Return what the figure shows."""
    statistics = ", ".join(STATISTICS[name] for name in values(records, "batch_norm"))
    return (
        f"Gaussian directions (seed {seed}, one draw for all), normalised to each model's filters; "
        f"{', '.join(map(str, values(records, 'samples')))} samples; {statistics}.\n"
        f"Colours and heights: one scale in each row, levels evenly spaced on it. Cross: the trained model. "
        f"Numbers: mean ± standard deviation over the seeds; rise: over the square up to {span:g}."
    )
