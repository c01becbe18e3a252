"""Task gradients projected off those they conflict with, and added up."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from flatmtl.aggregators.base import Drawing, GramianAggregator
from flatmtl.aggregators.checks import check_choice, in_float64
from flatmtl.aggregators.context import Context, present

Reduction = Literal["sum", "mean"]


class PCGrad(Drawing, GramianAggregator):
    r"""Gradient surgery: each task gradient is projected off those it conflicts with, then all are added.

    For task ``i``, start from :math:`x_i = g_i` and go through the other tasks ``j`` in some order:

    .. math::
        x_i \leftarrow x_i - \frac{\min(\langle x_i, g_j \rangle, 0)}{\lVert g_j \rVert^2} \, g_j,
        \qquad d = \sum_i x_i.

    The :math:`g_j` are the task gradients as given, never projected ones, and a task is never projected off
    its own. With two tasks ``d`` conflicts with none of them; with more it may.

    Args:
        reduction: ``"sum"`` as above, as in the paper, or ``"mean"``, which divides by the number of tasks.
        order: for each task the other tasks' positions in the order of projection; absent tasks are passed
            over. ``None``: each task's order is drawn anew at each call. Two rows have one order only, so
            nothing is drawn for them and any ``order`` fits.
        seed: of the aggregator's own random generator; the global random state is neither used nor changed.

    Cost: the Gramian and one product with ``J``. Projections are done on the coefficients of :math:`x_i`,
    for all tasks at once, so that ``m - 1`` steps of ``m`` by ``m`` remain.

    Scale: homogeneous of degree 1, ``PCGrad()(s * J) == s * PCGrad()(J)``, for all ``s > 0``.

    Shape:
        - Input: ``(m, n)``, any floating dtype.
        - Output: ``(n,)``, same dtype and device.

    References:
        - Yu, Kumar, Gupta, Levine, Hausman and Finn (2020), *Gradient surgery for multi-task learning*, NeurIPS.

    Example:
        >>> import torch
        >>> J = torch.tensor([[1.0, 0.0], [-2.0, 2.0]])
        >>> PCGrad()(J)
        tensor([0.5000, 2.5000])
    """

    uses_context = True
    order_dependent = True

    def __init__(
        self, reduction: Reduction = "sum", order: Sequence[Sequence[int]] | None = None, seed: int = 0
    ) -> None:
        check_choice("reduction", reduction, get_args(Reduction))
        self.reduction = reduction
        self.order = None if order is None else _checked(order)
        super().__init__(seed)

    def weights(self, gramian: Tensor, context: Context | None = None) -> Tensor:
        """Return how often each task gradient enters the direction; see the class."""
        G = in_float64(gramian)
        m = len(G)
        squares = torch.where(G.diagonal() > 0.0, G.diagonal(), 1.0)
        X, tasks = torch.eye(m, dtype=torch.float64), torch.arange(m)  # x_i = J^T X[i]
        for others in self._orders_of(present(context, m)).T:
            products = (X * G[others]).sum(dim=1)
            X[tasks, others] -= products.clamp(max=0.0) / squares[others]
        return (X.mean(dim=0) if self.reduction == "mean" else X.sum(dim=0)).to(gramian)

    def _orders_of(self, tasks: tuple[int, ...]) -> Tensor:
        """Return for each row the other rows in the order of projection, shape ``(m, m - 1)``."""
        if self.order is None or len(tasks) <= 2:
            return self._orders(len(tasks))
        if max(tasks) >= len(self.order):
            raise ValueError(
                f"order is for {len(self.order)} tasks, but task {max(tasks)} (from 0) is present. "
                "Give the order of projection for every task."
            )
        row = {task: i for i, task in enumerate(tasks)}
        return torch.tensor([[row[j] for j in self.order[task] if j in row] for task in tasks])


def _checked(order: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the order as tuples; raise if an entry is no arrangement of the other tasks."""
    for task, others in enumerate(order):
        expected = [j for j in range(len(order)) if j != task]
        if sorted(others) != expected:
            raise ValueError(
                f"order[{task}] is {list(others)}; expected each of the other tasks {expected} once, "
                "in the order of projection."
            )
    return tuple(tuple(others) for others in order)
