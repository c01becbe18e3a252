"""More weight for losses that fell less."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flatmtl._linalg import floats
from flatmtl.aggregators.base import LossWeighting
from flatmtl.aggregators.context import Context
from flatmtl.aggregators.weightings.losses import check_not_negative, checked


class DWA(LossWeighting):
    r"""Dynamic weight average: more weight for the tasks whose loss fell less in the last epoch.

    With :math:`\bar L_i^t` the mean of the losses in epoch ``t``,

    .. math::
        w = m \operatorname{softmax}(r / T), \qquad r_i = \frac{\bar L_i^{t-1}}{\bar L_i^{t-2}},

    and :math:`r_i = 1` in the first two epochs. Weights sum to the number of tasks present, and the scale of a loss
    does not matter. ``start_epoch(epoch)`` must be called as each epoch begins; called again with the same epoch it
    changes nothing, and with an earlier one it starts a new history. Each call of :meth:`weights` counts towards the
    means.

    Where the definition leaves :math:`r_i` open:

    - a task that is absent for a whole epoch keeps its ratio, and its next one is taken over the gap;
    - no ratio can be taken to a mean of zero: it is taken to the last mean that was not zero.

    Losses must not be negative, for then their ratio tells nothing.

    Args:
        temperature: ``T``, above 0; the larger, the more equal are the weights.

    Cost: one backward pass, whatever the number of tasks.

    Scale: homogeneous of degree 1 in the task gradients; of degree 0 in each task's losses.

    Shape:
        - Input: losses ``(m,)``, any floating dtype.
        - Output: weights ``(m,)``, same dtype and device.

    References:
        - Liu, Johns and Davison (2019), *End-to-end multi-task learning with attention*, CVPR.

    Example:
        >>> import torch
        >>> dwa = DWA()
        >>> for epoch, losses in enumerate([[4.0, 4.0], [1.0, 3.0], [1.0, 3.0]]):
        ...     dwa.start_epoch(epoch)
        ...     print(dwa.weights(torch.tensor(losses)))
        tensor([1., 1.])
        tensor([1., 1.])
        tensor([0.8756, 1.1244])
    """

    def __init__(self, temperature: float = 2.0) -> None:
        if not (math.isfinite(temperature) and temperature > 0.0):
            raise ValueError(f"temperature must be above 0 and finite, got {temperature}. For equal weights use LS.")
        self.temperature = temperature
        self._epoch: int | None = None
        self._means: dict[int, tuple[float, int]] = {}
        self._last: dict[int, float] = {}
        self._ratios: dict[int, float] = {}

    def start_epoch(self, epoch: int, total: int | None = None) -> None:
        """Close the epoch before and take the ratios from it; see the class."""
        if epoch == self._epoch:
            return
        if self._epoch is not None and epoch < self._epoch:
            self._last, self._ratios = {}, {}
        else:
            for task, (mean, _) in self._means.items():
                if task in self._last:
                    self._ratios[task] = mean / self._last[task]
                if mean > 0.0:
                    self._last[task] = mean
        self._epoch, self._means = epoch, {}

    def weights(self, losses: Tensor, context: Context | None = None) -> Tensor:
        """Return the weights of this epoch, and count the losses towards its means; see the class.

        Raises:
            RuntimeError: if no epoch was started.
        """
        if self._epoch is None:
            raise RuntimeError(
                f"{self!r} has not been told that an epoch began, and would weigh all tasks alike for ever. "
                "Call mtl.start_epoch(epoch) at the beginning of each epoch."
            )
        L, rows = checked(losses, context)
        check_not_negative(self, L, "Use LS or RLW, which take any losses.")
        for task, loss in zip(rows, floats(L), strict=True):
            mean, count = self._means.get(task, (0.0, 0))
            self._means[task] = mean + (loss - mean) / (count + 1), count + 1
        r = torch.tensor([self._ratios.get(task, 1.0) for task in rows], dtype=torch.float64, device="cpu")
        return (len(L) * (r / self.temperature).softmax(dim=0)).to(losses)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, each task's mean and count in it, and each task's last mean and ratio."""
        return {
            "epoch": self._epoch,
            "means": dict(self._means),
            "last": dict(self._last),
            "ratios": dict(self._ratios),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._epoch = state["epoch"]
        self._means, self._last, self._ratios = dict(state["means"]), dict(state["last"]), dict(state["ratios"])
