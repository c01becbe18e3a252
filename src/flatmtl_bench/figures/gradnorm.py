"""Gradient norms and losses of each task over training: figures 2 and 15 of Phan et al. (2025)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure as Drawing

from flatmtl import SAM
from flatmtl_bench.analysis.gradients import task_gradients
from flatmtl_bench.analysis.trained import at_snapshots
from flatmtl_bench.figures.base import Figure, Record
from flatmtl_bench.figures.over_training import of_measure, over_training
from flatmtl_bench.figures.style import values, where
from flatmtl_bench.reports.reading import Run
from flatmtl_bench.runs import finite


@dataclass(frozen=True)
class GradnormFigure(Figure):
    """Training loss of each task, norm of its gradient and of its flat gradients, over training; --keep-every.

    Of runs that differ in --method.combine it compares the ways to combine loss and flat gradients.
    """

    rho: tuple[float, ...] = (0.005, 0.05, 0.5)
    """Radii of plain SAM, in the shared parameters and in the head each, whatever the run was trained with."""
    samples: int = 1000
    """Training samples, evenly spaced and not augmented, on which it is measured, in eval mode."""

    def __post_init__(self) -> None:
        if not self.rho or min(self.rho) <= 0.0:
            raise ValueError(f"--rho must be radii above 0, got {self.rho}. At 0 there is no flat gradient.")

    def measure(self, run: Run) -> Iterator[Record]:
        """Yield loss, gradient norm, flat-gradient norm and sharpness of each task at each radius and epoch.

        Norms are over the shared parameters. The gradients are those of the mean loss over all samples.
        """
        for model in at_snapshots(run, "train", self.device):
            for rho in self.rho:
                found = task_gradients(model.model, model.closures(self.samples), model.parameters, SAM(rho))
                statistics = {
                    name: finite(found.statistics()[name].tolist())
                    for name in ("loss", "norm", "norm_flat", "sharpness")
                }
                for i, task in enumerate(found.tasks):
                    yield {"epoch": model.epoch, "rho": rho, "task": task, **{k: v[i] for k, v in statistics.items()}}

    def draw(self, records: Sequence[Record]) -> Drawing:
        """Return rows of panels: loss, gradient norm, and the flat gradient's norm at each radius, as logarithms.

        So mean and deviation are those of logarithms, too: a band around means as such would reach below zero.
        """
        once = where(records, rho=records[0]["rho"])  # what does not depend on the radius
        rows = [of_measure(once, "log10 of the\ntraining loss", "loss")]
        rows += [of_measure(once, "log10 of the norm of\nthe loss gradient", "norm")]
        rows += [
            of_measure(where(records, rho=rho), f"... of the flat\ngradient, rho {rho:g}", "norm_flat")
            for rho in values(records, "rho")
        ]
        return over_training([{**record, "value": _log10(record["value"])} for row in rows for record in row])


def _log10(value: float | None) -> float | None:
    return math.log10(value) if value is not None and value > 0.0 else None
