"""The direction near the mean that serves the worst-served task best."""

import math
from typing import Literal, get_args

from torch import Tensor

from flatmtl._solvers.conflict_averse import conflict_averse_weights
from flatmtl.aggregators.base import GramianAggregator
from flatmtl.aggregators.checks import check_choice, in_float64
from flatmtl.aggregators.context import Context

Rescale = Literal["1+c2", "1+c"]


class CAGrad(GramianAggregator):
    r"""Conflict-averse gradient: near the mean, the direction whose smallest product with a task gradient is largest.

    With :math:`g_0 = \frac1m \sum_i g_i`,

    .. math::
        d = \arg\max_d \; \min_i \, \langle g_i, d \rangle
        \quad \text{subject to} \quad \lVert d - g_0 \rVert \le c \, \lVert g_0 \rVert.

    The direction is :math:`d = g_0 + c \lVert g_0 \rVert \, g_w / \lVert g_w \rVert` with :math:`g_w = J^\top w`
    and :math:`w` on the simplex. The worst-served task is served at least as well as by the mean: ``c = 0``
    is the mean, and with growing ``c`` the direction turns to that of
    :class:`~flatmtl.aggregators.MGDA`. For ``c < 1``, ``d = 0`` only where the mean is zero.

    Where the definition leaves ``d`` open:

    - a task gradient that is zero stays in the mean, but is left out of the minimum, which it would hold at 0; this
      is said by a warning, once;
    - if :math:`g_w = 0` is optimal (a Pareto-stationary point where a direction in the ball conflicts with no
      task), every such direction is optimal, and the one closest to :math:`g_0` is returned.

    Task gradients that are opposite to within the rounding of float32 have a Gramian that is singular to within
    that of float64: the length of :math:`d - g_0` is then off by up to a per cent.

    Args:
        c: radius of the ball around the mean, in units of the length of the mean; at least 0.
        rescale: what the direction is divided by: ``None`` nothing, ``"1+c2"`` :math:`1 + c^2` as in the
            authors' code, ``"1+c"`` :math:`1 + c`, the most that its length can be in units of the mean.

    Cost: the Gramian and one product with ``J``. The dual problem is solved exactly on the Gramian, at a cost
    that does not depend on the number of parameters.

    Scale: homogeneous of degree 1, ``CAGrad()(s * J) == s * CAGrad()(J)``, for all ``s > 0``. A single row, or
    equal rows, give ``1 + c`` times the row.

    Shape:
        - Input: ``(m, n)``, any floating dtype.
        - Output: ``(n,)``, same dtype and device.

    References:
        - Liu, Liu, Jin, Stone and Liu (2021), *Conflict-averse gradient descent for multi-task learning*,
          NeurIPS.

    Example:
        >>> import torch
        >>> J = torch.tensor([[1.0, 0.0], [-2.0, 2.0]])
        >>> CAGrad(c=0.0)(J)
        tensor([-0.5000,  1.0000])
        >>> CAGrad(c=0.8)(J)
        tensor([0.3944, 1.0000])
    """

    def __init__(self, c: float = 0.4, rescale: Rescale | None = None) -> None:
        if not math.isfinite(c):
            raise ValueError(f"c must be finite, got {c}. For the direction of a ball without end use MGDA.")
        if c < 0.0:
            raise ValueError(f"c must not be negative, got {c}. c=0 is the mean of the task gradients.")
        check_choice("rescale", rescale, (None, *get_args(Rescale)))
        self.c = c
        self.rescale: Rescale | None = rescale

    def weights(self, gramian: Tensor, context: Context | None = None) -> Tensor:
        """Return the weights of the direction; see the class."""
        factor = {None: 1.0, "1+c2": 1.0 + self.c**2, "1+c": 1.0 + self.c}[self.rescale]
        G = in_float64(gramian)
        self._say_left_out(G, instead="it counts in the mean but not in the minimum")
        return (conflict_averse_weights(G, self.c) / factor).to(gramian)
