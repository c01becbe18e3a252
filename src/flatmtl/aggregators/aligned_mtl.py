"""The mean of the task gradients after all their principal components are made equally long."""

from typing import cast

import torch
from torch import Tensor

from flatmtl._solvers.rows import NOISE, weights_without_zero_rows
from flatmtl.aggregators.base import GramianAggregator
from flatmtl.aggregators.checks import in_float64
from flatmtl.aggregators.context import Context


class AlignedMTL(GramianAggregator):
    r"""Independent component alignment: the principal components of the task gradients get one common length.

    With the singular value decomposition :math:`J = U \Sigma V^\top`, all singular values are replaced by the
    smallest one, and the mean of the rows is taken:

    .. math::
        \hat J = \sigma_{\min} \, U V^\top, \qquad d = \frac1m \, \hat J^\top \mathbf 1.

    The rows of :math:`\hat J` are orthogonal and equally long, so that none of them conflicts with another or
    dominates it. ``d`` has the same product with each of them, but may conflict with a task gradient as given.
    Its length is :math:`\sigma_{\min} / \sqrt m`: the closer the rows come to depending on each other, the shorter.

    Where rows depend on each other, only the ``r`` singular values that are not zero count: :math:`\sigma_{\min}` is
    the smallest of these, and :math:`U V^\top` is taken on the range of ``J``. The length then jumps up, from nearly
    zero for rows that nearly depend on each other. A task gradient that is zero has weight 0 and still counts in ``m``,
    which is said by a warning, once.

    The rank is that of the rows scaled to unit length, so that a short row is not taken for a dependent one. An
    entry of their Gramian is rounded by up to 16 units of float64's precision, hence its eigenvalues by up to ``m``
    times as much: those below are taken for zero. That is rows which depend on each other up to about 1e-7 of their
    length. The singular values themselves are then found without squaring the condition of ``J``.

    Cost: the Gramian and one product with ``J``; an eigen-decomposition and a singular value decomposition of order
    ``m``.

    Scale: homogeneous of degree 1, ``AlignedMTL()(s * J) == s * AlignedMTL()(J)``, for all ``s > 0``.

    Shape:
        - Input: ``(m, n)``, any floating dtype.
        - Output: ``(n,)``, same dtype and device.

    References:
        - Senushkin, Patakin, Kuznetsov and Konushin (2023), *Independent component alignment for multi-task
          learning*, CVPR.

    Example:
        >>> import torch
        >>> J = torch.tensor([[1.0, 0.0], [0.0, 4.0]])
        >>> AlignedMTL()(J)
        tensor([0.5000, 0.5000])
    """

    def weights(self, gramian: Tensor, context: Context | None = None) -> Tensor:
        r"""Return :math:`\frac{\sigma_{\min}}m U \Sigma^{-1} U^\top \mathbf 1`, where :math:`G = U \Sigma^2 U^\top`."""
        G = in_float64(gramian)
        self._say_left_out(G, instead="it has weight 0 and counts in the mean")
        return (weights_without_zero_rows(G, _aligned) / len(G)).to(gramian)


def _aligned(U: Tensor, lengths: Tensor) -> Tensor:
    """Return the weights of the sum of the aligned rows, from the Gramian of the unit rows and the rows' lengths."""
    root = _square_root(U) * lengths
    _, singular, Ut = cast("tuple[Tensor, Tensor, Tensor]", torch.linalg.svd(root, full_matrices=False))
    return torch.mv(Ut.T, Ut.sum(dim=1) * (singular[-1] / singular))


def _square_root(unit_gramian: Tensor) -> Tensor:
    r"""Return ``R`` of shape ``(r, m)`` and full rank ``r`` with :math:`R^\top R` the Gramian of unit rows."""
    eigenvalues, Q = cast("tuple[Tensor, Tensor]", torch.linalg.eigh(unit_gramian))
    kept = eigenvalues > NOISE * len(unit_gramian)
    return (Q[:, kept] * eigenvalues[kept].sqrt()).T
