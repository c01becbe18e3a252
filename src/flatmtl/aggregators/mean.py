"""The mean of the task gradients."""

import torch
from torch import Tensor

from flatmtl.aggregators.base import GramianAggregator
from flatmtl.aggregators.checks import check_finite
from flatmtl.aggregators.context import Context


class Mean(GramianAggregator):
    r"""The mean of the task gradients: plain training on the mean of the losses.

    .. math::
        d = \frac1m \sum_i g_i

    The direction may conflict with a task: :math:`\langle d, g_i \rangle` can be negative. It is the only
    aggregator here, beside :class:`~flatmtl.aggregators.Sum`, that is linear in the task gradients.

    Cost: the product with ``J``, and the Gramian, which finds rows that are not finite.

    Scale: homogeneous of degree 1, ``Mean()(s * J) == s * Mean()(J)``, for all ``s > 0``.

    Shape:
        - Input: ``(m, n)``, any floating dtype.
        - Output: ``(n,)``, same dtype and device.

    References:
        - Caruana (1997), *Multitask learning*, Machine Learning 28.

    Example:
        >>> import torch
        >>> J = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> Mean()(J)
        tensor([0.5000, 1.0000])
    """

    def weights(self, gramian: Tensor, context: Context | None = None) -> Tensor:
        """Return ``1 / m`` for each task."""
        check_finite(gramian)
        return torch.full_like(gramian[0], 1.0 / len(gramian))
