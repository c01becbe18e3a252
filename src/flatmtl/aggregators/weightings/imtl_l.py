"""Losses scaled to the same size."""

from flatmtl.aggregators.weightings.trained import TrainedWeighting


class IMTLL(TrainedWeighting):
    r"""Impartial multi-task learning on losses: trained scales that bring all losses to the same size.

    With one trained number :math:`s_i` for each task,

    .. math::
        \min_{\theta, s} \sum_i e^{s_i} L_i - s_i, \qquad w_i = e^{s_i}.

    At given losses the best :math:`s_i` is :math:`-\log L_i`, where every :math:`w_i L_i = 1`: no task is favoured for
    the scale of its loss. At first :math:`w_i = 1`. With :math:`-s_i` for :math:`s_i` this is
    :class:`~flatmtl.aggregators.weightings.UW` as defined here, and SGD or Adam train both alike.

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
        - Liu, Li, Kuang, Xue, Chen, Yang, Liao and Zhang (2021), *Towards impartial multi-task learning*, ICLR.

    Example:
        >>> import torch
        >>> imtl_l, losses = IMTLL(tasks=2), torch.tensor([0.5, 2.0])
        >>> imtl_l.weights(losses)
        tensor([1., 1.])
        >>> [float(gradient) for _, gradient in imtl_l.own_gradients(losses)]
        [-0.5, 1.0]
    """

    sign = 1.0
