"""The sum of the task gradients with weights that the user gives."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flatmtl.aggregators.base import GramianAggregator
from flatmtl.aggregators.checks import check_finite
from flatmtl.aggregators.context import Context, present
from flatmtl.aggregators.sum import Sum


class Fixed(GramianAggregator):
    r"""The task gradients added up with fixed weights: plain training on a weighted sum of the losses.

    .. math::
        d = \sum_i w_i \, g_i

    Weights belong to tasks, not to rows: a task that is absent takes its own weight with it, and the others keep
    theirs, unchanged. Where ``combine`` aggregates two vectors that are no tasks, these are summed. The direction may
    conflict with a task, also with one of large weight.

    Args:
        weights: one finite number for each task, in the order of the tasks; negative ones climb that task's loss.

    Cost: the product with ``J``, and the Gramian, which finds rows that are not finite.

    Scale: homogeneous of degree 1, ``Fixed(w)(s * J) == s * Fixed(w)(J)``, for all ``s > 0``.

    Shape:
        - Input: ``(m, n)``, any floating dtype. Without a :class:`~flatmtl.aggregators.Context` that tells which
          tasks are present, ``m`` is the number of weights.
        - Output: ``(n,)``, same dtype and device.

    References:
        - Xin, Ghorbani, Garg, Firat and Gilmer (2022), *Do current multi-task optimization methods in deep
          learning even help?*, NeurIPS.

    Example:
        >>> import torch
        >>> J = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> Fixed([0.25, 2.0])(J)
        tensor([0.2500, 4.0000])
        >>> Fixed([0.25, 2.0])(J[1:], Context(rows=(1,), losses=torch.ones(1)))
        tensor([0., 4.])
    """

    uses_context = True
    order_dependent = True

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = tuple(map(float, weights))
        if not self._weights:
            raise ValueError("weights are empty; expected one number for each task. For equal weights use Mean or Sum.")
        bad = [task for task, weight in enumerate(self._weights) if not math.isfinite(weight)]
        if bad:
            raise ValueError(
                f"weights {[self._weights[task] for task in bad]} of tasks {bad} (from 0) are not finite; expected one "
                "finite number for each task. To leave a task out, give it the weight 0."
            )

    def weights(self, gramian: Tensor, context: Context | None = None) -> Tensor:
        """Return the weights of the tasks that are present."""
        check_finite(gramian)
        given, m = self._weights, len(gramian)
        if context is None and m != len(given):
            raise ValueError(
                f"{self!r} has weights for {len(given)} tasks and got {m} rows; expected one row for each task. "
                "Give one weight per task, or say which tasks are present: Context(rows, losses)."
            )
        rows = present(context, m)
        if max(rows) >= len(given):
            raise ValueError(
                f"{self!r} has weights for {len(given)} tasks, but task {max(rows)} (from 0) is present. "
                "Give one weight for every task."
            )
        return torch.tensor([given[task] for task in rows], dtype=torch.float64).to(gramian)

    def for_pairs(self) -> Sum:
        """Return the plain sum: the weights belong to tasks."""
        return Sum()

    def __repr__(self) -> str:
        return f"Fixed(weights={self._weights})"
