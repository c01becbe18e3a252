"""The task gradients of a model, as a step finds them, without the step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flatmtl import SAM, FlatMTL, StepResult, TaskParameters
from flatmtl.aggregators import Context, LossWeighting, Mean
from flatmtl_bench.analysis.batches import Closure
from flatmtl_bench.analysis.untouched import untouched


def task_gradients(
    model: nn.Module,
    closures: Sequence[Closure],
    parameters: TaskParameters,
    perturbation: SAM | None = None,
    *,
    aggregator: Any = None,
    training: bool = False,
    seed: int | None = None,
    process_group: Any = None,
) -> StepResult:
    """Return losses, norms, inner products and cosines of the task gradients, and with a perturbation of the flat ones.

    They are means over the closures, each on a part of the data; parts of one size make them means over the data. It
    holds the rows of one step, whatever the number of closures, and the model is left as it was.

    Args:
        model: whose losses the closures return.
        closures: on parts of the data.
        parameters: who owns which parameter.
        perturbation: of the flat gradients; None: there are none.
        aggregator: of the loss gradients' direction, which :attr:`flatmtl.StepResult.inter` is about; None: the mean.
        training: whether the modules are in training mode, as in a step; otherwise in eval mode.
        seed: of what the model draws from torch, as dropout does; None: it draws on from where the stream stands.
        process_group: the processes whose closures are one; None: this one alone.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1, bias=False)
        >>> def closure(tasks):
        ...     y = model(torch.tensor([3.0, 4.0])).sum()
        ...     return {task: {"up": y, "down": -2 * y}[task] for task in tasks}
        >>> found = task_gradients(model, [closure], TaskParameters(model.parameters(), {"up": [], "down": []}))
        >>> found.norms.tolist(), found.conflict.item()
        ([5.0, 10.0], 1.0)
    """
    with untouched(model, training=training):
        if seed is not None:
            torch.manual_seed(seed)
        step = FlatMTL(_of_rows(aggregator), perturbation, process_group=process_group)
        return step.backward(list(closures), parameters)


def _of_rows(aggregator: Any) -> Any:
    """Return an aggregator of the rows: of a loss weighting alone a step would see the weighted sum only."""
    if isinstance(aggregator, LossWeighting):
        return _Weighted(aggregator)
    return Mean() if aggregator is None else aggregator


class _Weighted:
    """A loss weighting as a function of the rows."""

    uses_context = True

    def __init__(self, weighting: LossWeighting) -> None:
        self._weighting = weighting

    def __call__(self, jacobian: Tensor, context: Context) -> Tensor:
        return self._weighting(jacobian, context)
