"""Task gradients turned towards each other until their cosines reach what was usual so far, and added up."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flatmtl._solvers.rows import NOISE, row_norms
from flatmtl.aggregators.base import Drawing, GramianAggregator
from flatmtl.aggregators.checks import in_float64
from flatmtl.aggregators.context import Context, present


class GradVac(Drawing, GramianAggregator):
    r"""Gradient vaccine: each task gradient is turned to those it agrees with less than usual, then all are added.

    For task ``i``, start from :math:`x_i = g_i` and go through the other tasks ``j`` in random order. With
    :math:`\varphi = \cos(x_i, g_j)` and the target :math:`\hat\varphi = \hat\varphi_{ij}`,

    .. math::
        x_i \leftarrow x_i + \lVert x_i \rVert \, \frac{\hat\varphi \sqrt{1 - \varphi^2} - \varphi \sqrt{1 -
        \hat\varphi^2}}{\lVert g_j \rVert \sqrt{1 - \hat\varphi^2}} \, g_j \quad \text{if } \varphi < \hat\varphi,
        \qquad \hat\varphi_{ij} \leftarrow (1 - \beta) \, \hat\varphi_{ij} + \beta \, \varphi,

    after which :math:`\cos(x_i, g_j)` is the old target; then :math:`d = \sum_i x_i`. Targets start at 0, so the
    first call, and every call with ``beta=0``, is that of :class:`~flatmtl.aggregators.PCGrad`. A turn to a positive
    target makes :math:`x_i` longer: with many tasks whose cosines vary a lot, a large ``beta`` makes ``d`` very long.

    Where the paper leaves a choice, or codes differ from it:

    - targets belong to ordered pairs of tasks, as in the paper: :math:`\hat\varphi_{ij}` follows :math:`x_i`, which is
      changed, against the original :math:`g_j`, so it differs from :math:`\hat\varphi_{ji}`. They are updated at every
      visit (LibMTL: only where :math:`\varphi < \hat\varphi`), and each is visited once a call;
    - the paper draws an order per group of parameters; all parameters are one group, with one order per task;
    - ``beta`` is the paper's 0.01 (TorchJD and LibMTL: 0.5), and no small constant is added to denominators;
    - a pair takes no part, and keeps its target, if :math:`x_i` or :math:`g_j` is zero (to working precision: opposite
      rows) or one of its tasks is absent. Targets within rounding of 1 are taken just below it.

    Args:
        beta: how fast targets follow the cosines; between 0 and 1.
        seed: of the aggregator's own random generator; the global random state is neither used nor changed.

    Cost: the Gramian and one product with ``J``; ``m - 1`` steps of ``m`` by ``m`` for all tasks at once.

    Scale: homogeneous of degree 1 from the same state, ``GradVac()(s * J) == s * GradVac()(J)``, for all ``s > 0``.

    Shape:
        - Input: ``(m, n)``, any floating dtype.
        - Output: ``(n,)``, same dtype and device.

    References:
        - Wang, Tsvetkov, Firat and Cao (2021), *Gradient vaccine: investigating and improving multi-task optimization
          in massively multilingual models*, ICLR.

    Example:
        >>> import torch
        >>> aggregator = GradVac(beta=0.5)
        >>> aggregator(torch.tensor([[1.0, 0.0], [3.0, 4.0]]))  # cosine 0.6, target 0, then 0.3
        tensor([4., 4.])
        >>> aggregator(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))  # cosine 0, turned to 0.3
        tensor([1.3145, 1.3145])
    """

    uses_context = True
    order_dependent = True

    def __init__(self, beta: float = 0.01, seed: int = 0) -> None:
        if not 0.0 <= beta <= 1.0:
            raise ValueError(f"beta must be between 0 and 1, got {beta}. beta=0 is PCGrad; the paper has 0.01.")
        self.beta = beta
        super().__init__(seed)
        self._targets = torch.zeros(0, 0, dtype=torch.float64, device="cpu")

    def weights(self, gramian: Tensor, context: Context | None = None) -> Tensor:
        """Return how often each task gradient enters the direction, and let the targets follow; see the class."""
        G = in_float64(gramian)
        m, norms = len(G), row_norms(G)
        lengths = torch.where(norms > 0.0, norms, 1.0)
        U, X, i = G / lengths[:, None] / lengths, torch.eye(m, dtype=torch.float64), torch.arange(m)
        products = U.clone()  # x_i = |g_i| sum_k X[i, k] u_k, and <x_i, u_j> / |g_i|
        task = torch.tensor(present(context, m))
        self._make_room_for(int(task.max()) + 1)
        for j in self._orders(m).T:
            square = (X * products).sum(dim=1)
            there = (square > NOISE * X.abs().sum(dim=1) ** 2) & (norms[j] > 0.0)
            x = torch.where(there, square, 1.0).sqrt()
            cosine = (products[i, j] / x).clamp(-1.0, 1.0)
            target = self._targets[task, task[j]]
            wanted = target.clamp(max=1.0 - NOISE)
            turn = x * (wanted * ((1.0 - cosine**2) / (1.0 - wanted**2)).sqrt() - cosine)
            turn = torch.where(there & (cosine < wanted), turn, 0.0)
            X[i, j] += turn
            products += turn[:, None] * U[j]
            self._targets[task, task[j]] = torch.where(there, torch.lerp(target, cosine, self.beta), target)
        return (torch.mv(X.T, norms) / lengths).to(gramian)

    def state_dict(self) -> dict[str, Any]:
        """Return the targets, a row and a column for each task seen so far, and the state of the random generator."""
        return {**super().state_dict(), "targets": self._targets.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._targets = state["targets"].to("cpu", torch.float64, copy=True)

    def _make_room_for(self, tasks: int) -> None:
        """Let the targets be those of at least so many tasks."""
        more = max(tasks - len(self._targets), 0)
        self._targets = torch.nn.functional.pad(self._targets, (0, more, 0, more))
