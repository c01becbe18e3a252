"""The generalisation bound of Phan et al. (2025), term by term, as printed and corrected."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from flatmtl_bench.analysis.bound import bounds, rise_under_noise
from flatmtl_bench.analysis.trained import trained
from flatmtl_bench.figures.base import Figure, Record
from flatmtl_bench.figures.over_training import few_tasks
from flatmtl_bench.figures.style import SPREAD, grid, legend, look, mean_and_spread, values, where
from flatmtl_bench.reports.reading import Run

TERMS = {
    "loss": "training loss",
    "sharpness": "rise in the balls",
    "weights": r"$\frac{T}{2} \log(1 + |\theta|^2 / T \sigma^2) \, / \sqrt{N}$",
    "priors": r"$6 \log(N + T) \, / \sqrt{N}$",
    "confidence": r"$\log(1 / \delta)$ or $\log(m / \delta) \, / \sqrt{N}$",
    "range": r"$L^2 / 8 \sqrt{N}$",
    "constant": r"$1 / 2 \sqrt{N}$",
    "residual": "outside the balls",
    "total": "total",
}
"""Terms and their sum, and what they are called in the figure."""
FILL = {"printed": "none", "corrected": "full"}
"""How the markers of a form are filled."""


@dataclass(frozen=True)
class BoundFigure(Figure):
    """The generalisation bound of each task (theorems 1 and 4), term by term; of the epoch that counts.

    The largest loss within the balls is sought by ascent, which finds a lower bound on it, so the whole is a lower
    bound on the theorem's right side.
    """

    rho: float = 0.05
    """Radius of the ball of the shared parameters."""
    rho_heads: float | None = None
    """Radius of the ball of a task's own parameters; None: the same."""
    limit: float = 5.0
    """L: the loss of each sample is clipped to it; as a cross-entropy 5.0 is that of a probability of 0.7%."""
    delta: float = 0.05
    """Probability that the bound does not hold."""
    steps: int = 1
    """Steps of the ascent to the largest loss in the balls."""
    draws: int = 10
    """Draws of noise, each with its mirror image, that test the assumption of the theorem on the test data."""
    samples: int | None = None
    """Training samples, evenly spaced, that make up the training set, and test samples; None: all."""
    seed: int = 0
    """Of the noise."""

    def measure(self, run: Run) -> Iterator[Record]:
        """Yield the bound of each task in both forms, with what noise does to its test loss."""
        train, test = (trained(run, split, None, self.device) for split in ("train", "test"))
        found = bounds(
            train.model,
            train.batches(self.samples),
            train.losses,
            train.parameters,
            self.rho,
            rho_heads=self.rho_heads,
            limit=self.limit,
            delta=self.delta,
            steps=self.steps,
        )
        sigma = next(iter(found.values()))["corrected"].sigma
        rises = rise_under_noise(
            test.model,
            test.batches(self.samples),
            test.losses,
            test.parameters,
            sigma,
            limit=self.limit,
            draws=self.draws,
            seed=self.seed,
        )
        for task, forms in found.items():
            rise = rises[task]
            tested = {"rise": rise.mean, "rise_error": rise.error, "assumption": rise.verdict}
            for form, bound in forms.items():
                whole = {"total": bound.total, "vacuous": bound.vacuous, "largest_loss": "lower bound, by ascent"}
                yield {"epoch": train.epoch, "task": task, "form": form, **asdict(bound), **whole, **tested}

    def draw(self, records: Sequence[Record]) -> Drawing:
        """Return for each data set a row and for each task a column, in which each term has a line."""
        terms = few_tasks([term for record in records for term in _terms(record)])
        rows, looks = values(records, "data"), look(records)
        widest = max(len(values(where(terms, data=data), "task")) for data in rows)
        drawing, axes = grid(rows, [""] * widest, size=(3.4, 3.4))
        for i, data in enumerate(rows):
            tasks = values(where(terms, data=data), "task")
            for j, task in enumerate(tasks):
                _draw_bound(axes[i, j], where(terms, data=data, task=task), looks)
                axes[i, j].set_title(task)
                axes[i, j].set_yticks(range(len(TERMS)), list(TERMS.values()) if j == 0 else [])
            for axis in axes[i, len(tasks) :]:
                axis.set_visible(False)
        legend(drawing, axes, f"{SPREAD}\ndotted: L, which no loss exceeds")
        return drawing


def _terms(record: Record) -> Iterator[Record]:
    """Yield the terms of a bound and their sum, each as the ``value`` of a record with its ``line`` in the figure."""
    whose = {name: record[name] for name in ("data", "method", "flat", "seed", "task", "form", "limit")}
    sizes = {**record["terms"], "total": record["total"]}
    return ({**whose, "line": line, "value": sizes[name]} for line, name in enumerate(TERMS))


def _draw_bound(axis: Axes, terms: Sequence[Record], looks: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw one task: a line for each term, on it the mean over the seeds of each method and form."""
    series = [(method, form) for method in values(terms, "method") for form in FILL]
    limit, vacuous = terms[0]["limit"], []
    for k, (method, form) in enumerate(series):
        own = where(terms, method=method, form=form)
        lines, means, spreads = mean_and_spread(own, "line", "value")
        places = [line + 0.7 * ((k + 0.5) / len(series) - 0.5) for line in lines]
        marks = {**looks[method], "linestyle": "", "fillstyle": FILL[form], "markersize": 3.5, "capsize": 2.0}
        axis.errorbar(means, places, xerr=spreads, label=f"{method}, {form}", **marks)
        if all(total["value"] >= limit for total in own if total["line"] == len(TERMS) - 1):
            vacuous.append(f"{method}, {form}")
    text = "vacuous" if len(vacuous) == len(series) else "\n".join(["vacuous:", *vacuous])
    if vacuous:
        axis.text(0.03, len(TERMS) - 1, text, transform=axis.get_yaxis_transform(), va="center", fontweight="bold")
    axis.axvline(limit, color="black", linewidth=1.0, linestyle=":")
    axis.annotate("L", (limit, -0.5), (2, 0), textcoords="offset points", va="center")
    axis.set_xscale("log", nonpositive="mask")
    axis.set_ylim(len(TERMS) - 0.4, -0.7)
    axis.set_xlabel("size of the term (unit of the loss)")
