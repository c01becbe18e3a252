"""What every aggregator is: a function from task gradients to one direction, with a declared scale."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from flatmtl._linalg import Gramian, finite_rows, floats, gramian, weighted_sum
from flatmtl._options import warn
from flatmtl.aggregators.checks import check_jacobian, check_rows, check_weights, on_cpu, times
from flatmtl.aggregators.context import Context, losses_of

SOLVED = 1e-10
"""Relative residual at which a system of equations counts as solved."""


class Aggregator(ABC):
    r"""A function :math:`A` from task gradients ``J`` of shape ``(m, n)`` to one direction ``d`` of shape ``(n,)``.

    Attributes:
        degree: how the direction scales, :math:`A(s J) = s^{\text{degree}} A(J)` for every :math:`s > 0`.
        uses_context: whether the aggregator needs the :class:`Context` as its second argument.
        order_dependent: whether the direction depends on the order of the rows.
        max_norm: the most that the direction may measure, ``None`` for no limit.
        learns_from_step: whether :meth:`after_step` does something.
    """

    degree: float = 1.0
    uses_context: bool = False
    order_dependent: ClassVar[bool] = False
    max_norm: float | None = None
    learns_from_step: ClassVar[bool] = False
    _said: frozenset[str] = frozenset()

    @abstractmethod
    def __call__(self, jacobian: Tensor, context: Context | None = None) -> Tensor:
        """Return the direction of shape ``(n,)`` in the dtype and on the device of ``jacobian``."""

    def parameters(self) -> Iterable[Parameter]:
        """Return what the user's optimizer must train; nothing for most aggregators."""
        return ()

    def for_pairs(self) -> "Aggregator":
        """Return what aggregates two vectors that are not the gradients of two tasks: a copy."""
        return copy.deepcopy(self)

    def start_epoch(self, epoch: int, total: int | None = None) -> None:  # noqa: B027 - most do not count
        """Take note that epoch ``epoch`` of ``total`` begins; for aggregators that count epochs."""

    def after_step(self, losses: Tensor, context: Context | None = None) -> None:
        """Learn from the losses of the same batch after the optimizer's step; see :meth:`LossWeighting.weights`."""
        del losses, context

    def state_dict(self) -> dict[str, Any]:
        """Return what must be saved to resume exactly."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: if ``state`` is not that of an aggregator of this class.
        """
        expected = self.state_dict().keys()
        if state.keys() != expected:
            raise ValueError(
                f"the state has {sorted(state)}; {type(self).__name__} expects {sorted(expected)}. "
                "Load the state of the same aggregator."
            )

    def _say_once(self, message: str) -> None:
        """Warn that a result is legal but probably not meant; once for each instance and kind of message."""
        kind = message.partition(":")[0]
        if kind not in self._said:
            self._said |= {kind}
            warn(f"{type(self).__name__}: {message}")

    def __repr__(self) -> str:
        names = [name for name in signature(type(self)).parameters if hasattr(self, name)]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


class GramianAggregator(Aggregator):
    r"""An aggregator whose direction is :math:`d = J^\top w` with weights that depend on :math:`G = J J^\top` only.

    Its cost beyond one product with ``J`` does not depend on the number of parameters. Weights scale with
    ``degree - 1`` in ``J``.
    """

    @abstractmethod
    def weights(self, gramian: Tensor, context: Context | None = None) -> Tensor:
        """Return the weights of shape ``(m,)`` for a Gramian of shape ``(m, m)``, in its dtype and on its device."""

    def weights_of(self, gramian: Gramian, context: Context | None = None) -> Tensor:
        r"""Return the weights for a Gramian :math:`s^2 G` whose factor :math:`s^2` is kept apart."""
        G = gramian.G.clone()  # whatever a class does to it
        with on_cpu():
            w: Any = self.weights(G, context) if self.uses_context else self.weights(G)
        return times(check_weights(self, w, len(G)), gramian.scale, self.degree - 1.0)

    def __call__(self, jacobian: Tensor, context: Context | None = None) -> Tensor:
        r"""Return the direction :math:`J^\top w` for ``jacobian`` of shape ``(m, n)``; see the class."""
        check_jacobian(jacobian)
        jacobian = jacobian.detach()
        G = gramian(jacobian).cpu()
        return weighted_sum(jacobian, self.weights_of(G, context), gramian=G)

    def _say_left_out(self, G: Tensor, instead: str = "it is left out") -> None:
        """Warn once if some rows, but not all, are zero."""
        squares = floats(G.diagonal())
        if 0.0 in squares and any(squares):
            rows = [i for i, square in enumerate(squares) if square == 0.0]
            self._say_once(
                f"a task gradient is zero: {instead}, here and from now on (rows {rows}, from 0). For a task without "
                "labels return None instead; else see why its loss does not depend on the shared parameters."
            )

    def _say_unsolved(self, residual: float) -> None:
        """Warn once if there is no solution, or none in float64."""
        if math.isinf(residual):
            self._say_once(
                "no direction serves every task: zero is a convex combination of the task gradients, and the "
                "direction is zero. The shared parameters rest at such a point; Mean and CAGrad move on."
            )
        elif residual > SOLVED:
            self._say_once(
                f"the weights are not exact: their relative residual is {residual:.1e}, not below {SOLVED:.0e}. The "
                "gain of some task is less than the rounding of its own sum, since task gradients nearly cancel, or "
                "differ much in length with a small alpha. MGDA and CAGrad do not mind."
            )


class Drawing(Aggregator):
    """An aggregator that draws random numbers from a generator of its own; the global random state is left alone.

    The generator is on the CPU, so that draws do not depend on the device.

    Args:
        seed: of the generator.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._generator = torch.Generator().manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the random generator."""
        return {**super().state_dict(), "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._generator.set_state(state["generator"].cpu())

    def _softmax_of_normals(self, m: int) -> Tensor:
        """Return weights that are positive and sum to 1, drawn anew, shape ``(m,)``."""
        return torch.randn(m, dtype=torch.float64, device="cpu", generator=self._generator).softmax(dim=0)

    def _orders(self, m: int) -> Tensor:
        """Return for each row the other rows in an order drawn anew, shape ``(m, m - 1)``; two rows have but one."""
        if m <= 2:
            return torch.arange(m - 1, -1, -1)[:, None][:, : m - 1]
        drawn = torch.rand(m, m - 1, dtype=torch.float64, device="cpu", generator=self._generator).argsort(dim=1)
        return drawn + (drawn >= torch.arange(m)[:, None])


class LossWeighting(Aggregator):
    r"""An aggregator that scales whole losses: training on :math:`\sum_i w_i L_i` with weights from the losses.

    The shared parameters get :math:`\sum_i w_i g_i`, and the head of task ``i`` gets :math:`w_i h_i`, which
    gradient aggregators never scale. The weights are taken once per step, from the clean losses, and are constants
    of the step: a plain one is one ordinary backward pass, whatever the number of tasks. With a perturbation it is SAM
    on the weighted sum: one perturbation for all tasks, two passes.
    """

    uses_context = True

    @abstractmethod
    def weights(self, losses: Tensor, context: Context | None = None) -> Tensor:
        """Return the weights of shape ``(m,)`` for losses of shape ``(m,)``, in their dtype and on their device.

        Args:
            losses: clean losses of the present tasks.
            context: says which tasks these are; ``None``: all tasks, in order.
        """

    def own_gradients(self, losses: Tensor, context: Context | None = None) -> list[tuple[Parameter, Tensor]]:
        """Return those of :meth:`parameters` that these losses train, each with its gradient; see :meth:`weights`."""
        del losses, context
        return []

    def __call__(self, jacobian: Tensor, context: Context | None = None) -> Tensor:
        r"""Return the direction :math:`J^\top w` for ``jacobian`` of shape ``(m, n)`` and the losses of ``context``."""
        check_jacobian(jacobian)
        jacobian = jacobian.detach()
        check_rows(finite_rows(jacobian))
        losses = losses_of(self, context, len(jacobian))
        with on_cpu():
            return weighted_sum(jacobian, self.weights(losses, context))


AnyAggregator = Aggregator | Callable[[Tensor], Tensor]
"""What :class:`flatmtl.FlatMTL` takes: an :class:`Aggregator`, or any function from ``(m, n)`` to ``(n,)``."""
