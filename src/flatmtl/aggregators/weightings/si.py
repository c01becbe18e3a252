"""The sum of the logarithms of the losses."""

from torch import Tensor

from flatmtl.aggregators.base import LossWeighting
from flatmtl.aggregators.checks import check_positive
from flatmtl.aggregators.context import Context
from flatmtl.aggregators.weightings.losses import checked


class SI(LossWeighting):
    r"""Scale-invariant: training on the sum of the logarithms of the losses.

    .. math::
        \min_\theta \sum_i \log L_i, \qquad w_i = \frac{1}{L_i}

    The direction does not change when a loss is multiplied by a constant, since each task counts by its relative
    improvement. A loss that goes to zero gets a weight without bound. Losses must be positive.

    Cost: one backward pass, whatever the number of tasks.

    Scale: homogeneous of degree 1 in the task gradients at given losses, of degree -1 in the losses.

    Shape:
        - Input: losses ``(m,)``, any floating dtype.
        - Output: weights ``(m,)``, same dtype and device.

    References:
        - Navon, Shamsian, Achituve, Maron, Kawaguchi, Chechik and Fetaya (2022), *Multi-task learning as a
          bargaining game*, ICML (as a baseline).

    Example:
        >>> import torch
        >>> SI().weights(torch.tensor([0.5, 2.0]))
        tensor([2.0000, 0.5000])
    """

    def weights(self, losses: Tensor, context: Context | None = None) -> Tensor:
        """Return the inverse of each loss."""
        L, _ = checked(losses, context)
        check_positive(self, L, "Use LS or RLW, which take any losses, or losses that stay above zero.")
        return L.reciprocal().to(losses)
