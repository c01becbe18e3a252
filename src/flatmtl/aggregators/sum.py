"""The sum of the task gradients."""

import torch
from torch import Tensor

from flatmtl.aggregators.base import GramianAggregator
from flatmtl.aggregators.checks import check_finite
from flatmtl.aggregators.context import Context


class Sum(GramianAggregator):
    r"""The sum of the task gradients: plain training on the sum of the losses.

    .. math::
        d = \sum_i g_i

    It is ``m`` times :class:`~flatmtl.aggregators.Mean`, so the learning rate that suits it depends on the
    number of tasks.

    Cost: the product with ``J``, and the Gramian, which finds rows that are not finite.

    Scale: homogeneous of degree 1, ``Sum()(s * J) == s * Sum()(J)``, for all ``s > 0``.

    Shape:
        - Input: ``(m, n)``, any floating dtype.
        - Output: ``(n,)``, same dtype and device.

    References:
        - Caruana (1997), *Multitask learning*, Machine Learning 28.

    Example:
        >>> import torch
        >>> J = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> Sum()(J)
        tensor([1., 2.])
    """

    def weights(self, gramian: Tensor, context: Context | None = None) -> Tensor:
        """Return one for each task."""
        check_finite(gramian)
        return torch.ones_like(gramian[0])
