r"""The generalisation bound of flat multi-task learning, term by term: theorems 1 and 4 of Phan et al. (2025).

With probability :math:`1 - \delta` over a training set of :math:`N` samples, for every task ``i`` at once,

.. math::
    L_D^i(\theta^i) \le \max_{|\epsilon_{sh}| \le \rho_{sh}} \max_{|\epsilon_{ns}| \le \rho_{ns}}
    L_S^i(\theta_{sh} + \epsilon_{sh}, \theta_{ns}^i + \epsilon_{ns}) + f^i,

where losses lie between 0 and :math:`L`, task ``i`` has :math:`T_i` parameters :math:`\theta^i`, shared and its own,
Gaussian noise of variance :math:`\sigma^2` on them does not lower the test loss, and

.. math::
    f^i = \frac{1}{\sqrt N} \Big[ \frac12 + \frac{T_i}{2} \log \Big( 1 + \frac{|\theta^i|^2}{T_i \sigma^2} \Big)
    + \log \frac{m}{\delta} + 6 \log(N + T_i) + \frac{L^2}{8} \Big]
    + L \Big[ 1 - \Big( 1 - \frac{1}{\sqrt N} \Big)^2 \Big].

This is the *corrected* form. The one *printed* in the paper differs in three places: :math:`\log(1 / \delta)` although
``m`` bounds shall hold at once, the norm of all parameters, other heads included, and
:math:`(1 - 1 / \sqrt N) L / \sqrt N + 1 / \sqrt N` at the end, which is too little for :math:`L > 1`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from flatmtl import TaskParameters
from flatmtl_bench.analysis.batches import Batch, Losses, closures
from flatmtl_bench.analysis.directions import move, norm
from flatmtl_bench.analysis.sharpness import sharpness
from flatmtl_bench.analysis.untouched import untouched
from flatmtl_bench.choices import one_of

Form = Literal["printed", "corrected"]
"""The formula in the paper's print, or as its proof supports it; see the module."""


@dataclass(frozen=True)
class Bound:
    """The right side of the bound for one task.

    Attributes:
        terms: what it is the sum of, by name, in the unit of the loss. ``loss`` and ``sharpness`` are the largest loss
            found in the balls, in two parts; ``weights`` is the term with the norm of the parameters, ``confidence``
            that with delta, ``priors`` the one with N + T, ``range`` the one with L squared, ``constant`` that of one
            half, ``residual`` what lies outside the balls.
        samples: N.
        size: T, the number of the task's parameters.
        norm: of the parameters, those of the task or in print all.
        sigma: standard deviation of the noise.
        limit: L.
    """

    terms: Mapping[str, float]
    samples: int
    size: int
    norm: float
    sigma: float
    limit: float

    @property
    def total(self) -> float:
        """The sum of the terms; a lower bound on it, since the largest loss found is not the largest that there is."""
        return math.fsum(self.terms.values())

    @property
    def vacuous(self) -> bool:
        """Whether the bound says nothing: no loss exceeds L anyway."""
        return self.total >= self.limit


def bounds(
    model: nn.Module,
    batches: Sequence[Batch],
    losses: Losses,
    parameters: TaskParameters,
    rho: float,
    *,
    rho_heads: float | None = None,
    limit: float,
    delta: float = 0.05,
    steps: int = 1,
) -> dict[str, dict[Form, Bound]]:
    """Return the bound of every task in both forms, the model in eval mode.

    The batches are the training set: a part of it chosen without regard to the pictures is a training set as well,
    with a smaller N. The loss of each sample is clipped to [0, L]; one without a label of a task does not count for it.
    The largest loss in the balls is sought by ascent along the task's gradient, which finds a lower bound on it. Sigma
    is the largest that the proof allows; where tasks have labels of different numbers of samples, for the largest of
    these numbers. The model is left as it was.

    Args:
        model: ``model(inputs, tasks) -> {task: output}``.
        batches: the training set.
        losses: of each task; for one sample at a time its loss.
        parameters: who owns which parameter; those of nobody are constants.
        rho: radius of the ball of the shared parameters, positive.
        rho_heads: radius of that of a task's own; ``None``: the same.
        limit: L, to which losses are clipped, in their unit.
        delta: probability that the bound does not hold.
        steps: of ascent; see :func:`~flatmtl_bench.analysis.sharpness.sharpness`.

    Raises:
        ValueError: for radii or a limit that are not positive, a delta outside (0, 1), or a task without labels.
        FloatingPointError: a loss or a gradient is not finite.
    """
    rho_heads = rho if rho_heads is None else rho_heads
    _check(delta=delta, rho=rho, rho_heads=rho_heads, limit=limit)
    with untouched(model):
        means = _means(model, batches, losses, parameters.tasks, limit)
    of_parts = closures(model, batches, _each_sample_the_same(losses, means, limit))
    rises = sharpness(model, of_parts, parameters, rho, rho_heads=rho_heads, steps=steps)
    samples = max(mean.samples for mean in means.values())
    own = {task: sum(p.numel() for p in head) for task, head in parameters.heads.items()}
    shared = sum(p.numel() for p in parameters.shared)
    sigma = largest_sigma(rho, rho_heads, shared, list(own.values()), samples)
    found: dict[str, dict[Form, Bound]] = {}
    for task in parameters.tasks:
        mean, size = means[task], shared + own[task]
        measured = {"loss": mean.value, "sharpness": max(rises[task], 0.0)}  # the weights lie in the balls, too
        found[task] = {}
        for form in get_args(Form):
            everything = form == "printed"
            length = norm(parameters.everything if everything else [*parameters.shared, *parameters.heads[task]])
            terms = penalty(form, mean.samples, size, length, sigma, limit, delta, len(parameters.tasks))
            found[task][form] = Bound({**measured, **terms}, mean.samples, size, length, sigma, limit)
    return found


def penalty(
    form: Form, samples: int, size: int, norm: float, sigma: float, limit: float, delta: float, tasks: int
) -> dict[str, float]:
    r"""Return the terms of :math:`f^i`; see the module.

    Args:
        form: the formula.
        samples: N.
        size: T, the number of the task's parameters.
        norm: of the parameters.
        sigma: standard deviation of the noise.
        limit: L.
        delta: probability that the bound does not hold.
        tasks: m, for how many tasks it shall hold.

    Example:
        >>> found = penalty("corrected", 10_000, 100, norm=3.0, sigma=0.1, limit=2.0, delta=0.05, tasks=2)
        >>> {name: round(value, 3) for name, value in found.items()}
        {'weights': 1.151, 'confidence': 0.037, 'priors': 0.553, 'range': 0.005, 'constant': 0.005, 'residual': 0.04}
    """
    one_of("form", form, get_args(Form))
    corrected, share = form == "corrected", 1.0 / math.sqrt(samples)
    # In logarithms: the ratio of the squares itself leaves float64 for radii that are legal.
    ratio = 2.0 * (math.log(norm) - math.log(sigma)) - math.log(size) if norm else -math.inf
    inside = (1.0 - share) ** 2  # at least so probable is noise within both balls
    return {
        "weights": share * size / 2.0 * float(np.logaddexp(0.0, ratio)),
        "confidence": share * (math.log(tasks if corrected else 1) - math.log(delta)),
        "priors": share * 6.0 * math.log(samples + size),
        "range": share * limit**2 / 8.0,
        "constant": share / 2.0,
        "residual": limit * (1.0 - inside) if corrected else (1.0 - share) * share * limit + share,
    }


def largest_sigma(rho: float, rho_heads: float, shared: int, heads: Sequence[int], samples: int) -> float:
    r"""Return the largest :math:`\sigma` that the proof allows.

    Noise :math:`\epsilon \sim N(0, \sigma^2)` must lie in each ball with probability above :math:`1 - 1 / \sqrt N`,
    for which :math:`\sigma \sqrt{T + 2 \sqrt{T t} + 2 t} \le \rho` with :math:`t = \log \sqrt N` suffices (Laurent and
    Massart 2000).

    Args:
        rho: radius of the ball of the shared parameters.
        rho_heads: radius of the balls of the heads.
        shared: number of shared parameters.
        heads: number of own parameters of each task; a task without any sets no condition.
        samples: N.

    References:
        - Laurent and Massart (2000), *Adaptive estimation of a quadratic functional by model selection*, Ann. Stat. 28.

    Example:
        >>> largest_sigma(0.5, 0.5, shared=25, heads=[0, 0], samples=1)
        0.1
    """
    t = math.log(samples) / 2.0
    balls = [(rho, shared), *((rho_heads, size) for size in heads if size)]
    return min(radius / math.sqrt(size + 2.0 * math.sqrt(size * t) + 2.0 * t) for radius, size in balls)


@dataclass(frozen=True)
class Rise:
    """How far Gaussian noise on the parameters raises a loss in the mean.

    Attributes:
        mean: over the draws.
        error: its standard error; that of the draws, for the samples at hand.
    """

    mean: float
    error: float

    @property
    def verdict(self) -> Literal["holds", "fails", "undecided"]:
        """Whether noise does not lower the loss, by two standard errors."""
        if self.mean >= 2.0 * self.error:
            return "holds"
        return "fails" if self.mean < -2.0 * self.error else "undecided"


def rise_under_noise(
    model: nn.Module,
    batches: Sequence[Batch],
    losses: Losses,
    parameters: TaskParameters,
    sigma: float,
    *,
    limit: float,
    draws: int = 10,
    seed: int = 0,
) -> dict[str, Rise]:
    r"""Return the mean rise :math:`E L_i(\theta + \epsilon) - L_i(\theta)` of each task's loss under noise.

    The noise is :math:`\epsilon \sim N(0, \sigma^2)` in every entry of the shared parameters and the task's own. That
    the rise is not negative on test data is what the bound assumes. Each draw is taken with its mirror image
    :math:`-\epsilon`, which leaves the mean as it is and cancels the slope of the loss: the error is much smaller. The
    model is in eval mode, and left as it was.

    Args:
        model: ``model(inputs, tasks) -> {task: output}``.
        batches: test data.
        losses: of each task.
        parameters: those that get noise.
        sigma: standard deviation of the noise, positive.
        limit: L, to which losses are clipped.
        draws: of the noise, each with its mirror image; at least two, or there is no standard error.
        seed: of the noise.

    Raises:
        ValueError: for an impossible number, or a task without labels.
        FloatingPointError: a loss is not finite.
    """
    _check(sigma=sigma, limit=limit)
    if draws < 2:
        raise ValueError(f"got {draws} draws of noise; expected at least 2, or there is no standard error.")
    generator = torch.Generator().manual_seed(seed)
    weights, tasks = parameters.everything, parameters.tasks
    rises: dict[str, list[float]] = {task: [] for task in tasks}
    with untouched(model), torch.no_grad():
        kept = [weight.clone() for weight in weights]
        clean = _means(model, batches, losses, tasks, limit)
        for _ in range(draws):
            noise = [torch.randn(weight.shape, generator=generator).to(weight) for weight in weights]
            moved = []
            for signed in (sigma, -sigma):
                move(weights, kept, (signed, noise))
                moved.append(_means(model, batches, losses, tasks, limit))
            for task in tasks:
                rises[task].append(fmean(means[task].value for means in moved) - clean[task].value)
    return {task: Rise(fmean(some), stdev(some) / math.sqrt(draws)) for task, some in rises.items()}


def clip(losses: Losses, limit: float) -> Losses:
    """Return the losses with that of each sample clipped to [0, limit]: means over the samples that have a label.

    Example:
        >>> squares = clip({"size": nn.functional.mse_loss}, limit=4.0)["size"]
        >>> squares(torch.tensor([1.0, 2.0, 30.0]), torch.zeros(3))
        tensor(3.)
    """

    def clipped(task: str) -> Callable[[Tensor, Tensor], Tensor | None]:
        def loss(output: Tensor, target: Tensor) -> Tensor | None:
            found = _of_samples(losses, task, output, target, limit)
            return found.mean() if len(found) else None

        return loss

    return {task: clipped(task) for task in losses}


def _of_samples(losses: Losses, task: str, output: Tensor, target: Tensor, limit: float) -> Tensor:
    """Return the clipped loss of each sample of a batch that has a label, ``(k,)``."""
    each = (losses[task](output[k : k + 1], target[k : k + 1]) for k in range(len(target)))
    known = [loss for loss in each if loss is not None]
    return torch.stack(known).clamp(0.0, limit) if known else output.new_zeros(0)


def _each_sample_the_same(losses: Losses, means: Mapping[str, "_Mean"], limit: float) -> Losses:
    """Return losses of batches whose mean over the batches with labels is that over all samples with labels."""

    def weighted(task: str) -> Callable[[Tensor, Tensor], Tensor | None]:
        def loss(output: Tensor, target: Tensor) -> Tensor | None:
            found = _of_samples(losses, task, output, target, limit)
            return found.sum() * (means[task].batches / means[task].samples) if len(found) else None

        return loss

    return {task: weighted(task) for task in means}


@dataclass(frozen=True)
class _Mean:
    """The mean over some samples, of some batches."""

    value: float
    samples: int
    batches: int


@torch.no_grad()
def _means(
    model: nn.Module, batches: Sequence[Batch], losses: Losses, tasks: Sequence[str], limit: float
) -> dict[str, _Mean]:
    """Return the mean clipped loss of each task over the samples that have a label."""
    sums, counts, parts = dict.fromkeys(tasks, 0.0), dict.fromkeys(tasks, 0), dict.fromkeys(tasks, 0)
    for number in range(len(batches)):
        inputs, targets = batches[number]
        outputs = model(inputs, tasks)
        for task in tasks:
            found = _of_samples(losses, task, outputs[task], targets[task], limit)
            sums[task] += float(found.sum(dtype=torch.float64))
            counts[task] += len(found)
            parts[task] += len(found) > 0
    for task in tasks:
        if not counts[task]:
            raise ValueError(f"no sample has a label for task {task!r}; expected at least one. Take more samples.")
        if math.isnan(sums[task]):
            raise FloatingPointError(
                f"a loss of task {task!r} is not a number; expected numbers. Take weights of an epoch before it broke."
            )
    return {task: _Mean(sums[task] / counts[task], counts[task], parts[task]) for task in tasks}


def _check(*, delta: float = 0.5, **positive: float) -> None:
    """Raise unless delta is a probability and the others are positive numbers."""
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must lie between 0 and 1, got {delta}. It is the probability that the bound fails.")
    for name, value in positive.items():
        if not (math.isfinite(value) and value > 0.0):
            raise ValueError(f"{name} must be a positive number, got {value}.")
