"""Task gradients of which each coordinate keeps one sign, drawn at random."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flatmtl._linalg import finite_rows, upload, wide_blocks
from flatmtl.aggregators.base import Drawing
from flatmtl.aggregators.checks import check_jacobian, check_rows
from flatmtl.aggregators.context import Context, present


class GradDrop(Drawing):
    r"""Gradient sign dropout: in each coordinate only entries of one sign are kept, and added up.

    For each coordinate, with one :math:`U` drawn uniformly from :math:`[0, 1)`,

    .. math::
        P = \tfrac12 \Bigl( 1 + \frac{\sum_i g_i}{\sum_i \lvert g_i \rvert} \Bigr), \qquad
        d = \sum_i \bigl( \ell_i + (1 - \ell_i) \, M_i \bigr) \, g_i,

    where :math:`M_i` is 1 for the positive entries if :math:`U < P` and for the negative ones if not, else 0.
    :math:`P` is 0.5 where all entries are zero. In a coordinate where all tasks have one sign nothing is dropped.
    The direction may conflict with a task; opposite task gradients do not cancel, since one sign wins in each
    coordinate; and ``d`` need not be a combination of the task gradients.

    Args:
        leak: share :math:`\ell` of dropped entries that is kept, from 0 to 1, which is the sum; a number for all
            tasks, or one for each.
        seed: of the aggregator's own random generator, which is on the CPU, so that draws do not depend on the
            device; the global random state is neither used nor changed.

    Cost: two passes over ``J``, and ``n`` random numbers.

    Scale: homogeneous of degree 1 for one and the same draw, ``GradDrop()(s * J) == s * GradDrop()(J)``, for all
    ``s > 0``.

    Shape:
        - Input: ``(m, n)``, any floating dtype.
        - Output: ``(n,)``, same dtype and device.

    References:
        - Chen, Ngiam, Huang, Luong, Kretzschmar, Chai and Anguelov (2020), *Just pick a sign: optimizing deep
          multitask models with gradient sign dropout*, NeurIPS.

    Example:
        >>> import torch
        >>> J = torch.tensor([[1.0, 3.0, -1.0], [2.0, -1.0, -1.0]])
        >>> sign_purity(J)
        tensor([1.0000, 0.7500, 0.0000])
        >>> GradDrop()(J)[[0, 2]], GradDrop(leak=1.0)(J)
        (tensor([ 3., -2.]), tensor([ 3.,  2., -2.]))
    """

    uses_context = True

    def __init__(self, leak: float | Sequence[float] = 0.0, seed: int = 0) -> None:
        self.leak = tuple(map(float, leak)) if isinstance(leak, Sequence) else float(leak)
        if not all(0.0 <= share <= 1.0 for share in self._leaks()):
            raise ValueError(
                f"leak must be between 0 and 1, got {leak}. leak=0 drops entries, leak=1 keeps them whole."
            )
        super().__init__(seed)

    def __call__(self, jacobian: Tensor, context: Context | None = None) -> Tensor:
        """Return the sum of the entries that are kept; see the class."""
        check_jacobian(jacobian)
        jacobian = jacobian.detach()
        check_rows(finite_rows(jacobian))
        leak = upload(self._leak_of_rows(len(jacobian), context), jacobian.device)
        d = jacobian.new_empty(jacobian.shape[1])
        for columns, block in wide_blocks(jacobian):
            U = torch.rand(block.shape[1], dtype=torch.float64, device="cpu", generator=self._generator)
            positive = upload(U, block.device) < sign_purity(block)
            kept = torch.where(positive, block.clamp(min=0.0), block.clamp(max=0.0))
            d[columns] = kept.sum(dim=0) + torch.mv((block - kept).T, leak)
        return d

    def _leaks(self) -> tuple[float, ...]:
        return self.leak if isinstance(self.leak, tuple) else (self.leak,)

    def _leak_of_rows(self, m: int, context: Context | None) -> Tensor:
        """Return the leak of each row, shape ``(m,)`` in float64."""
        if not isinstance(self.leak, tuple):
            return torch.full((m,), self.leak, dtype=torch.float64, device="cpu")
        rows = present(context, m)
        if max(rows) >= len(self.leak) or (context is None and m < len(self.leak)):
            raise ValueError(
                f"leak is for {len(self.leak)} tasks, but the rows are those of tasks {rows} (from 0). Give one number "
                "for every task, or one for all; where tasks are absent, pass Context(rows, losses)."
            )
        return torch.tensor([self.leak[task] for task in rows], dtype=torch.float64, device="cpu")


def sign_purity(rows: Tensor) -> Tensor:
    r"""Return :math:`P` of each column, 1 if all its entries are positive and 0 if all are negative."""
    total, size = rows.sum(dim=0), rows.abs().sum(dim=0)
    return 0.5 + 0.5 * torch.where(size > 0.0, total / size, 0.0)
