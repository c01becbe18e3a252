"""The geometric mean of the losses."""

from torch import Tensor

from flatmtl.aggregators.base import LossWeighting
from flatmtl.aggregators.checks import check_positive
from flatmtl.aggregators.context import Context
from flatmtl.aggregators.weightings.losses import checked


class GLS(LossWeighting):
    r"""Geometric loss strategy: training on the geometric mean of the losses.

    .. math::
        \min_\theta \Bigl( \prod_i L_i \Bigr)^{1/m}, \qquad
        w_i = \frac{1}{m \, L_i} \Bigl( \prod_j L_j \Bigr)^{1/m}

    The weights are those of :class:`~flatmtl.aggregators.weightings.SI` times a common factor, so each task counts
    by its relative improvement, but the direction shrinks with the losses instead of growing as they go to zero. The
    geometric mean is over the tasks present. It is taken through logarithms, so that no product under- or
    overflows. Losses must be positive.

    Cost: one backward pass, whatever the number of tasks.

    Scale: homogeneous of degree 1 in the task gradients at given losses, of degree 0 in the losses.

    Shape:
        - Input: losses ``(m,)``, any floating dtype.
        - Output: weights ``(m,)``, same dtype and device.

    References:
        - Chennupati, Sistu, Yogamani and Rawashdeh (2019), *MultiNet++: multi-stream feature aggregation and
          geometric loss strategy for multi-task learning*, CVPR workshops.

    Example:
        >>> import torch
        >>> GLS().weights(torch.tensor([0.5, 2.0]))
        tensor([1.0000, 0.2500])
    """

    def weights(self, losses: Tensor, context: Context | None = None) -> Tensor:
        """Return the gradient of the geometric mean in the losses; see the class."""
        L, _ = checked(losses, context)
        check_positive(self, L, "Use LS or RLW, which take any losses, or losses that stay above zero.")
        logs = L.log()
        return ((logs.mean() - logs).exp() / len(L)).to(losses)
