"""How often premise and conclusion of theorem 5 of Phan et al. (2025) hold on mini-batches, over training."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator

from flatmtl_bench import assembly
from flatmtl_bench.analysis.decomposition import Comparison, decomposition
from flatmtl_bench.analysis.trained import at_snapshots, trained
from flatmtl_bench.checkpoints import snapshots
from flatmtl_bench.figures.base import Figure, Record
from flatmtl_bench.figures.style import curves, values
from flatmtl_bench.reports.reading import Run

SHARES = {
    "premise": "premise\n(share of batches)",
    "conclusion": "conclusion\n(share of batches)",
    "conclusion_where_premise": "conclusion, given the\npremise (share)",
}
"""What is drawn, and what it is called."""


@dataclass(frozen=True)
class DecompositionFigure(Figure):
    """How often theorem 5 applies, and is right where it does, by the run's aggregator; at each snapshot of a run.

    A run without snapshots (--keep-every) is measured at the epoch that counts.
    """

    rho: float = 0.05
    """Radius in the shared parameters, of plain and flat runs alike."""
    lr: float = 0.01
    """Learning rate of the one step of gradient descent."""
    batches: int = 20
    """Mini-batches of the training data, of the run's batch size, evenly spaced."""

    def measure(self, run: Run) -> Iterator[Record]:
        """Yield the shares at each epoch."""
        kept = snapshots(run.path)
        for model in at_snapshots(run, "train", self.device) if kept else [trained(run, "train", device=self.device)]:
            closures = model.closures(self.batches * run.config.batch_size)
            aggregator = assembly.flat_mtl(run.config, len(model.tasks)).aggregator
            found = decomposition(model.model, closures, model.parameters, aggregator, self.rho, self.lr)
            yield {"epoch": model.epoch, **shares(found)}

    def draw(self, records: Sequence[Record]) -> Drawing:
        """Return a row of panels for each share, a column for each data set."""
        rows = [{**r, "what": text, "share": r[name]} for r in records for name, text in SHARES.items()]
        epochs = values(records, "epoch")

        def prepare(axis: Axes) -> None:
            axis.set_ylim(-0.05, 1.05)
            axis.set_xlim(min(epochs) - 0.5, max(epochs) + 0.5)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            if not any(np.size(line.get_xdata()) for line in axis.lines):
                axis.text(0.5, 0.5, "no batch with the premise", transform=axis.transAxes, ha="center", va="center")

        text = {"xlabel": "epoch", "ylabel": "", "rows": "what"}
        return curves(rows, "epoch", "share", **text, size=(3.2, 1.8), prepare=prepare)


def shares(found: Sequence[Comparison]) -> dict[str, Any]:
    """Return the shares of mini-batches in which premise and conclusion hold, and the mean changes of each task.

    The conclusion is counted as measured and, as ``..._predicted``, to first order in the learning rate; a share of no
    mini-batch is None.
    """
    with_premise = [comparison for comparison in found if comparison.premise]
    return {
        "batches": len(found),
        "batches_with_premise": len(with_premise),
        "premise": len(with_premise) / len(found),
        "conclusion": _share([c.conclusion for c in found]),
        "conclusion_predicted": _share([c.conclusion_predicted for c in found]),
        "conclusion_where_premise": _share([c.conclusion for c in with_premise]),
        "conclusion_predicted_where_premise": _share([c.conclusion_predicted for c in with_premise]),
        "tasks": {task: _of_task(task, found) for task in dict.fromkeys(t for c in found for t in c.tasks)},
    }


def _of_task(task: str, found: Sequence[Comparison]) -> Mapping[str, float | None]:
    """Return how one task fares: mean changes of loss plus rho times gradient norm, and how often apart is better."""
    own = [(c, c.tasks.index(task)) for c in found if task in c.tasks]
    return {
        "conclusion": _share([c.holds[i] for c, i in own]),
        "conclusion_where_premise": _share([c.holds[i] for c, i in own if c.premise]),
        "decomposed": fmean(c.decomposed[i] for c, i in own),
        "direct": fmean(c.direct[i] for c, i in own),
    }


def _share(holds: Sequence[bool]) -> float | None:
    return fmean(holds) if holds else None
