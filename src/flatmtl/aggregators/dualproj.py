"""The mean of the task gradients, projected on the directions that conflict with no task."""

from torch import Tensor

from flatmtl._solvers.quadratic import cone_weights
from flatmtl.aggregators.base import GramianAggregator
from flatmtl.aggregators.checks import in_float64
from flatmtl.aggregators.context import Context


class DualProj(GramianAggregator):
    r"""Projection of the mean of the task gradients on the dual cone: the closest direction that harms no task.

    With :math:`g_0 = \frac1m \sum_i g_i`,

    .. math::
        d = \arg\min_d \; \lVert d - g_0 \rVert \quad \text{subject to} \quad J d \ge 0.

    The direction never conflicts with a task, and is the mean itself where the mean conflicts with none. Short task
    gradients have little influence on the mean, but the same right as long ones not to be harmed; such a task often
    ends up with :math:`\langle g_i, d \rangle = 0`, no gain. :class:`~flatmtl.aggregators.UPGrad` projects before it
    takes the mean, and so leaves each task something of its own.

    The paper projects the gradient of the current task on the cone of the tasks before it; here all tasks are
    trained together, so the mean takes the place of the current one. A task gradient that is zero restricts nothing.
    Where rows depend on each other to working precision, as opposite ones, a ridge of the size of the rounding on the
    Gramian bounds the weights, as for :class:`~flatmtl.aggregators.UPGrad`.

    Cost: the Gramian and one product with ``J``. The projection is solved exactly by an active-set method on the
    Gramian, at a cost that does not depend on the number of parameters.

    Scale: homogeneous of degree 1, ``DualProj()(s * J) == s * DualProj()(J)``, for all ``s > 0``.

    Shape:
        - Input: ``(m, n)``, any floating dtype.
        - Output: ``(n,)``, same dtype and device.

    References:
        - Lopez-Paz and Ranzato (2017), *Gradient episodic memory for continual learning*, NeurIPS.

    Example:
        >>> import torch
        >>> J = torch.tensor([[1.0, 1.0], [-4.0, 1.0]])
        >>> DualProj()(J)
        tensor([-1.2500,  1.2500])
    """

    def weights(self, gramian: Tensor, context: Context | None = None) -> Tensor:
        """Return the weights of the projection of the mean; see the class."""
        G = in_float64(gramian)
        return (cone_weights(G, G.mean(dim=1)) + 1.0 / len(G)).to(gramian)
