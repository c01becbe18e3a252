r"""Loss and flat gradients aggregated apart against SAM gradients aggregated: theorem 5 of Phan et al. (2025).

For task ``i`` let :math:`h_i = l_i + \rho \, |\nabla l_i|` be its loss plus the gradient's norm, on the shared
parameters, the heads fixed. With loss gradients :math:`g_i`, flat gradients :math:`f_i` and the directions

.. math::
    d_{loss} = A(g_1, \dots, g_m), \quad d_{flat} = A(f_1, \dots, f_m), \quad
    d_{direct} = A(g_1 + f_1, \dots, g_m + f_m)

the theorem says: if no :math:`\langle d_{flat}, g_i \rangle` and no :math:`\langle d_{loss}, f_i \rangle` is positive
(the *premise*), a small step along :math:`d_{loss} + d_{flat}` leaves every :math:`h_i` at most as large as one along
:math:`d_{direct}` (the *conclusion*). Its proof bounds the decrease of :math:`h_i` from above where it would have to
bound it from below, so whether the conclusion holds is a question to measurements.

A convention: :math:`f_i = \nabla l_i(\theta + \rho \, g_i / |g_i|) - g_i`, as in training. To first order it is
:math:`\rho` times the gradient of :math:`|\nabla l_i|`, which the theorem calls the flat gradient; so
:math:`g_i + f_i` is the gradient of :math:`h_i`.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatmtl import SAM, TaskParameters
from flatmtl.aggregators import Context
from flatmtl_bench.analysis.batches import Closure
from flatmtl_bench.analysis.directions import move, norm
from flatmtl_bench.analysis.gradients import task_gradients
from flatmtl_bench.analysis.untouched import untouched

ROUNDING = 8.0
"""Differences of up to so many rounding errors are taken for none."""


@dataclass(frozen=True)
class Comparison:
    """One step of each kind from the same weights, on one mini-batch; a number for each task that has labels in it.

    Attributes:
        tasks: their names.
        flat_on_loss: inner products of the direction of the flat gradients and each loss gradient.
        loss_on_flat: inner products of the direction of the loss gradients and each flat gradient.
        decomposed: change of loss plus rho times gradient norm, by the step along both directions' sum.
        direct: the same by the step along the direction of the SAM gradients.
        decomposed_predicted: ``decomposed`` to first order in the learning rate.
        direct_predicted: ``direct`` to first order.
        holds: whether ``decomposed`` is at most ``direct``, up to rounding.
        predicted: whether ``decomposed_predicted`` is at most ``direct_predicted``, up to rounding.
    """

    tasks: tuple[str, ...]
    flat_on_loss: tuple[float, ...]
    loss_on_flat: tuple[float, ...]
    decomposed: tuple[float, ...]
    direct: tuple[float, ...]
    decomposed_predicted: tuple[float, ...]
    direct_predicted: tuple[float, ...]
    holds: tuple[bool, ...]
    predicted: tuple[bool, ...]

    @property
    def premise(self) -> bool:
        """Whether the theorem speaks of this mini-batch."""
        return all(product <= 0.0 for product in (*self.flat_on_loss, *self.loss_on_flat))

    @property
    def conclusion(self) -> bool:
        """Whether the step with the decomposition is the better one for every task."""
        return all(self.holds)

    @property
    def conclusion_predicted(self) -> bool:
        """Whether it is to first order."""
        return all(self.predicted)


def decomposition(
    model: nn.Module,
    closures: Sequence[Closure],
    parameters: TaskParameters,
    aggregator: Any,
    rho: float,
    lr: float,
) -> list[Comparison]:
    """Return what theorem 5 is about for each mini-batch; those without any label are left out.

    From the same weights it takes a step of plain gradient descent on the shared parameters along either direction,
    with the model in eval mode, and puts the weights back. It holds ``2 m n`` numbers for ``m`` tasks and ``n`` shared
    parameters, beyond what a step holds. The model is left as it was.

    Args:
        model: whose losses the closures return.
        closures: of mini-batches.
        parameters: who owns which parameter; the heads stay fixed.
        aggregator: of the task gradients, as :class:`flatmtl.FlatMTL` takes; each use is of a copy, so that none
            learns from another. One that is not of degree 1 is used as printed, like ``flat_scale="raw"``.
        rho: radius for the shared parameters, positive.
        lr: learning rate, positive; the smaller, the nearer to the prediction.

    Raises:
        ValueError: for a radius or learning rate that is not positive, or no mini-batch with labels.
        FloatingPointError: a loss or gradient is not finite.

    Example:
        >>> from flatmtl.aggregators import MGDA
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, 1.0)
        >>> bowls = {"wide": torch.tensor([1.0, 0.0]), "steep": torch.tensor([1.0, 9.0])}
        >>> def closure(tasks):
        ...     return {task: (bowls[task] * model.weight**2).sum() / 2 for task in tasks}
        >>> own = TaskParameters(model.parameters(), {task: [] for task in bowls}, model)
        >>> [found] = decomposition(model, [closure], own, MGDA(), rho=0.1, lr=0.01)
        >>> found.premise, [round(change, 4) for change in found.direct]
        (False, [-0.012, -0.012])
    """
    for name, value in (("rho", rho), ("lr", lr)):
        if not (math.isfinite(value) and value > 0.0):
            raise ValueError(f"{name} must be a positive number, got {value}. With 0 there is nothing to compare.")
    with untouched(model):
        found = [_compared(model, closure, parameters, aggregator, rho, lr) for closure in closures]
    known = [comparison for comparison in found if comparison is not None]
    if not known:
        raise ValueError(f"none of {len(closures)} mini-batches has a label; expected at least one. Take more samples.")
    return known


def _compared(
    model: nn.Module, closure: Closure, parameters: TaskParameters, aggregator: Any, rho: float, lr: float
) -> Comparison | None:
    """Return the comparison on one mini-batch; None if it has no label."""
    rows: list[Tensor] = []

    def take(J: Tensor) -> Tensor:
        """Take the rows of the loss gradients, then those of the flat ones, and aggregate them somehow."""
        rows.append(J.clone())
        return J.sum(dim=0)

    result = task_gradients(model, [closure], parameters, SAM(rho, rho_heads=0.0), aggregator=take)
    if result.skipped:
        return None
    present = [i for i, loss in enumerate(result.losses.tolist()) if not math.isnan(loss)]
    context = Context(tuple(present), result.losses[present])

    def direction(J: Tensor) -> Tensor:
        own = copy.deepcopy(aggregator)
        d = own(J, context) if getattr(own, "uses_context", False) else own(J)
        return d.detach().clone()  # it may be one of the rows

    def objectives() -> Tensor:
        """Return loss, and rho times gradient norm, of each task."""
        found = task_gradients(model, [closure], parameters)
        assert found.norms is not None
        return torch.stack([found.losses, rho * found.norms])[:, present]

    g, f = rows
    loss, flat = direction(g), direction(f)
    flat_on_loss, loss_on_flat = _products(g, flat), _products(f, loss)
    sam = f.add_(g)
    steps = loss + flat, direction(sam)
    before, changes = objectives(), []
    kept = [weight.detach().clone() for weight in parameters.shared]
    for d in steps:
        parts = d.split([weight.numel() for weight in kept])
        move(parameters.shared, kept, (-lr, [part.view_as(weight) for part, weight in zip(parts, kept, strict=True)]))
        changes.append((objectives() - before).sum(dim=0))
    move(parameters.shared, kept)
    predictions = [-lr * _products(sam, d) for d in steps]
    lengths = torch.tensor([norm([row]) for row in sam], dtype=torch.float64)
    longest = max(norm([d]) for d in steps)
    # Weights are rounded, too: by their usual size, which counts as far as the objective depends on them.
    size = before.abs().sum(dim=0) + _usual_size(parameters.shared) * lengths
    unit = ROUNDING * torch.finfo(sam.dtype).eps
    return Comparison(
        tasks=tuple(result.tasks[i] for i in present),
        flat_on_loss=tuple(flat_on_loss.tolist()),
        loss_on_flat=tuple(loss_on_flat.tolist()),
        decomposed=tuple(changes[0].tolist()),
        direct=tuple(changes[1].tolist()),
        decomposed_predicted=tuple(predictions[0].tolist()),
        direct_predicted=tuple(predictions[1].tolist()),
        holds=_at_most(*changes, rounding=unit * size),
        predicted=_at_most(*predictions, rounding=unit * lr * longest * lengths),
    )


def _usual_size(weights: Sequence[Tensor]) -> float:
    """Return the root of the mean square over all entries."""
    return norm(weights) / math.sqrt(sum(weight.numel() for weight in weights))


def _products(J: Tensor, d: Tensor) -> Tensor:
    """Return the inner product of each row and a direction, in float64 on the CPU."""
    return torch.stack([torch.dot(row.double(), d.double()) for row in J]).cpu()


def _at_most(a: Tensor, b: Tensor, *, rounding: Tensor) -> tuple[bool, ...]:
    """Return for each task whether one number is at most the other, up to rounding."""
    return tuple((a <= b + rounding).tolist())
