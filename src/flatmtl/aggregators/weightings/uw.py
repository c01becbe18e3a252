"""Losses weighted by a trained uncertainty."""

from flatmtl.aggregators.weightings.trained import TrainedWeighting


class UW(TrainedWeighting):
    r"""Uncertainty weighting: losses divided by a variance that is trained with the network.

    With one trained number :math:`s_i` for each task, the logarithm of its variance,

    .. math::
        \min_{\theta, s} \sum_i e^{-s_i} L_i + s_i, \qquad w_i = e^{-s_i}.

    At given losses the best :math:`s_i` is :math:`\log L_i`, where :math:`w_i = 1 / L_i`: this is
    :class:`~flatmtl.aggregators.weightings.SI` with weights that follow slowly. At first :math:`w_i = 1`. With
    :math:`-s_i` for :math:`s_i` it is :class:`~flatmtl.aggregators.weightings.IMTLL`. The paper derives factors of one
    half that differ between regression and classification; as is usual, there are none here.

    Losses must not be negative, for then no :math:`s_i` is best and weights grow without end. At a loss of exactly
    zero they grow too, but slowly.

    Args:
        tasks: the number of all tasks.

    The optimizer must train ``parameters()``, one scalar for each task, without weight decay; a larger learning rate
    than for the network is common.

    Cost: one backward pass, whatever the number of tasks.

    Scale: homogeneous of degree 1 in the task gradients.

    Shape:
        - Input: losses ``(m,)``, any floating dtype.
        - Output: weights ``(m,)``, same dtype and device.

    References:
        - Kendall, Gal and Cipolla (2018), *Multi-task learning using uncertainty to weigh losses for scene geometry
          and semantics*, CVPR.

    Example:
        >>> import torch
        >>> uw, losses = UW(tasks=2), torch.tensor([0.5, 2.0])
        >>> optimizer = torch.optim.SGD(uw.parameters(), lr=0.5)
        >>> for _ in range(100):
        ...     for parameter, gradient in uw.own_gradients(losses):
        ...         parameter.grad = gradient
        ...     optimizer.step()
        >>> uw.weights(losses)
        tensor([2.0000, 0.5000])
    """

    sign = -1.0
