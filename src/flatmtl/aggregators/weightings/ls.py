"""The sum of the losses."""

import torch
from torch import Tensor

from flatmtl.aggregators.base import LossWeighting
from flatmtl.aggregators.context import Context
from flatmtl.aggregators.weightings.losses import checked


class LS(LossWeighting):
    r"""Linear scalarisation: plain training on the sum of the losses.

    .. math::
        \min_\theta \sum_i L_i, \qquad w_i = 1

    The shared parameters get what :class:`~flatmtl.aggregators.Sum` gives them; the difference is the cost, one
    backward pass for all tasks, and that a perturbation is common to all tasks. A loss of large scale dominates.

    Cost: one backward pass, whatever the number of tasks.

    Scale: homogeneous of degree 1 in the task gradients; the losses do not matter.

    Shape:
        - Input: losses ``(m,)``, any floating dtype.
        - Output: weights ``(m,)``, same dtype and device.

    References:
        - Caruana (1997), *Multitask learning*, Machine Learning 28.

    Example:
        >>> import torch
        >>> LS().weights(torch.tensor([0.5, 2.0]))
        tensor([1., 1.])
    """

    def weights(self, losses: Tensor, context: Context | None = None) -> Tensor:
        """Return 1 for each task."""
        checked(losses, context)
        return torch.ones_like(losses, requires_grad=False)
