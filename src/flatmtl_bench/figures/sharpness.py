"""Sharpness of each task over training: figure 14 of Phan et al. (2025)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure as Drawing

from flatmtl_bench.analysis.sharpness import sharpness
from flatmtl_bench.analysis.trained import at_snapshots
from flatmtl_bench.figures.base import Figure, Record
from flatmtl_bench.figures.over_training import of_measure, over_training
from flatmtl_bench.figures.style import values, where
from flatmtl_bench.reports.reading import Run
from flatmtl_bench.runs import finite


@dataclass(frozen=True)
class SharpnessFigure(Figure):
    """How far each task's training loss rises within a radius, over training; runs need --keep-every."""

    rho: tuple[float, ...] = (0.005, 0.05, 0.5)
    """Radii of plain SAM, in the shared parameters and in the head each, whatever the run was trained with."""
    steps: int = 1
    """Steps of gradient ascent: 1 is the paper's; of several the largest rise on their path counts."""
    samples: int = 1000
    """Training samples, evenly spaced and not augmented, on which it is measured, in eval mode."""

    def measure(self, run: Run) -> Iterator[Record]:
        """Yield the sharpness of each task at each radius and epoch."""
        for model in at_snapshots(run, "train", self.device):
            for rho in self.rho:
                closures = model.closures(self.samples)
                found = finite(sharpness(model.model, closures, model.parameters, rho, steps=self.steps))
                yield from (
                    {"epoch": model.epoch, "rho": rho, "task": t, "sharpness": value} for t, value in found.items()
                )

    def draw(self, records: Sequence[Record]) -> Drawing:
        """Return a row of panels for each radius, and for each task a column or, with several data sets, a row."""
        name = "sharpness" if self.steps == 1 else f"sharpness, {self.steps} steps"
        rows = [
            of_measure(where(records, rho=rho), f"{name}\n(loss), rho {rho:g}", "sharpness")
            for rho in values(records, "rho")
        ]
        return over_training([record for row in rows for record in row])
