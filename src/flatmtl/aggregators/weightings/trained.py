"""Weights that are trained together with the network."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from flatmtl.aggregators.base import LossWeighting
from flatmtl.aggregators.context import Context
from flatmtl.aggregators.weightings.losses import (
    check_known_tasks,
    check_not_negative,
    check_state_of_tasks,
    check_tasks,
    checked,
)

PATIENCE = 100
"""Calls after which numbers that do not move are taken for forgotten."""


class TrainedWeighting(LossWeighting):
    r"""A weighting with one trained number for each task: training on :math:`\sum_i w_i L_i - \sigma s_i`.

    The weights are :math:`w_i = e^{\sigma s_i}`, and :math:`\sigma` is :attr:`sign`. Each :math:`s_i` is a parameter
    of its own, so that one of an absent task has no gradient and no optimizer moves it.
    """

    sign: ClassVar[float]

    def __init__(self, tasks: int) -> None:
        check_tasks(tasks)
        self.tasks = tasks
        self._still: tuple[Tensor, int] | None = None  # the numbers, and for how many calls they have been these
        self._s = [Parameter(torch.zeros((), dtype=torch.float32, device="cpu")) for _ in range(tasks)]

    def weights(self, losses: Tensor, context: Context | None = None) -> Tensor:
        """Return the present weights; see the class."""
        self._watch()
        return self._losses_and_weights(losses, context)[1].to(losses)

    def own_gradients(self, losses: Tensor, context: Context | None = None) -> list[tuple[Parameter, Tensor]]:
        r"""Return each present task's :math:`s_i` with its gradient :math:`\sigma (w_i L_i - 1)`."""
        L, w, rows = self._losses_and_weights(losses, context)
        gradients = self.sign * (w * L - 1.0)
        return [(self._s[task], g.to(self._s[task])) for task, g in zip(rows, gradients, strict=True)]

    def parameters(self) -> tuple[Parameter, ...]:
        """Return one scalar for each task, on the CPU; the optimizer of the network trains them too."""
        return tuple(self._s)

    def state_dict(self) -> dict[str, Any]:
        """Return the trained numbers of all tasks."""
        return {"s": self._s_of(range(self.tasks))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, in the same parameters: an optimizer that holds them still does."""
        super().load_state_dict(state)
        check_state_of_tasks(self, state["s"], self.tasks)
        with torch.no_grad():
            for parameter, value in zip(self._s, state["s"], strict=True):
                parameter.copy_(value)

    def _watch(self) -> None:
        """Say so if the numbers have got gradients for many calls, and nobody trains them."""
        now = self._s_of(range(self.tasks))
        calls = self._still[1] + 1 if self._still is not None and torch.equal(self._still[0], now) else 1
        self._still = now, calls
        if calls > PATIENCE and any(p.grad is not None and bool(p.grad != 0.0) for p in self._s):
            self._say_once(
                f"the trained numbers have not moved in {PATIENCE} steps: give mtl.parameters() to an optimizer, whose "
                "zero_grad() and step() they need: Adam([*model.parameters(), *mtl.parameters()])."
            )

    def _losses_and_weights(self, losses: Tensor, context: Context | None) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        L, rows = checked(losses, context)
        check_known_tasks(self, rows, self.tasks)
        check_not_negative(self, L, "Its weights would grow without end. Use LS or RLW, which take any losses.")
        return L, (self.sign * self._s_of(rows).double()).exp(), rows

    def _s_of(self, rows: Iterable[int]) -> Tensor:
        return torch.stack([self._s[task].detach() for task in rows])
