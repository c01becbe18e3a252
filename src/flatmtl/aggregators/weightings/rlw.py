"""Random weights."""

from torch import Tensor

from flatmtl.aggregators.base import Drawing, LossWeighting
from flatmtl.aggregators.context import Context
from flatmtl.aggregators.weightings.losses import checked


class RLW(Drawing, LossWeighting):
    r"""Random loss weighting: weights drawn anew at each step, with no regard to the losses.

    .. math::
        w = \operatorname{softmax}(\xi), \qquad \xi_i \sim \mathcal{N}(0, 1)

    The weights sum to 1 over the tasks present, and in expectation are equal: training on the mean of the losses, with
    noise. It is the baseline that any weighting should beat.

    Args:
        seed: of the weighting's own random generator; the global random state is neither used nor changed.

    Cost: one backward pass, whatever the number of tasks.

    Scale: homogeneous of degree 1 in the task gradients; the losses do not matter.

    Shape:
        - Input: losses ``(m,)``, any floating dtype.
        - Output: weights ``(m,)``, same dtype and device.

    References:
        - Lin, Ye, Zhang and Tsang (2022), *Reasonable effectiveness of random weighting: a litmus test for
          multi-task learning*, TMLR.

    Example:
        >>> import torch
        >>> w = RLW().weights(torch.tensor([0.5, 2.0]))
        >>> bool((w > 0).all()), w.sum()
        (True, tensor(1.))
    """

    order_dependent = True

    def weights(self, losses: Tensor, context: Context | None = None) -> Tensor:
        """Draw the weights; see the class."""
        L, _ = checked(losses, context)
        return self._softmax_of_normals(len(L)).to(losses)
