"""The spectrum of the Hessian of each task's loss: its largest eigenvalues and its trace."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn
from torch.nn import Parameter

from flatmtl import TaskParameters
from flatmtl_bench.analysis.batches import Batch, Losses
from flatmtl_bench.analysis.untouched import untouched


@dataclass(frozen=True)
class Spectrum:
    """What is known of the eigenvalues of one Hessian.

    Attributes:
        size: number of parameters, which is that of the eigenvalues.
        eigenvalues: the largest, in falling order.
        trace: estimate of the sum of all of them.
        trace_error: standard error of the estimate.
    """

    size: int
    eigenvalues: tuple[float, ...]
    trace: float
    trace_error: float


def spectrum(
    model: nn.Module,
    batches: Sequence[Batch],
    losses: Losses,
    parameters: TaskParameters,
    *,
    eigenvalues: int = 5,
    draws: int = 10,
    heads: bool = False,
    seed: int = 0,
) -> dict[str, Spectrum]:
    r"""Return the spectrum of the Hessian of every task's mean loss, the model in eval mode.

    The largest eigenvalues come from Lanczos' method, in its implicitly restarted form (Lehoucq et al. 1998): each is
    within the root of the precision's rounding error, 0.03% for float32, of the true value. The trace is Hutchinson's
    estimate (1990): the mean of :math:`v^\top H v` over random vectors ``v`` of ones and minus ones. Both need nothing
    but products of the Hessian with vectors, each of which reads the data once. It holds some twenty vectors as long
    as the parameters, in float64; the model is left as it was.

    Args:
        model: ``model(inputs, tasks) -> {task: output}``.
        batches: on which the losses are taken; a batch without a label of a task takes no part for it.
        losses: of each task, the mean of a batch; they are weighted by the sizes of the batches.
        parameters: the shared ones are those that the Hessian is about.
        eigenvalues: how many; fewer than there are parameters.
        draws: random vectors for the trace; at least two, or there is no standard error.
        heads: whether the Hessian is about the task's own parameters, too.
        seed: of the random vectors.

    Raises:
        ValueError: for impossible numbers, parameters that the model lacks, or a task without labels.
        FloatingPointError: a loss or a product is not finite.

    References:
        - Hutchinson (1990), *A stochastic estimator of the trace of the influence matrix for Laplacian smoothing
          splines*, Commun. Stat. Simul. Comput. 19.
        - Lehoucq, Sorensen and Yang (1998), *ARPACK users' guide*, SIAM.
        - Dangel et al. (2025), *Position: curvature matrices should be democratized via linear operators* (the products
          with the Hessian, forward over reverse).

    Example:
        >>> from flatmtl_bench.models import MultiHead
        >>> model = MultiHead(nn.Linear(3, 1, bias=False), {"one": nn.Identity(), "two": nn.Identity()})
        >>> batches = [(torch.diag(torch.tensor([1.0, 2.0, 3.0])), {t: torch.zeros(3, 1) for t in model.heads})]
        >>> losses = {"one": lambda y, t: ((y - t) ** 2).sum() / 2, "two": lambda y, t: ((y - t) ** 2).sum()}
        >>> own = TaskParameters(model.encoder.parameters(), {"one": [], "two": []}, model)
        >>> found = spectrum(model, batches, losses, own, eigenvalues=2)
        >>> [round(value, 3) for value in found["one"].eigenvalues], round(found["two"].trace, 3)
        ([9.0, 4.0], 28.0)
    """
    if draws < 2:
        raise ValueError(f"got {draws} draws for the trace; expected at least 2, or there is no standard error.")
    with untouched(model), warnings.catch_warnings():
        # curvlinops and forward-mode differentiation compile a few functions when they are first needed
        warnings.filterwarnings("ignore", "`torch.jit.script`", FutureWarning)
        # vectors are multiplied one by one, so operations that cannot take several at once lose nothing
        warnings.filterwarnings("ignore", "There is a performance drop because", UserWarning)
        found = {}
        for task, numbers in _labelled(model, batches, losses, parameters.tasks).items():
            weights = [*parameters.shared, *(parameters.heads[task] if heads else ())]
            _check(model, weights, eigenvalues)
            hessian = _hessian(model, task, losses[task], weights, _OneTask(batches, task, numbers))
            generator = torch.Generator().manual_seed(seed)
            largest = _largest(hessian, eigenvalues, generator)
            samples = [_quadratic_form(hessian, generator) for _ in range(draws)]
            error = stdev(samples) / math.sqrt(draws)
            found[task] = Spectrum(hessian.shape[0], largest, fmean(samples), error)
        return found


class _OneTask:
    """Inputs and the targets of one task, of the batches that have a label for it, loaded when they are asked for."""

    def __init__(self, batches: Sequence[Batch], task: str, numbers: Mapping[int, int]) -> None:
        self._batches, self._task = batches, task
        self.numbers = numbers

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in self.numbers:
            inputs, targets = self._batches[number]
            yield inputs, targets[self._task]


class _Output(nn.Module):
    """A model with the output of one task."""

    def __init__(self, model: nn.Module, task: str) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs, [self.task])[self.task]


class _MeanLoss(nn.Module):
    """A loss as a module that says how batches are put together."""

    reduction = "mean"

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.loss(output, target)


@torch.no_grad()
def _labelled(
    model: nn.Module, batches: Sequence[Batch], losses: Losses, tasks: Sequence[str]
) -> dict[str, dict[int, int]]:
    """Return for each task the numbers of the batches that have a label for it, and how many items each holds."""
    found: dict[str, dict[int, int]] = {task: {} for task in tasks}
    for number in range(len(batches)):
        inputs, targets = batches[number]
        outputs = model(inputs, tasks)
        for task in tasks:
            loss = losses[task](outputs[task], targets[task])
            if loss is not None and not torch.isfinite(loss):
                raise FloatingPointError(
                    f"the loss of task {task!r} is {float(loss):g} on batch {number}; expected finite losses. "
                    "Take weights of an epoch before it broke."
                )
            if loss is not None:
                found[task][number] = len(inputs)
    missing = [task for task, numbers in found.items() if not numbers]
    if missing:
        raise ValueError(f"no batch has a label for {missing}; expected at least one. Take more or other samples.")
    return found


def _check(model: nn.Module, weights: Sequence[Parameter], eigenvalues: int) -> None:
    """Raise unless a model has some weights, and more of them than eigenvalues are asked for."""
    own = set(model.parameters())
    if not own.issuperset(weights):
        raise ValueError("a parameter is none of the model's; expected those of split_parameters(model, ...).")
    size = sum(weight.numel() for weight in weights)
    if not 0 < eigenvalues < size:
        raise ValueError(f"got {eigenvalues} eigenvalues of {size} parameters; expected at least 1, and fewer of them.")


def _hessian(model: nn.Module, task: str, loss: Any, weights: list[Parameter], data: _OneTask) -> Any:
    """Return the Hessian of a task's mean loss as a linear operator."""
    from curvlinops import HessianLinearOperator  # noqa: PLC0415 - takes seconds

    return HessianLinearOperator(
        _Output(model, task),
        _MeanLoss(loss),
        weights,
        data,
        check_deterministic=False,  # draws from the global stream
        num_data=sum(data.numbers.values()),
    )


def _largest(hessian: Any, count: int, generator: torch.Generator) -> tuple[float, ...]:
    """Return the largest eigenvalues, in falling order."""
    start = torch.randn(hessian.shape[0], generator=generator, dtype=torch.float64).numpy()
    operator = hessian.to_scipy()
    product = operator @ start
    if not np.isfinite(product).all():
        raise FloatingPointError(
            "the Hessian is not finite, although the losses are; expected losses that can be differentiated twice."
        )
    if not product.any():
        return (0.0,) * count  # almost surely no curvature at all, from which Lanczos' method could not start
    options: Any = {"tol": math.sqrt(torch.finfo(hessian.dtype).eps), "return_eigenvectors": False}
    found: Any = eigsh(operator, count, which="LA", v0=start, **options)
    return tuple(sorted(found.tolist(), reverse=True))


def _quadratic_form(hessian: Any, generator: torch.Generator) -> float:
    """Return v^T H v for a random vector of ones and minus ones, whose mean is the trace."""
    signs = torch.randint(0, 2, hessian.shape[:1], generator=generator) * 2 - 1
    v = signs.to(hessian.device, hessian.dtype)
    return float(torch.dot(v.double(), (hessian @ v).double()))
