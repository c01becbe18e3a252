"""The aggregator a user gave, and the copies of it that aggregate something else beside it."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from flatmtl._linalg import gramian, weighted_sum
from flatmtl.aggregators.base import Aggregator, AnyAggregator, Context, GramianAggregator, on_cpu

Branch = Literal["loss", "flat", "pair"]
"""What is aggregated: a row for each task, the flat gradients beside them, or two vectors."""


class Branches:
    """One aggregator for each branch: the one given for the loss branch, deep copies for the others.

    State must not leak from one branch into another.

    Args:
        aggregator: an :class:`~flatmtl.aggregators.Aggregator`, or any function from ``(m, n)`` to ``(n,)``.
        copies: the branches that need a copy of their own.
    """

    def __init__(self, aggregator: AnyAggregator, copies: Sequence[Branch]) -> None:
        self._of: dict[str, AnyAggregator] = {"loss": aggregator}
        self._of.update({branch: copy.deepcopy(aggregator) for branch in copies})

    @property
    def degree(self) -> float:
        """How directions scale with the rows; 1 for a function that does not say."""
        return float(getattr(self._of["loss"], "degree", 1.0))

    def aggregate(self, branch: Branch, J: Tensor, G: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
        """Return the direction of the rows of ``J``, in memory of its own, and the weights if there are any.

        Args:
            branch: whose aggregator to use.
            J: rows, ``(m, n)``.
            G: their Gramian if it is known.
            context: for an aggregator that uses it.

        Raises:
            FloatingPointError: if the direction is not finite.
            ValueError: if the aggregator returns no direction of shape ``(n,)``, or changes the rows.
        """
        aggregator = self._of[branch]
        more = (context,) if getattr(aggregator, "uses_context", False) else ()
        if isinstance(aggregator, GramianAggregator):
            problem, scale = gramian(J) if G is None else (G, 1.0)
            with on_cpu():
                weights = aggregator.weights(problem, *more) * scale ** (aggregator.degree - 1.0)
            return weighted_sum(J, weights), weights
        version = J._version
        d: Any = cast("Any", aggregator)(J, *more)
        _check_direction(aggregator, d, J, changed=J._version != version)
        return d.detach().clone().to(J), None  # the rows, or the aggregator's own memory, may be what it returned

    def start_epoch(self, epoch: int, total: int | None) -> None:
        """Tell whatever counts epochs that one begins."""
        for aggregator in self._of.values():
            if isinstance(aggregator, Aggregator):
                aggregator.start_epoch(epoch, total)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state of every branch that has one."""
        states: dict[str, Any] = {}
        for name, aggregator in self._of.items():
            if hasattr(aggregator, "state_dict"):
                states[name] = copy.deepcopy(cast(Any, aggregator).state_dict())
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: if it is the state of other branches.
        """
        expected = self.state_dict().keys()
        if states.keys() != expected:
            raise ValueError(
                f"the state has the branches {sorted(states)}; expected {sorted(expected)}. Load it into a FlatMTL "
                "with the same aggregator and the same combine."
            )
        for name, state in states.items():
            cast("Any", self._of[name]).load_state_dict(copy.deepcopy(state))


def _check_direction(aggregator: object, d: object, J: Tensor, *, changed: bool) -> None:
    name = getattr(aggregator, "__name__", type(aggregator).__name__)
    if changed:
        raise ValueError(f"the aggregator {name} changed its input; it must leave the task gradients as they are.")
    if isinstance(d, Tensor) and d.shape == J.shape[1:] and not bool(torch.isfinite(d).all()):
        raise FloatingPointError(
            f"the aggregator {name} returned a direction that is not finite for task gradients that are; expected "
            "finite numbers. Mend the aggregator for degenerate task gradients, or choose another."
        )
    if not isinstance(d, Tensor) or d.shape != J.shape[1:]:
        what = f"a tensor of shape {tuple(d.shape)}" if isinstance(d, Tensor) else f"a {type(d).__name__}"
        raise ValueError(
            f"the aggregator {name} returned {what} for task gradients of shape {tuple(J.shape)}; expected one "
            f"direction of shape {tuple(J.shape[1:])}."
        )
