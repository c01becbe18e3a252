"""Conflict: how the gradients of tasks, and those of loss and flatness, stand to each other from batch to batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatmtl import SAM, Monitor, TaskParameters
from flatmtl_bench.analysis.batches import Closure
from flatmtl_bench.analysis.gradients import task_gradients
from flatmtl_bench.randomness import derived_seed

BINS = 20
"""Bins of the cosines from -1 to 1, of one width."""


@dataclass(frozen=True)
class Conflict:
    """What mini-batches tell of conflict, plain and flat models alike.

    Attributes:
        means: over the mini-batches, under the names of :meth:`flatmtl.StepResult.statistics`: ``conflict`` is the
            share of pairs of tasks whose loss gradients have a negative inner product, with two tasks the share of
            mini-batches; ``cosine`` the mean cosine of the pairs; ``conflict_flat`` and ``cosine_flat`` are those of
            the flat gradients; ``intra_conflict/<task>`` is the share of mini-batches in which a task's loss gradient
            and flat gradient conflict, ``inter_conflict/<task>`` that in which its flat gradient and the direction of
            the loss gradients do. NaN where no mini-batch has such a value, as of pairs with one task.
        cosines: pairs of loss gradients of all mini-batches by their cosine, numbers in ``BINS`` equal bins from -1
            to 1; a zero gradient has none.
        cosines_flat: those of flat gradients.
    """

    means: Mapping[str, float]
    cosines: Sequence[int]
    cosines_flat: Sequence[int]


def conflict(
    model: nn.Module,
    closures: Sequence[Closure],
    parameters: TaskParameters,
    perturbation: SAM | None,
    *,
    aggregator: Any = None,
    seed: int = 0,
) -> Conflict:
    """Return what the gradients on single mini-batches tell of conflict, the model in training mode as in a step.

    The flat gradients are those of Phan et al. (2025), whatever the model was trained by: SAM gradient minus loss
    gradient, each at the worst case of one task. The model is left as it was: no step is made, and every mini-batch
    finds it in the same state.

    Args:
        model: whose losses the closures return.
        closures: one for each mini-batch, loaded as it is called.
        parameters: who owns which parameter.
        perturbation: of the flat gradients; None: there are none.
        aggregator: whose direction of the loss gradients ``inter_conflict`` is about, as it is at first if it has a
            state; None: the mean.
        seed: of what the model draws from torch, as dropout does; each mini-batch has its own.

    Raises:
        ValueError: there is no mini-batch.
        FloatingPointError: naming a task whose loss or gradient is not finite.

    References:
        - Yu et al. (2020), *Gradient surgery for multi-task learning*, NeurIPS: the conflict of two gradients.
        - Phan et al. (2025), *Beyond losses reweighting: empowering multi-task learning via the generalization
          perspective*, ICCV: intra- and inter-conflict.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> def batch(x, y):
        ...     return lambda tasks: {t: (model(torch.tensor(x[t])) - y[t]).square().sum() for t in tasks}
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> x = {"left": [1.0, 0.0], "right": [0.6, 0.8]}
        >>> batches = [batch(x, {"left": 1.0, "right": 1.0}), batch(x, {"left": 1.0, "right": -1.0})]
        >>> found = conflict(model, batches, TaskParameters(model.parameters(), {"left": [], "right": []}), SAM(0.1))
        >>> found.means["conflict"], round(found.means["cosine"], 4), found.means["intra_conflict/left"]
        (0.5, 0.0, 0.0)
    """
    if not closures:
        raise ValueError("there is no mini-batch; expected the closure of at least one.")
    monitor, counts, counts_flat = Monitor(), torch.zeros(BINS), torch.zeros(BINS)
    for number, closure in enumerate(closures):
        options = {"aggregator": aggregator, "training": True, "seed": derived_seed(seed, number)}
        result = task_gradients(model, [closure], parameters, perturbation, **options)
        monitor.update(result)
        counts += _histogram(result.cosines)
        counts_flat += _histogram(result.cosines_flat)
    return Conflict(monitor.compute(), counts.int().tolist(), counts_flat.int().tolist())


def _histogram(cosines: Tensor | None) -> Tensor:
    """Return how many pairs of tasks have a cosine in each bin."""
    if cosines is None:
        return torch.zeros(BINS)
    pairs = cosines[torch.ones_like(cosines, dtype=torch.bool).triu(1)]
    return torch.histc(pairs[~pairs.isnan()].float(), BINS, -1.0, 1.0)
