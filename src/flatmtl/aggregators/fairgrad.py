"""The direction that is fair to all tasks in the sense of alpha-fairness."""

import math

from torch import Tensor

from flatmtl._solvers.fair import fair_weights
from flatmtl.aggregators.base import GramianAggregator
from flatmtl.aggregators.checks import in_float64
from flatmtl.aggregators.context import Context


class FairGrad(GramianAggregator):
    r"""Alpha-fair gains: the direction that maximises the sum of the tasks' alpha-fair utilities.

    Task ``i`` gains :math:`\langle g_i, d \rangle`. With the utility :math:`u(x) = x^{1 - \alpha} / (1 - \alpha)` (its
    limit :math:`\log x` for :math:`\alpha = 1`), the direction of a given length with the largest sum of utilities is
    that of

    .. math::
        d = J^\top w, \qquad w > 0, \qquad G w = w^{-1 / \alpha} \quad \text{(elementwise)}, \qquad G = J J^\top.

    The gain of every task is :math:`\langle g_i, d \rangle = w_i^{-1/\alpha} > 0`, so ``d`` conflicts with none.
    ``alpha = 1`` is the bargaining solution of :class:`~flatmtl.aggregators.NashMTL`; the larger ``alpha``, the closer
    the gains are to one another.

    Where the definition leaves ``d`` open, which is said by a warning, once:

    - a task gradient that is zero cannot gain: it is left out, its weight is 0;
    - if zero is a convex combination of the others (a Pareto-stationary point, such as opposite gradients), no
      direction serves them all: weights and direction are 0;
    - task gradients that are opposite to within the rounding of the Gramian: the best that float64 allows.

    Args:
        alpha: of the fairness; positive.

    Cost: the Gramian and one product with ``J``. The problem is convex and solved by Newton's method to a relative
    residual of 1e-10, at a cost that does not depend on the number of parameters.

    Scale: homogeneous of degree :math:`(1 - \alpha) / (1 + \alpha)`, so that the direction shortens when the gradients
    grow if ``alpha > 1``; see ``flat_scale`` of :class:`flatmtl.FlatMTL`.

    Shape:
        - Input: ``(m, n)``, any floating dtype.
        - Output: ``(n,)``, same dtype and device.

    Raises:
        ValueError: if ``alpha`` is not a positive number.

    References:
        - Ban and Ji (2024), *Fair resource allocation in multi-task learning*, ICML.

    Example:
        >>> import torch
        >>> J = torch.tensor([[1.0, 0.0], [0.0, 8.0]])
        >>> FairGrad(alpha=2.0)(J)
        tensor([1.0000, 0.5000])
    """

    def __init__(self, alpha: float = 2.0) -> None:
        if not (math.isfinite(alpha) and alpha > 0.0):
            raise ValueError(f"alpha must be a positive number, got {alpha}. alpha=1 is Nash-MTL, 2 the usual choice.")
        self.alpha = alpha
        self.degree = (1.0 - alpha) / (1.0 + alpha)

    def weights(self, gramian: Tensor, context: Context | None = None) -> Tensor:
        """Return the weights of the fair direction; see the class."""
        G = in_float64(gramian)
        found = fair_weights(G, self.alpha)
        self._say_left_out(G)
        self._say_unsolved(found.residual)
        return found.weights.to(gramian)
