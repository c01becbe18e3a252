"""Each task's metric when the weights are perturbed at random: figure 10 of Phan et al. (2025)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from textwrap import fill

from matplotlib.figure import Figure as Drawing

from flatmtl_bench.analysis.directions import norm
from flatmtl_bench.analysis.robustness import Scale, robustness
from flatmtl_bench.analysis.trained import trained
from flatmtl_bench.figures.base import Figure, Record
from flatmtl_bench.figures.style import curve, grid, legend, look, values, where
from flatmtl_bench.reports.columns import Column, columns
from flatmtl_bench.reports.reading import Run
from flatmtl_bench.runs import finite

RADII: dict[Scale, tuple[float, ...]] = {
    "absolute": tuple(50.0 * k for k in range(21)),
    "relative": tuple(k / 20 for k in range(21)),
    "filter": tuple(k / 20 for k in range(21)),
}
"""The radii of each scale, unless told otherwise; the absolute ones are those of the paper."""
RADIUS: dict[Scale, str] = {
    "absolute": "radius (norm of the perturbation)",
    "relative": "radius / norm of all weights",
    "filter": "radius / norm of each filter",
}
LINES = {"train": "-", "test": "--"}


@dataclass(frozen=True)
class RobustnessFigure(Figure):
    """Each task's metric on training and test data when the weights are perturbed at random."""

    radii: tuple[float, ...] = ()
    """Radii; none: 0, 50, ..., 1000 if absolute, as in the paper, which fit large nets alone; else 0, 0.05, ..., 1."""
    scale: Scale = "absolute"
    """absolute: a radius is the norm of the perturbation; relative: as a share of the norm of the weights; filter: each
    filter is changed by the radius times its own norm. Only the last two compare nets of different weight norm."""
    draws: int = 10
    """Random directions at each radius, the same for all runs of one model."""
    samples: int = 1000
    """Training samples and test samples, evenly spaced, that are held in memory."""
    seed: int = 0
    """Of the directions."""

    def measure(self, run: Run) -> Iterator[Record]:
        """Yield the first metric of each task, on each split at each radius and draw."""
        test = trained(run, "test", device=self.device)
        train = replace(trained(run, "train", device=self.device), model=test.model)  # other data, same weights
        splits = {"train": train, "test": test}
        at_hand = {split: list(model.batches(self.samples)) for split, model in splits.items()}

        def evaluate() -> dict[str, float]:
            found = {split: model.evaluate(batches=at_hand[split]) for split, model in splits.items()}
            return {f"{split}/{name}": value for split, of_split in found.items() for name, value in of_split.items()}

        radii = self.radii or RADII[self.scale]
        found = robustness(test.model, evaluate, radii, draws=self.draws, scale=self.scale, seed=self.seed)
        parameters = list(test.model.parameters())
        of_run = {
            "epoch": test.epoch,
            "scale": self.scale,
            "weight_norm": finite(norm(parameters)),
            "parameters": sum(parameter.numel() for parameter in parameters),
        }
        for radius, draws in found.items():
            for draw, numbers in enumerate(draws):
                for split, column in product(splits, _columns(run)):
                    value = column.value({name: finite(numbers[f"{split}/{name}"]) for name in column.metrics})
                    what = {"metric": column.heading, "better": column.better, "split": split}
                    yield {**of_run, **what, "radius": radius, "draw": draw, "value": value}

    def draw(self, records: Sequence[Record]) -> Drawing:
        """Return a row of panels for each task, a column for each data set."""
        metrics, names, looks = values(records, "metric"), values(records, "data"), look(records)
        better = {record["metric"]: record["better"] for record in records}
        drawing, axes = grid([f"{metric}\n{better[metric]} is better" for metric in metrics], [""] * len(names))
        for j, data in enumerate(names):
            of_data = where(records, data=data)
            axes[0, j].set_title(f"{data}\n{_weight_norms(of_data)}")
            axes[-1, j].set_xlabel(RADIUS[self.scale])
            for i, (method, split) in product(range(len(metrics)), product(values(of_data, "method"), LINES)):
                some = where(of_data, metric=metrics[i], method=method, split=split)
                style = {**looks[method], "linestyle": LINES[split]}
                curve(axes[i, j], some, "radius", "value", label=f"{method}, {split}", **style)
        legend(drawing, axes, "mean over directions and seeds; band: one standard deviation")
        return drawing


def _columns(run: Run) -> list[Column]:
    """Return the column of a result table for the first metric of each task; of many tasks that of their mean."""
    names = [f"{metric}/{task}" for task, metric in run.main.items()]
    found = columns({name: run.better[name] for name in names})
    return [column for column in found if len(column.metrics) == 1] or found


def _weight_norms(records: Sequence[Record]) -> str:
    """Return in words how long the weight vector of each method is, mean over the seeds."""
    norms: Mapping[str, float] = {
        method: fmean(values(where(records, method=method), "weight_norm")) for method in values(records, "method")
    }
    return fill("weight norm: " + ", ".join(f"{method} {value:.3g}" for method, value in norms.items()), 45)
