r"""Quadratic problems over weights that are not negative, solved by one active-set method.

Rows are scaled to unit length first, so that tasks whose gradients differ by many orders of magnitude are
treated alike. With ``U`` the Gramian of the unit rows, :math:`a_i = \min_j \lVert g_j \rVert / \lVert g_i \rVert` and
weights :math:`w_i = a_i v_i`, every problem has the form

.. math::
    \min_{v \ge 0} \; \tfrac12 v^\top U v + t \, b^\top v
    \quad \text{subject to} \quad a^\top v = 1 \quad \text{(or without this constraint)}.

The method is that of Wolfe (1976), *Finding the nearest point in a polytope*, Math. Program. 11, with a linear term.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from flatmtl._linalg import floats
from flatmtl._solvers.rows import DEPENDENT, EPS, NOISE, RIDGE, row_norms, unit_rows


def min_norm_point(gramian: Tensor) -> Tensor:
    r"""Return :math:`w \ge 0` with :math:`\sum_i w_i = 1` that minimises :math:`w^\top G w`, shape ``(m,)``.

    Zero rows share the whole weight equally.
    """
    norms = row_norms(gramian)
    zero = (norms == 0.0).to(torch.float64)
    if bool(zero.any()):
        return zero / zero.sum()
    if len(norms) == 2:
        return _nearest_on_segment(gramian)
    U, a = unit_rows(gramian, norms)
    face, v = Program(U, torch.zeros_like(a), a).minimise(t=0.0)
    w = face.spread(v, a)
    return w / w.sum()


def cone_weights(gramian: Tensor, products: Tensor) -> Tensor:
    r"""Return :math:`x \ge 0` such that :math:`g + J^\top x` is the projection of ``g`` on :math:`\{ d : J d \ge 0 \}`.

    Args:
        gramian: :math:`G = J J^\top`, shape ``(m, m)``.
        products: :math:`J g`, shape ``(m,)``.
    """
    norms = row_norms(gramian)
    x = torch.zeros_like(norms)
    rows = norms.nonzero().squeeze(1)
    if len(rows) == 0:
        return x
    U, a = unit_rows(gramian[rows][:, rows], norms[rows])
    b = products[rows] / (norms[rows] * norms[rows].min())

    def solve(U: Tensor) -> Tensor:
        face, v = Program(U, b, None).minimise(t=1.0)
        return face.spread(v, a)

    return x.index_add(0, rows, certain(solve, U, b, a, lengths=torch.ones_like(a)))


def certain(solve: Callable[[Tensor], Tensor], U: Tensor, b: Tensor, a: Tensor, lengths: Tensor) -> Tensor:
    """Return the solution whose smallest product with a row is largest for certain: with a ridge, or without.

    Rows that are opposite up to rounding can have weights so large that rounding is all that is left of their sum. A
    ridge of the size of the Gramian's rounding bounds them. Rows that depend on each other exactly do not need it.
    """
    unit = torch.diag(torch.ones_like(a))
    _, failed = cast("tuple[Tensor, Tensor]", torch.linalg.cholesky_ex(U - DEPENDENT * unit))
    if not int(failed):
        return solve(U)

    def worst(w: Tensor) -> float:
        v = w / a
        rounding = NOISE * (torch.mv(U.abs(), v) + b.abs())
        return float(((torch.mv(U, v) + b - rounding) * lengths).min())

    return max(solve(U), solve(U + RIDGE * unit), key=worst)


def _nearest_on_segment(G: Tensor) -> Tensor:
    """Return the minimum-norm weights of two rows that are not zero."""
    p, q, _, r = floats(G.flatten())
    first, second = max(r - q, 0.0), max(p - q, 0.0)  # <g_2, g_2 - g_1> and <g_1, g_1 - g_2>
    if first == second == 0.0:  # equal rows
        first = second = 1.0
    return torch.tensor([first / (first + second), second / (first + second)], dtype=torch.float64)


@dataclass(frozen=True)
class Face:
    """The minimisers ``base + t * slope`` over the affine hull of the rows ``support``."""

    support: list[int]
    index: Tensor
    rows: Tensor
    A: Tensor
    base: Tensor
    slope: Tensor

    def at(self, t: float) -> Tensor:
        """Return the minimiser for ``t``, shape ``(len(support),)``."""
        return torch.add(self.base, self.slope, alpha=t)

    def squared_length(self, v: Tensor) -> float:
        """Return the squared length of the combination ``v`` of the support."""
        return max(float(torch.dot(torch.mv(self.A, v), v)), 0.0)

    def root(self, radius: float) -> float:
        """Return the ``t`` whose minimiser has length ``radius * t``, NaN if there is none."""
        A, C = self.squared_length(self.base), self.squared_length(self.slope)
        return math.sqrt(A / (radius**2 - C)) if radius**2 > C else math.nan

    def spread(self, v: Tensor, a: Tensor) -> Tensor:
        """Return the weights ``w = a * v`` of all rows."""
        return torch.zeros_like(a).index_copy_(0, self.index, v).mul_(a)


@dataclass(frozen=True)
class Program:
    """The problem at the top of the file, for every ``t``; ``a`` is None without the equality constraint."""

    U: Tensor
    b: Tensor
    a: Tensor | None
    _faces: dict[tuple[int, ...], "Face | None"] = field(default_factory=dict)

    def minimise(
        self, t: float, support: list[int] | None = None, values: list[float] | None = None
    ) -> tuple[Face, Tensor]:
        """Return the face of the optimum and the weights on it, from a feasible point if one is given."""
        if support is None or values is None:
            support, values = self._first_guess(t)
        face = self._descend(t, support, values)
        seen, refused = {frozenset(face.support)}, set[int]()
        for _ in range(100 + 20 * len(self.U)):
            v = face.at(t)
            entering = self._most_violated(face, v, t, refused)
            if entering is None:
                return face, v
            lower = self._descend(t, [*face.support, entering], [*floats(v), 0.0])
            if frozenset(lower.support) in seen:  # the objective fell by rounding only
                refused.add(entering)
            else:
                face = lower
                seen.add(frozenset(face.support))
                refused.clear()
        raise RuntimeError(unsolved(len(self.U)))

    def _first_guess(self, t: float) -> tuple[list[int], list[float]]:
        """Return a feasible point: the minimiser on all rows, then again without those of negative weight."""
        support = list(range(len(self.U)))
        while (face := self._face(support)) is not None:
            values = floats(face.at(t))
            positive = [i for i, v in zip(support, values, strict=True) if v > 0.0]
            if len(positive) == len(support):
                return support, values
            support = positive
        return ([], []) if self.a is None else ([int(self.a.argmax())], [1.0])

    def _face(self, support: list[int]) -> Face | None:
        """Return the face of ``support``, None if its rows depend on each other to working precision."""
        key = tuple(support)
        if key not in self._faces:
            self._faces[key] = self._solve(support)
        return self._faces[key]

    def _solve(self, support: list[int]) -> Face | None:
        """Find the face of ``support``."""
        index, rows, A, a = self._restricted_to(support)
        L, failed = cast("tuple[Tensor, Tensor]", torch.linalg.cholesky_ex(_definite(A, a)))
        if int(failed) or min(floats(L.diagonal()), default=1.0) ** 2 <= EPS:
            return None
        b = self.b.index_select(0, index)
        if a is None:
            slope = -torch.cholesky_solve(b[:, None], L).squeeze(1)
            return Face(support, index, rows, A, torch.zeros_like(slope), slope)
        y, z = torch.cholesky_solve(torch.stack([a, b], dim=1), L).unbind(1)
        ay = torch.dot(a, y)
        return Face(support, index, rows, A, y / ay, y * (torch.dot(a, z) / ay) - z)

    def _restricted_to(self, support: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return indices, rows, Gramian and part of ``a`` of the support."""
        index = torch.tensor(support, dtype=torch.int64)
        rows = self.U.index_select(0, index)
        return index, rows, rows.index_select(1, index), None if self.a is None else self.a.index_select(0, index)

    def _descend(self, t: float, support: list[int], values: list[float]) -> Face:
        """Go to the minimiser over the hull of the support, leaving behind each row whose weight reaches zero."""
        while True:
            face = self._face(support)
            if face is None:
                direction = self._flat_direction(t, support, values)
            else:
                direction = [x - v for x, v in zip(floats(face.at(t)), values, strict=True)]
            reach = [(-v / d, k) for k, (v, d) in enumerate(zip(values, direction, strict=True)) if d < 0.0]
            step, first = min(reach, default=(math.inf, -1))
            if face is not None and step > 1.0:
                return face
            moved = [(i, v + step * d) for i, v, d in zip(support, values, direction, strict=True)]
            moved = [(i, v) for k, (i, v) in enumerate(moved) if k != first and v > 0.0]
            support, values = [i for i, _ in moved], [v for _, v in moved]

    def _flat_direction(self, t: float, support: list[int], values: list[float]) -> list[float]:
        """Return a direction, with a negative entry, along which rows that depend on each other hardly move."""
        index, rows, A, a = self._restricted_to(support)
        _, Q = cast("tuple[Tensor, Tensor]", torch.linalg.eigh(_definite(A, a)))
        z = Q[:, 0]
        if a is not None:  # stay on the hull
            z = z - a * (torch.dot(a, z) / torch.dot(a, a))
        gradient = torch.mv(rows.T, torch.tensor(values, dtype=torch.float64)).add_(self.b, alpha=t)
        if float(torch.dot(gradient.index_select(0, index), z)) > 0.0:
            z = -z
        return floats(z if bool((z < 0.0).any()) else -z)

    def _most_violated(self, face: Face, v: Tensor, t: float, refused: set[int]) -> int | None:
        """Return the row along which the objective falls most, None if it falls nowhere by more than rounding."""
        slope = torch.mv(face.rows.T, v).add_(self.b, alpha=t)
        noise = self.b.abs().mul_(t).add_(v.sum())
        if self.a is not None:
            slope = slope - self.a * torch.dot(slope.index_select(0, face.index), v)  # optimality condition
            noise = noise + self.a * torch.dot(noise.index_select(0, face.index), v)
        excess = slope.add_(noise, alpha=NOISE)
        excess.index_fill_(0, face.index, 0.0)
        if refused:
            excess[list(refused)] = 0.0
        row = int(excess.argmin())
        return row if float(excess[row]) < 0.0 else None


def _definite(A: Tensor, a: Tensor | None) -> Tensor:
    r"""Return a matrix with the same minimisers where :math:`a^\top v = 1`, definite unless rows depend affinely."""
    if a is None:
        return A
    c = a / a.max()
    return torch.addr(A, c, c)


def unsolved(m: int) -> str:
    return (
        f"the active-set method found no optimum for {m} tasks within its iterations, which should not happen. "
        "Please report it with the Gramian, and use another aggregator meanwhile."
    )
