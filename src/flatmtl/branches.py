"""The aggregator a user gave, and the copies of it that aggregate something else beside it."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from flatmtl import foreign
from flatmtl._linalg import Gramian, norm, weighted_sum, without_autocast
from flatmtl.aggregators.base import Aggregator, AnyAggregator, GramianAggregator, LossWeighting
from flatmtl.aggregators.checks import check_weights, on_cpu
from flatmtl.aggregators.context import Context
from flatmtl.ranks import Ranks
from flatmtl.shards import Whole

Branch = Literal["loss", "flat", "pair"]
"""What is aggregated: a row for each task, the flat gradients beside them, or two vectors."""


class Branches:
    """One aggregator for each branch: the one given for the loss branch, deep copies for the others.

    State must not leak from one branch into another.

    Args:
        aggregator: an :class:`~flatmtl.aggregators.Aggregator`, or any function from ``(m, n)`` to ``(n,)``.
        copies: the branches that need a copy of their own.

    Attributes:
        ranks: the processes that shall come to the same direction.
        layout: where the entries of the rows are. An aggregator that needs more of them than a Gramian gets whole ones.
    """

    def __init__(self, aggregator: AnyAggregator, copies: Sequence[Branch]) -> None:
        self.ranks = Ranks(None, None)
        self.layout = Whole()
        self._of: dict[str, AnyAggregator] = {"loss": aggregator}
        for branch in copies:
            if branch == "pair" and isinstance(aggregator, Aggregator):
                self._of[branch] = aggregator.for_pairs()
            else:
                self._of[branch] = copy.deepcopy(aggregator)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out of copies what is of one step or process only."""
        return {**vars(self), "ranks": Ranks(None, None), "layout": Whole()}

    @property
    def aggregator(self) -> AnyAggregator:
        """The aggregator that was given."""
        return self._of["loss"]

    @property
    def degree(self) -> float:
        """How directions scale with the rows; 1 for a function that does not say."""
        return float(getattr(self._of["loss"], "degree", 1.0))

    def aggregate(
        self,
        branch: Branch,
        J: Tensor,
        G: Gramian | None,
        context: Context,
        *,
        out: Tensor | None = None,
        add: bool = False,
        factor: float | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the direction of the rows of ``J``, in memory of its own, and the weights if there are any.

        Args:
            branch: whose aggregator to use.
            J: rows, ``(m, n)``.
            G: their Gramian if it is known, on the CPU.
            context: for an aggregator that uses it.
            out: where to put the direction, ``(n,)``; ``None``: into new memory.
            add: add it to what is in ``out``.
            factor: multiplies the direction, but not beyond the length that the aggregator allows; not the weights.

        Raises:
            FloatingPointError: if weights or direction are not finite.
            ValueError: if the aggregator returns no direction of shape ``(n,)``, or changes the rows.
        """
        aggregator = self._of[branch]
        more = (context,) if getattr(aggregator, "uses_context", False) else ()
        if isinstance(aggregator, GramianAggregator):
            known = self.layout.gramian(J).cpu() if G is None else G
            weights = self.ranks.first(aggregator.weights_of(known, *more))
            scale = 1.0 if factor is None else self._limited(factor, partial(known.norm_of_sum, weights))
            return weighted_sum(J, weights * scale, gramian=known, out=out, add=add), weights
        place = torch.empty_like(J[0]) if out is None else out
        rows = self.layout.assembled(J)
        version = rows._version
        with without_autocast(J.device):
            d: Any = cast("Any", aggregator)(rows, *more)
        _check_direction(aggregator, d, rows, changed=rows._version != version)
        d = d.detach()  # the rows, or the aggregator's own memory, may be what it returned
        if not self.ranks.alone:  # it may have drawn random numbers, of which each rank has its own
            d = self.ranks.take_from_first(d.clone().contiguous())
        if factor is not None:
            d = d * self._limited(factor, lambda: float(norm([d])))
        d = self.layout.own_part(d)
        return place.add_(d) if add else place.copy_(d), None

    def parameters(self) -> Iterable[Parameter]:
        """Return the trainable parameters of the aggregator."""
        return getattr(self._of["loss"], "parameters", tuple)()

    def weigh(self, context: Context) -> Tensor:
        """Return the weights of the losses, ``(m,)``, float64 on the CPU; for a loss weighting.

        Raises:
            ValueError: if the weighting does not return one weight for each loss.
            FloatingPointError: if a weight is not finite.
        """
        weighting = cast(LossWeighting, self._of["loss"])
        with on_cpu():
            w = weighting.weights(context.losses.clone(), context)
        return self.ranks.first(check_weights(weighting, w, len(context.losses)))

    def own_gradients(self, context: Context) -> list[tuple[Parameter, Tensor]]:
        """Return the parameters of a loss weighting that these losses train, with their gradients."""
        with on_cpu():
            return cast(LossWeighting, self._of["loss"]).own_gradients(context.losses, context)

    def after_step(self, context: Context) -> None:
        """Tell the aggregator the losses after the step."""
        if context.rows:
            with on_cpu():
                cast(Aggregator, self._of["loss"]).after_step(context.losses, context)

    def _limited(self, factor: float, length_of: Callable[[], float]) -> float:
        """Return a factor for a direction, shortened to what the aggregator allows for one of such a length."""
        longest = getattr(self._of["loss"], "max_norm", None)
        length = 0.0 if longest is None else length_of()
        return factor if longest is None or factor * length <= longest else longest / length

    def start_epoch(self, epoch: int, total: int | None) -> None:
        """Tell whatever counts epochs that one begins."""
        for aggregator in self._of.values():
            if isinstance(aggregator, Aggregator):
                aggregator.start_epoch(epoch, total)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state of every branch that has one."""
        return {name: _state(aggregator) for name, aggregator in self._of.items() if _has_state(aggregator)}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: if it is the state of other branches.
        """
        expected = {name for name, aggregator in self._of.items() if _has_state(aggregator)}
        if set(states) != expected:
            raise ValueError(
                f"the state has the branches {sorted(states)}; expected {sorted(expected)}. Load it into a FlatMTL "
                "with the same aggregator and the same combine."
            )
        for name, state in states.items():
            _load(self._of[name], state)

    def snapshot(self) -> Callable[[], None]:
        """Return a function that puts every branch back to how it is now."""
        modules = [foreign.Snapshot(a) for a in self._of.values() if isinstance(a, nn.Module)]
        others = [(a, _state(a)) for a in self._of.values() if _has_state(a) and not isinstance(a, nn.Module)]

        def restore() -> None:
            for module in modules:
                module.restore()
            for aggregator, state in others:
                _load(aggregator, state)

        return restore


def _has_state(aggregator: AnyAggregator) -> bool:
    return hasattr(aggregator, "state_dict") and hasattr(aggregator, "load_state_dict")


def _state(aggregator: AnyAggregator) -> Any:
    if isinstance(aggregator, nn.Module):
        return foreign.saved(aggregator)
    return copy.deepcopy(cast(Any, aggregator).state_dict())


def _load(aggregator: AnyAggregator, state: Any) -> None:
    if isinstance(aggregator, nn.Module):
        foreign.load(aggregator, state)
    else:
        cast(Any, aggregator).load_state_dict(copy.deepcopy(state))


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
