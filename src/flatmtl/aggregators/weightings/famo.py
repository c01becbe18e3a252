"""Equal relative progress on all losses."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from flatmtl._linalg import floats
from flatmtl.aggregators.base import LossWeighting
from flatmtl.aggregators.checks import check_positive
from flatmtl.aggregators.context import Context
from flatmtl.aggregators.weightings.losses import (
    check_known_tasks,
    check_not_negative,
    check_state_of_tasks,
    check_tasks,
    checked,
)


class FAMO(LossWeighting):
    r"""Fast adaptive multi-task optimisation: weights that let all losses fall at the same relative rate.

    With one logit :math:`z_i` for each task, first 0,

    .. math::
        p = \operatorname{softmax}(z), \qquad
        w_i = c \, \frac{p_i}{L_i}, \qquad c = \Bigl( \sum_j \frac{p_j}{L_j} \Bigr)^{-1},

    so that the weights sum to 1. After the step, with losses :math:`L'` of the same batch, the logits move against

    .. math::
        \Bigl( \frac{\partial p}{\partial z} \Bigr)^{\!\top} \delta + \gamma z, \qquad
        \delta_i = \log L_i - \log L'_i,

    by Adam, as in the authors' code: a task whose loss fell more than others' gets less weight. The softmax is over
    the tasks present; an absent task's logit and moments stay. The logits are FAMO's own, and are not in
    ``parameters()``.

    :meth:`after_step` does that update. Where it has not been called since the last weights, the losses of the next
    batch stand in for :math:`L'`: this saves a forward pass and is the same in expectation, but
    :math:`\delta` then holds the difference between two batches too.

    Losses must be positive; unlike in the authors' code, nothing is added to them.

    Args:
        tasks: the number of all tasks.
        lr: learning rate of the logits, :math:`\beta` in the paper.
        decay: :math:`\gamma`, which draws the logits back to 0.

    Cost: one backward pass, whatever the number of tasks, and a forward pass for :meth:`after_step`.

    Scale: homogeneous of degree 1 in the task gradients at given losses, of degree 0 in the losses.

    Shape:
        - Input: losses ``(m,)``, any floating dtype.
        - Output: weights ``(m,)``, same dtype and device.

    References:
        - Liu, Feng, Stone and Liu (2023), *FAMO: fast adaptive multitask optimization*, NeurIPS.

    Example:
        >>> import torch
        >>> famo = FAMO(tasks=2)
        >>> famo.weights(torch.tensor([1.0, 3.0]))
        tensor([0.7500, 0.2500])
        >>> famo.after_step(torch.tensor([0.5, 3.0]))
        >>> famo.weights(torch.tensor([1.0, 3.0]))
        tensor([0.7405, 0.2595])
    """

    learns_from_step = True

    def __init__(self, tasks: int, lr: float = 0.025, decay: float = 0.001) -> None:
        check_tasks(tasks)
        for name, value in (("lr", lr), ("decay", decay)):
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name} must be finite and not negative, got {value}.")
        self.tasks, self.lr, self.decay = tasks, lr, decay
        self._logits, self._mean, self._square, self._steps = torch.zeros(4, tasks, dtype=torch.float64, device="cpu")
        self._last: dict[int, float] = {}  # losses to learn from, by task

    def weights(self, losses: Tensor, context: Context | None = None) -> Tensor:
        """Return the weights, and remember the losses to learn from; see the class."""
        L, rows = self._checked(losses, context)
        self._learn(L, rows)
        self._last = dict(zip(rows, floats(L), strict=True))
        return (self._logits[list(rows)] - L.log()).softmax(dim=0).to(losses)

    def after_step(self, losses: Tensor, context: Context | None = None) -> None:
        """Learn from the losses of the same batch after the step; without a call of :meth:`weights` since, do nothing.

        Args:
            losses: of shape ``(m,)``; tasks that had no weight in the step are passed over, and those whose loss is
                zero now, for which no weight is needed.
            context: says which tasks these are; ``None``: all tasks, in order.
        """
        L, rows = checked(losses, context)
        check_known_tasks(self, rows, self.tasks)
        check_not_negative(self, L, "Use LS or RLW, which take any losses.")
        positive = [i for i, loss in enumerate(floats(L)) if loss > 0.0]
        self._learn(L[positive], tuple(rows[i] for i in positive))
        self._last = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the logits, each task's moments and steps of Adam, and the losses that were not yet learnt from."""
        return {name: values.clone() for name, values in self._values().items()} | {"last": dict(self._last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        for name in self._values():
            check_state_of_tasks(self, state[name], self.tasks)
        for name, values in self._values().items():
            values.copy_(state[name])
        self._last = dict(state["last"])

    def _values(self) -> dict[str, Tensor]:
        """Return what there is one number of for each task."""
        return {"logits": self._logits, "mean": self._mean, "square": self._square, "steps": self._steps}

    def _checked(self, losses: Tensor, context: Context | None) -> tuple[Tensor, tuple[int, ...]]:
        L, rows = checked(losses, context)
        check_known_tasks(self, rows, self.tasks)
        check_positive(self, L, "Use LS or RLW, which take any losses, or losses that stay above zero.")
        return L, rows

    def _learn(self, losses: Tensor, rows: tuple[int, ...]) -> None:
        """Move the logits of the tasks that have losses from before the step, too."""
        both = [i for i, task in enumerate(rows) if task in self._last]
        if not both:
            return
        tasks = [rows[i] for i in both]
        before = torch.tensor([self._last[task] for task in tasks], dtype=torch.float64, device="cpu")
        delta = before.log() - losses[both].log()
        p = self._logits[tasks].softmax(dim=0)
        gradient = p * (delta - torch.dot(p, delta))
        logits, means, squares, steps = ([values[task] for task in tasks] for values in self._values().values())
        adam(  # in place, on views: tasks that are not here keep their own number of steps
            logits,
            list(gradient),
            means,
            squares,
            [],
            steps,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self.lr,
            weight_decay=self.decay,
            eps=1e-8,
            maximize=False,
        )
