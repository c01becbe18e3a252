"""The losses of a step's batch, seen again after the step."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flatmtl.aggregators.context import Context
from flatmtl.closures import Closure
from flatmtl.parameters import TaskParameters
from flatmtl.ranks import Ranks
from flatmtl.world import World


class Replay:
    """Where the clean passes of a step began, so that their losses can be seen again after the step.

    Args:
        parameters: who owns which parameter.
        starts: random streams and buffers, one for each closure.
        ranks: the processes whose batches are one.
    """

    def __init__(self, parameters: TaskParameters, starts: Sequence[World], ranks: Ranks) -> None:
        self._parameters = parameters
        self._starts = starts
        self._ranks = ranks

    def losses(self, closures: Sequence[Closure]) -> Context:
        """Return the losses now of what the clean passes saw: from the same random streams and buffers.

        Those that are not finite are left out; the next clean pass will tell of them.

        Raises:
            ValueError: if there are more or fewer closures than there were.
        """
        if len(closures) != len(self._starts):
            raise ValueError(
                f"after_step got {len(closures)} closures; expected the {len(self._starts)} of backward, in order."
            )
        sums: dict[str, list[Tensor]] = {}
        now = self._parameters.world(module for start in self._starts for module in start.buffers.modules)
        self._parameters.layout.drop_copies()
        try:
            with self._ranks.unwrapped():
                for start, closure in zip(self._starts, closures, strict=True):
                    for name, loss in start.run_again(closure, self._parameters.tasks).items():
                        sums.setdefault(name, []).append(loss.detach().double().cpu())
        finally:
            now.restore()
            self._parameters.layout.drop_copies()
        means = self._means(sums)
        rows = tuple(i for i in sorted(means) if math.isfinite(means[i]))
        return Context(rows, torch.tensor([float(means[i]) for i in rows], dtype=torch.float64, device="cpu"))

    def _means(self, losses: Mapping[str, Sequence[Tensor]]) -> dict[int, Tensor]:
        """Return the mean loss of each task over the closures that have it, on all ranks."""
        device = self._parameters.shared[0].device
        values = [losses.get(name, ()) for name in self._parameters.tasks]
        table = [[float(sum(some, start=torch.zeros(()))), float(len(some))] for some in values]
        totals = self._ranks.sum(torch.tensor(table, dtype=torch.float64, device=device)).cpu()
        return {i: total / count for i, (total, count) in enumerate(totals) if count > 0}
