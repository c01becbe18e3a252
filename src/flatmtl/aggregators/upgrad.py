"""The mean of the task gradients, each projected on the directions that conflict with no task."""

from typing import cast

import torch
from torch import Tensor

from flatmtl._solvers.quadratic import cone_weights
from flatmtl._solvers.rows import NOISE, RIDGE, row_norms
from flatmtl.aggregators.base import GramianAggregator
from flatmtl.aggregators.checks import in_float64
from flatmtl.aggregators.context import Context


class UPGrad(GramianAggregator):
    r"""Unconflicting projection of gradients: each is projected on the dual cone, then the mean is taken.

    With :math:`\mathcal C = \{ d : J d \ge 0 \}`, the cone of the directions that conflict with no task,

    .. math::
        d = \frac1m \sum_i \arg\min_{x \in \mathcal C} \, \lVert x - g_i \rVert.

    The cone is convex, so the mean of its points lies in it: the direction never conflicts with a task. Where no
    two task gradients conflict, they all lie in the cone, and ``d`` is their mean. Each task has a say in proportion
    to the length of its gradient. ``d = 0`` at Pareto-stationary points where the cone holds nothing of any task
    gradient, as for opposite ones; where it does, ``d`` still helps some tasks without harm to the others.

    A task gradient that is zero restricts nothing and adds nothing but its share of the mean. A ridge of the size of
    the rounding, 1.4e-14, on the Gramian of the unit rows bounds the weights where rows depend on each other up to
    rounding, as opposite ones do; products :math:`\langle d, g_i \rangle` are then at least -1e-7 of the largest
    :math:`\lVert g_j \rVert \lVert g_i \rVert`.

    Cost: the Gramian and one product with ``J``. The ``m`` projections are solved exactly on the Gramian, all at once
    by principal pivoting, at a cost that does not depend on the number of parameters.

    Scale: homogeneous of degree 1, ``UPGrad()(s * J) == s * UPGrad()(J)``, for all ``s > 0``.

    Shape:
        - Input: ``(m, n)``, any floating dtype.
        - Output: ``(n,)``, same dtype and device.

    References:
        - Quinton and Rey (2024), *Jacobian descent for multi-objective optimization*, arXiv:2406.16232.
        - Júdice and Pires (1994), *A block principal pivoting algorithm for large-scale strictly monotone linear
          complementarity problems*, Computers and Operations Research 21.

    Example:
        >>> import torch
        >>> J = torch.tensor([[1.0, 0.0], [-2.0, 2.0]])
        >>> UPGrad()(J)
        tensor([0.2500, 1.2500])
    """

    def weights(self, gramian: Tensor, context: Context | None = None) -> Tensor:
        """Return the weights of the mean of the projections; see the class."""
        G = in_float64(gramian)
        norms = row_norms(G)
        lengths = torch.where(norms > 0.0, norms, 1.0)
        added, unsolved = _project_all(G / lengths[:, None] / lengths)
        w = torch.mv(added.T, norms) / lengths
        for i in unsolved:
            w += cone_weights(G, G[i])
        return ((w + 1.0) / len(G)).to(gramian)


def _project_all(U: Tensor) -> tuple[Tensor, list[int]]:
    r"""Project each unit row on the dual cone of all, by block principal pivoting.

    Row ``i`` asks for :math:`v \ge 0` with a slope :math:`U v + U_i \ge 0` that is 0 wherever ``v`` is positive. From
    a guess of where that is, all rows whose sign is wrong change sides, until none is. This need not end: what is open
    after a few rounds is left to the active-set method.

    Returns:
        The ``v`` of all problems, ``(m, m)``, and the positions of those unsolved, whose ``v`` is 0.
    """
    m = len(U)
    ridge = torch.eye(m, dtype=U.dtype) * RIDGE
    solution, unsolved = torch.zeros_like(U), torch.arange(m)
    positive = U < 0.0  # all that conflict with row i
    for _ in range(15):
        b = U[unsolved]
        A = torch.where(positive[:, :, None] & positive[:, None, :], U + ridge, torch.eye(m, dtype=U.dtype))
        L, failed = cast("tuple[Tensor, Tensor]", torch.linalg.cholesky_ex(A))
        v = torch.cholesky_solve(torch.where(positive, -b, 0.0)[:, :, None], L).squeeze(2)
        noise = NOISE * (b.abs() + v.abs().sum(dim=1, keepdim=True))
        wrong = torch.where(positive, v < 0.0, v @ U + b < -noise)
        solved = (failed == 0) & ~wrong.any(dim=1)
        solution[unsolved[solved]] = v[solved]
        unsolved, positive = unsolved[~solved], (positive ^ wrong)[~solved]
        if len(unsolved) == 0:
            break
    return solution, cast("list[int]", unsolved.tolist())
