"""The task gradients with weights that are drawn anew at each step."""

from torch import Tensor

from flatmtl.aggregators.base import Drawing, GramianAggregator
from flatmtl.aggregators.checks import check_finite
from flatmtl.aggregators.context import Context


class Random(Drawing, GramianAggregator):
    r"""Random convex combination of the task gradients, drawn anew at each call.

    .. math::
        d = \sum_i w_i \, g_i, \qquad w = \operatorname{softmax}(z), \qquad z_i \sim \mathcal N(0, 1).

    On average over the draws it is :class:`~flatmtl.aggregators.Mean`; a single direction may conflict with a task,
    and differs from the next one although the task gradients are the same. It is the baseline that a method which
    looks at the gradients should beat.

    Args:
        seed: of the aggregator's own random generator; the global random state is neither used nor changed.

    Cost: the product with ``J``, and the Gramian, which finds rows that are not finite.

    Scale: homogeneous of degree 1 for one and the same draw, ``Random()(s * J) == s * Random()(J)``, for all
    ``s > 0``.

    Shape:
        - Input: ``(m, n)``, any floating dtype.
        - Output: ``(n,)``, same dtype and device.

    References:
        - Lin, Ye, Zhang and Tsang (2022), *Reasonable effectiveness of random weighting: a litmus test for
          multi-task learning*, TMLR.

    Example:
        >>> import torch
        >>> J = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> aggregator = Random(seed=0)
        >>> first, second = aggregator(J), aggregator(J)
        >>> round(float(first.sum()), 6), round(float(second.sum()), 6), bool((first == second).any())
        (1.0, 1.0, False)
    """

    order_dependent = True

    def weights(self, gramian: Tensor, context: Context | None = None) -> Tensor:
        """Return weights that are positive and sum to 1, new ones at each call."""
        check_finite(gramian)
        return self._softmax_of_normals(len(gramian)).to(gramian)
