"""The direction whose projections on all task gradients are equal."""

from typing import cast

import torch
from torch import Tensor

from flatmtl._solvers.rows import DEPENDENT, EPS, weights_without_zero_rows
from flatmtl.aggregators.base import GramianAggregator
from flatmtl.aggregators.checks import in_float64
from flatmtl.aggregators.context import Context


class IMTLG(GramianAggregator):
    r"""Impartial multi-task learning on gradients: equal projections on all task gradients.

    With unit rows :math:`u_i = g_i / \lVert g_i \rVert`,

    .. math::
        d = J^\top w, \qquad \langle u_1, d \rangle = \dots = \langle u_m, d \rangle, \qquad \mathbf{1}^\top w = 1.

    No task is favoured for the length of its gradient. Weights may be negative, and so may the common
    projection; rows that depend linearly, but not affinely, on each other have ``d = 0``.

    Where the definition leaves ``w`` open:

    - a task gradient that is zero has no direction: its weight is 0, which is said by a warning, once;
    - where several ``w`` have equal projections (equal rows, more tasks than parameters), the shortest ``w``
      is taken, to working precision;
    - where none has (a rare case, for example three gradients whose tips lie on one line), weights and direction
      are 0, which has equal projections too.

    Cost: the Gramian and one product with ``J``; a Cholesky factor of order ``m``, or for rows that depend on each
    other a singular value decomposition of order ``m + 1``.

    Scale: homogeneous of degree 1, ``IMTLG()(s * J) == s * IMTLG()(J)``, for all ``s > 0``.

    Shape:
        - Input: ``(m, n)``, any floating dtype.
        - Output: ``(n,)``, same dtype and device.

    References:
        - Liu, Li, Kuang, Xue, Chen, Yang, Liao and Zhang (2021), *Towards impartial multi-task learning*, ICLR.

    Example:
        >>> import torch
        >>> J = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
        >>> IMTLG()(J)
        tensor([0.7500, 0.7500])
    """

    def weights(self, gramian: Tensor, context: Context | None = None) -> Tensor:
        """Return the weights with equal projections; see the class."""
        G = in_float64(gramian)
        self._say_left_out(G)
        return weights_without_zero_rows(G, _equal_projections).to(gramian)


def _equal_projections(U: Tensor, lengths: Tensor) -> Tensor:
    r"""Return the shortest :math:`w = a v` with :math:`U v = \lambda \mathbf{1}` and :math:`a^\top v = 1`, or zeros.

    Here ``U`` is the Gramian of the unit rows, and ``a`` the shortest length divided by each.
    """
    a = lengths.min() / lengths
    L, failed = cast("tuple[Tensor, Tensor]", torch.linalg.cholesky_ex(U))
    if not int(failed) and float(L.diagonal().min()) ** 2 > DEPENDENT:  # v is unique up to its length
        v = torch.cholesky_solve(torch.ones_like(a).unsqueeze(1), L).squeeze(1)
        total = torch.dot(a, v)
        if abs(float(total)) > DEPENDENT * float(v.abs().max()):
            return a * (v / total)
    m = len(a)
    system = torch.zeros(m + 1, m + 1, dtype=torch.float64)  # unknowns v and -lambda
    system[:m, :m] = U
    system[:m, m] = 1.0
    system[m, :m] = a
    left, singular, right = cast("tuple[Tensor, Tensor, Tensor]", torch.linalg.svd(system))
    rank = int((singular > 64 * (m + 1) * EPS * singular[0]).sum())
    unit = left[m]  # the right-hand side is the last unit vector
    if rank <= m and float(unit[rank:].abs().max()) > EPS**0.5:  # not in the range
        return torch.zeros_like(a)
    w = a * (right[:rank, :m].T @ (unit[:rank] / singular[:rank]))
    if rank <= m:  # what can be added without a change of the projections
        free = a[:, None] * right[rank:, :m].T
        added = cast("Tensor", torch.linalg.lstsq(free, w[:, None], driver="gelsd").solution)
        w = w - torch.mv(free, added.squeeze(1))
    return w / w.sum()
