"""The direction on which the tasks agree in Nash's sense."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flatmtl._linalg import Gramian, floats
from flatmtl._solvers.fair import fair_weights
from flatmtl.aggregators.base import GramianAggregator
from flatmtl.aggregators.checks import in_float64, on_cpu
from flatmtl.aggregators.context import Context, present


class NashMTL(GramianAggregator):
    r"""Nash bargaining: the direction with the largest product of the tasks' gains.

    Task ``i`` gains :math:`\langle g_i, d \rangle`. Among directions of a given length, the bargaining solution
    maximises :math:`\prod_i \langle g_i, d \rangle`. It is

    .. math::
        d = J^\top w, \qquad w > 0, \qquad G w = 1 / w \quad \text{(elementwise)}, \qquad G = J J^\top.

    The gain of every task is :math:`1 / w_i > 0`, so ``d`` conflicts with none. The direction is the same when a
    single task's loss is multiplied by any factor, and its length is always :math:`\sqrt m`.

    Where the definition leaves ``d`` open, which is said by a warning, once:

    - a task gradient that is zero cannot gain: it is left out, its weight is 0;
    - if zero is a convex combination of the others (a Pareto-stationary point, such as opposite gradients), there is
      nothing to agree on: weights and direction are 0;
    - task gradients that are opposite to within the rounding of the Gramian: the best that float64 allows.

    Args:
        max_norm: the most that the direction may measure, ``None`` for no limit. The limit holds for loss part and
            flat part each, after whatever ``flat_scale`` of :class:`flatmtl.FlatMTL` does.
        update_every: the weights are found anew at every so many calls, and used again in between. They are also
            found anew when other tasks are present than at the call before.

    Cost: the Gramian and one product with ``J``. The problem is convex and solved by Newton's method to a relative
    residual of 1e-10, at a cost that does not depend on the number of parameters.

    Scale: homogeneous of degree 0, ``NashMTL()(s * J) == NashMTL()(J)``, for all ``s > 0``.

    Shape:
        - Input: ``(m, n)``, any floating dtype.
        - Output: ``(n,)``, same dtype and device.

    Raises:
        ValueError: if ``max_norm`` or ``update_every`` is not positive.

    References:
        - Navon, Shamsian, Achituve, Maron, Kawaguchi, Chechik and Fetaya (2022), *Multi-task learning as a bargaining
          game*, ICML.

    Example:
        >>> import torch
        >>> J = torch.tensor([[1.0, 0.0], [0.0, 8.0]])
        >>> NashMTL()(J)
        tensor([1., 1.])
        >>> NashMTL(max_norm=1.0)(J)
        tensor([0.7071, 0.7071])
    """

    degree = 0.0
    uses_context = True

    def __init__(self, max_norm: float | None = None, update_every: int = 1) -> None:
        if max_norm is not None and not (math.isfinite(max_norm) and max_norm > 0.0):
            raise ValueError(f"max_norm must be a positive number, or None for no limit, got {max_norm}.")
        if update_every < 1 or int(update_every) != update_every:
            raise ValueError(f"update_every must be a whole number of calls of at least 1, got {update_every}.")
        self.max_norm = max_norm
        self.update_every = update_every
        self._last: dict[int, float] = {}  # weights by position, in units of no scale
        self._age = 0  # calls since they were found

    def weights(self, gramian: Tensor, context: Context | None = None) -> Tensor:
        """Return the weights of the bargaining solution; see the class."""
        return self.weights_of(Gramian(in_float64(gramian), 1.0), context).to(gramian)

    def weights_of(self, gramian: Gramian, context: Context | None = None) -> Tensor:
        r"""Return the weights for a Gramian :math:`s^2 G` whose factor :math:`s^2` is kept apart."""
        G = in_float64(gramian.G)
        tasks = present(context, len(G))
        if self._last.keys() != set(tasks) or self._age >= self.update_every:
            self._last = dict(zip(tasks, floats(self._solve(G) / gramian.scale), strict=True))
            self._age = 0
        self._age += 1
        w = torch.tensor([self._last[task] for task in tasks], dtype=torch.float64, device="cpu")
        return w if self.max_norm is None else w * self._shortening(G, w * gramian.scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights found last, for each task, and how often they were used."""
        return {"last": dict(self._last), "age": self._age}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._last, self._age = dict(state["last"]), state["age"]

    def _solve(self, G: Tensor) -> Tensor:
        with on_cpu():
            found = fair_weights(G, alpha=1.0)
        self._say_left_out(G)
        self._say_unsolved(found.residual)
        return found.weights

    def _shortening(self, G: Tensor, w: Tensor) -> float:
        """Return the factor that makes the direction as short as it must be."""
        length = math.sqrt(max(float(torch.dot(w, torch.mv(G, w))), 0.0))
        assert self.max_norm is not None
        return 1.0 if length <= self.max_norm else self.max_norm / length
