"""The direction with equal cosines to all task gradients."""

from typing import cast

import torch
from torch import Tensor

from flatmtl._solvers.rows import EPS, NOISE, weights_without_zero_rows
from flatmtl.aggregators.base import GramianAggregator
from flatmtl.aggregators.checks import in_float64
from flatmtl.aggregators.context import Context


class ConFIG(GramianAggregator):
    r"""Conflict-free inverse gradients: equal cosines to all task gradients, as long as their projections together.

    With the unit rows :math:`u_i = g_i / \lVert g_i \rVert` as the rows of ``R``, and its pseudo-inverse :math:`R^+`,

    .. math::
        u = \frac{R^+ \mathbf 1}{\lVert R^+ \mathbf 1 \rVert},
        \qquad d = \Bigl( \sum_i \langle g_i, u \rangle \Bigr) \, u.

    Where the rows do not depend on each other, all cosines :math:`\langle u_i, u \rangle` are equal and positive, so
    that the direction conflicts with no task. :class:`~flatmtl.aggregators.IMTLG` has the same line, but other
    length, and may point against all tasks.

    Where the definition leaves ``d`` open, or is ill-posed:

    - a task gradient that is zero has no direction and is left out, which is said by a warning, once;
    - rows that depend on each other (more tasks than parameters): :math:`R^+ \mathbf 1` has cosines that are
      equal only as far as they can be, in the sense of least squares, and ``d`` may conflict with a task;
    - where equal cosines cannot be approached at all, :math:`R^+ \mathbf 1 = 0` (opposite rows): ``d`` is zero;
    - nearly opposite rows have a common cosine near 0, and a direction that turns a lot with small changes of them.

    Zero is decided to working precision: eigenvalues of the Gramian of ``R`` below ``m`` times the rounding of its
    entries, and a projection of the vector of ones on its range shorter than 1.5e-8 of it.

    Cost: the Gramian and one product with ``J``; an eigen-decomposition of order ``m``.

    Scale: homogeneous of degree 1, ``ConFIG()(s * J) == s * ConFIG()(J)``, for all ``s > 0``. Equal rows give their
    sum.

    Shape:
        - Input: ``(m, n)``, any floating dtype.
        - Output: ``(n,)``, same dtype and device.

    References:
        - Liu, Chu and Thuerey (2025), *ConFIG: towards conflict-free training of physics informed neural networks*,
          ICLR.

    Example:
        >>> import torch
        >>> J = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
        >>> ConFIG()(J)
        tensor([2., 2.])
    """

    def weights(self, gramian: Tensor, context: Context | None = None) -> Tensor:
        """Return the weights of the direction; see the class."""
        G = in_float64(gramian)
        self._say_left_out(G)
        return weights_without_zero_rows(G, _equal_cosines).to(gramian)


def _equal_cosines(U: Tensor, lengths: Tensor) -> Tensor:
    """Return the weights of rows of these lengths, the unit rows of which have the Gramian ``U``."""
    eigenvalues, Q = cast("tuple[Tensor, Tensor]", torch.linalg.eigh(U))
    kept = eigenvalues > NOISE * len(U)
    spectrum, basis = eigenvalues[kept], Q[:, kept]
    ones = basis.sum(dim=0)  # the vector of ones, on the range
    if float(torch.dot(ones, ones)) <= EPS * len(U):
        return torch.zeros_like(lengths)
    inverse = ones / spectrum
    projections = torch.dot(lengths, torch.mv(basis, ones))  # sum of <g_i, R^+ 1>
    return torch.mv(basis, inverse) * (projections / torch.dot(ones, inverse)) / lengths
