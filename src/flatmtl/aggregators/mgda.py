"""The shortest convex combination of the task gradients."""

from typing import Literal, get_args

import torch
from torch import Tensor

from flatmtl._solvers.quadratic import min_norm_point
from flatmtl._solvers.rows import row_norms
from flatmtl.aggregators.base import GramianAggregator
from flatmtl.aggregators.checks import check_choice, check_positive, in_float64
from flatmtl.aggregators.context import Context, losses_of

Normalise = Literal["none", "l2", "loss", "loss+"]


class MGDA(GramianAggregator):
    r"""Multiple-gradient descent: the smallest convex combination of the task gradients.

    With task gradients :math:`g_1, \dots, g_m` as the rows of ``J`` and Gramian
    :math:`G = J J^\top`, the weights solve

    .. math::
        w^\star = \arg\min_{w \in \Delta_m} \tfrac12 \, w^\top G \, w,
        \qquad \Delta_m = \{ w \ge 0, \; \mathbf{1}^\top w = 1 \}.

    Then :math:`d = J^\top w^\star` satisfies :math:`\langle d, g_i \rangle \ge \lVert d \rVert^2`
    for every task, so a small step along :math:`-d` increases no loss; ``d = 0`` exactly at
    Pareto-stationary points, among them those where one task gradient is zero.

    The shortest task gradient dominates, so tasks of different scale are often normalised first. Then
    :math:`w^\star` is that of the rows :math:`g_i / s_i`, and still :math:`d = J^\top w^\star` of the rows
    as given: it keeps their scale, but may conflict with a task.

    Args:
        normalise: what :math:`s_i` is: ``"none"`` 1, ``"l2"`` :math:`\lVert g_i \rVert`, ``"loss"`` the loss
            :math:`L_i`, ``"loss+"`` :math:`L_i \lVert g_i \rVert`. With the last two the losses must be positive,
            and a :class:`~flatmtl.aggregators.Context` is needed.

    Cost: the Gramian and one product with ``J``. The problem is solved exactly by Wolfe's active-set
    method on the Gramian, at a cost that does not depend on the number of parameters.

    Scale: homogeneous of degree 1, ``MGDA()(s * J) == s * MGDA()(J)``, for all ``s > 0``.

    Shape:
        - Input: ``(m, n)``, any floating dtype.
        - Output: ``(n,)``, same dtype and device.

    References:
        - Désidéri (2012), *Multiple-gradient descent algorithm (MGDA) for multiobjective
          optimization*, C. R. Math. 350.
        - Sener and Koltun (2018), *Multi-task learning as multi-objective optimization*,
          NeurIPS.
        - Wolfe (1976), *Finding the nearest point in a polytope*, Math. Program. 11.

    Example:
        >>> import torch
        >>> J = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> MGDA()(J)
        tensor([0.8000, 0.4000])
        >>> MGDA(normalise="l2")(J)
        tensor([0.5000, 1.0000])
    """

    def __init__(self, normalise: Normalise = "none") -> None:
        check_choice("normalise", normalise, get_args(Normalise))
        self.normalise = normalise
        self.uses_context = normalise in {"loss", "loss+"}

    def weights(self, gramian: Tensor, context: Context | None = None) -> Tensor:
        """Return the minimum-norm weights; see the class."""
        G = in_float64(gramian)
        s = torch.ones(len(G), dtype=torch.float64)
        if self.normalise in {"l2", "loss+"}:
            norms = row_norms(G)
            s = torch.where(norms > 0.0, norms, s)  # a zero row stays zero
        if self.uses_context:
            losses = losses_of(self, context, len(G))
            check_positive(self, losses, "Use normalise='none' or 'l2', or losses that are positive.")
            s = s * losses
        return min_norm_point(G / s[:, None] / s).to(gramian)
