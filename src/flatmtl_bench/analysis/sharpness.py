"""Sharpness: how far a task's loss rises in the worst direction within a radius."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from flatmtl import SAM, FlatMTL, TaskParameters
from flatmtl.aggregators import Mean

Closure = Callable[[Sequence[str]], Mapping[str, Tensor | None]]


def sharpness(
    model: nn.Module,
    closures: Sequence[Closure],
    parameters: TaskParameters,
    rho: float,
    *,
    process_group: Any = None,
) -> dict[str, float]:
    r"""Return :math:`L_i(\theta + \epsilon_i) - L_i(\theta)` of every task ``i``, the model in eval mode.

    The step :math:`\epsilon_i` goes along the task's own gradient, ``rho`` far in the shared parameters and
    ``rho`` in its head: one step of ascent, as in training with :class:`~flatmtl.SAM`. Losses and gradients are
    means over the closures, each on a part of the data; parts of one size make it the mean over the data.

    With a process group it is the mean over the closures of all its processes.

    Weights, buffers, gradients, random streams and the mode of every module are left as they were.
    """
    with _in_eval_mode(model), _gradients_put_back(model):
        result = FlatMTL(Mean(), SAM(rho), process_group=process_group).backward(list(closures), parameters)
    assert result.sharpness is not None
    return dict(zip(result.tasks, result.sharpness.tolist(), strict=True))


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode


@contextmanager
def _gradients_put_back(model: nn.Module) -> Iterator[None]:
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    for parameter in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
