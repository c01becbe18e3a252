r"""Weights with :math:`G w = w^{-1/\alpha}`, the equation of Nash-MTL and FairGrad, by Newton's method.

With the rows scaled to unit length, Gramian ``U``, :math:`a_i = \min_j \lVert g_j \rVert / \lVert g_i \rVert` and
:math:`w_i = a_i x_i` in units of the shortest row, the equation is :math:`U x = c \, x^{-1/\alpha}` with
:math:`c = a^{1 - 1/\alpha}`, or :math:`h = 0` for

.. math::
    h(\log x) = \log(U x) + \tfrac1\alpha \log x - \log c.

Wherever :math:`p = U x > 0`, Newton's step solves :math:`(U + \mathrm{diag}(p / \alpha x)) \, \Delta x = -p \, h`,
which is positive definite, also for rows that depend on each other. As every right-hand side :math:`c > 0` has exactly
one solution, ``h`` maps :math:`\{x > 0 : U x > 0\}` one to one onto :math:`\mathbb{R}^m`: a Newton method that reduces
``h`` at every step has nothing to get stuck at but rounding. This set is empty if and only if zero is a convex
combination of the rows; then there are no such weights.
"""

import math
from operator import mul
from typing import NamedTuple, cast

import torch
from torch import Tensor

from flatmtl._linalg import floats
from flatmtl._solvers.quadratic import min_norm_point
from flatmtl._solvers.rows import EPS, NOISE, row_norms, unit_rows

_CLOSE = 256 * EPS  # size of h that is rounding
_FEW = 5  # rows
_NEAR = 0.5  # size of h from which whole steps are tried first
_SOLVED = 1e-11  # size of h that leaves nothing to be wished for
_CONVERGED = 1e-6  # size of h whose next step ends at rounding
_TO_BOUNDARY = 0.95  # the part of the way to the nearest zero of x or U x that a step may go


class Fair(NamedTuple):
    r"""Weights and their residual :math:`\max_i |(G w)_i \, w_i^{1/\alpha} - 1|`."""

    weights: Tensor
    residual: float


def fair_weights(gramian: Tensor, alpha: float) -> Fair:
    r"""Return :math:`w > 0` with :math:`G w = w^{-1/\alpha}`, shape ``(m,)``.

    They minimise :math:`\tfrac12 w^\top G w - \sum_i \varphi(w_i)` with :math:`\varphi'(w) = w^{-1/\alpha}`. Rows
    that are zero get the weight zero and no part in the residual. If zero is a convex combination of the other rows to
    working precision, there is no solution: all weights are zero, and the residual is infinite.
    """
    norms = row_norms(gramian)
    shortest = norms.min()
    if float(shortest) == 0.0:
        return _without_zero_rows(gramian, norms, alpha)
    U, a = unit_rows(gramian, norms)
    guess = a ** ((alpha - 1.0) / (alpha + 1.0))
    x, residual = _plainly(U, a, alpha, guess) or _carefully(U, a, alpha, guess) or (None, math.inf)
    if x is None:
        return Fair(torch.zeros_like(norms), math.inf)
    weights = x * a * shortest ** (-2.0 * alpha / (1.0 + alpha))
    if not math.isfinite(residual + float(weights.sum())):  # beyond the range of double precision
        return Fair(torch.zeros_like(norms), math.inf)
    return Fair(weights, residual)


def _plainly(U: Tensor, a: Tensor, alpha: float, guess: Tensor) -> tuple[Tensor, float] | None:
    r"""Return the solution and its residual by Newton's method for :math:`U x = q`, None if it does not get there soon.

    Nothing but ``x > 0`` is seen to. For most task gradients that is enough, and takes four to seven steps.
    """
    if len(a) > _FEW:
        return _plainly_in_tensors(U, a, alpha, guess)
    try:
        return _plainly_in_floats(U, a, alpha, guess)
    except ArithmeticError:  # beyond the range of double precision
        return None


def _plainly_in_tensors(
    U: Tensor, a: Tensor, alpha: float, guess: Tensor, steps: int = 10, *, until_still: bool = False
) -> tuple[Tensor, float] | None:
    """See :func:`_plainly`; with ``until_still`` go on until ``x`` stands still, whatever the residual."""
    c = a ** (1.0 - 1.0 / alpha)
    common = float(torch.mv(U, guess).dot(guess)) / float(guess.dot(guess))
    x = guess * max(common, 0.1) ** (-alpha / (1.0 + alpha))
    A = U.clone()
    ones, diagonal = U.diagonal(), A.diagonal()
    for _ in range(steps):
        q = x.pow(-1.0 / alpha).mul_(c)
        r = torch.mv(U, x).sub_(q)
        size = float(cast("Tensor", torch.linalg.vector_norm(r / q, math.inf)))
        if size <= _CLOSE:
            return x, size
        torch.add(ones, q.div_(x), alpha=1.0 / alpha, out=diagonal)
        step = _solve_definite(A, r)
        change = step / x if until_still or size > _NEAR else None
        if until_still and change is not None and float(change.abs().max()) <= _CLOSE:
            return x, size
        fall = 0.0 if change is None else float(change.max())
        x = x.sub_(step, alpha=min(1.0, _TO_BOUNDARY / fall) if fall > 0.0 else 1.0)
    return None


def _plainly_in_floats(U: Tensor, a: Tensor, alpha: float, guess: Tensor) -> tuple[Tensor, float] | None:
    """See :func:`_plainly`; for a few rows plain numbers are several times as fast as tensors."""
    rows, few = cast("list[list[float]]", U.tolist()), range(len(a))
    c, x = [v ** (1.0 - 1.0 / alpha) for v in floats(a)], floats(guess)
    common = sum(x[i] * rows[i][j] * x[j] for i in few for j in few) / sum(v * v for v in x)
    scale = max(common, 0.1) ** (-alpha / (1.0 + alpha))
    x = [v * scale for v in x]
    for _ in range(10):
        q = [s * v ** (-1.0 / alpha) for s, v in zip(c, x, strict=True)]
        r = [sum(map(mul, row, x)) - v for row, v in zip(rows, q, strict=True)]
        size = max(abs(v) / s for v, s in zip(r, q, strict=True))
        if size <= _CLOSE:
            return torch.tensor(x, dtype=torch.float64), size
        A = [[*row[:i], row[i] + q[i] / (alpha * x[i]), *row[i + 1 :]] for i, row in enumerate(rows)]
        step = _solve_in_floats(A, r)
        fall = max(s / v for s, v in zip(step, x, strict=True))
        t = _longest(fall)
        x = [v - t * s for v, s in zip(x, step, strict=True)]
    return None


def _solve_in_floats(A: list[list[float]], b: list[float]) -> list[float]:
    """Solve ``A y = b`` for a definite matrix by elimination, in place."""
    y, m = [*b], len(b)
    for k in range(m):
        for i in range(k + 1, m):
            factor = A[i][k] / A[k][k]
            for j in range(k + 1, m):
                A[i][j] -= factor * A[k][j]
            y[i] -= factor * y[k]
    for k in range(m - 1, -1, -1):
        y[k] = (y[k] - sum(A[k][j] * y[j] for j in range(k + 1, m))) / A[k][k]
    return y


def _carefully(U: Tensor, a: Tensor, alpha: float, guess: Tensor) -> tuple[Tensor, float] | None:
    """Return the solution, as exact as can be, and its residual; None if there is none."""
    start = _interior(U, guess)
    if start is None:
        return None
    found = _solve(U, a.log(), alpha, start)
    if found.size <= _SOLVED:
        return found.x, found.size
    # Gains below the rounding of their own sum hide the residual, not the minimum of the convex problem.
    still = _plainly_in_tensors(U, a, alpha, guess, steps=400, until_still=True)
    return still or (found.x, float(found.h.expm1().abs().max()))


def _without_zero_rows(gramian: Tensor, norms: Tensor, alpha: float) -> Fair:
    """Solve for the rows that are not zero."""
    rows = norms.nonzero().squeeze(1)
    if len(rows) == 0:
        return Fair(norms, 0.0)
    weights, residual = fair_weights(gramian[rows][:, rows], alpha)
    return Fair(torch.zeros_like(norms).index_copy_(0, rows, weights), residual)


def _interior(U: Tensor, guess: Tensor) -> Tensor | None:
    r"""Return a point with :math:`x > 0` and :math:`U x > 0`, the guess if it is one, None if there is none.

    Newton's method for :math:`U x = 1 / x`, the minimum of :math:`\tfrac12 x^\top U x - \sum_i \log x_i`, soon gets
    close enough to be positive or goes off to infinity. The point of minimum norm decides if neither is clear.
    """
    if _is_positive(guess, torch.mv(U, guess)):
        return guess
    x = torch.full_like(guess, len(guess) ** -0.5)
    for _ in range(8):
        p = torch.mv(U, x)
        if float(torch.dot(x, p)) <= NOISE * float(x.sum()) ** 2:
            return None
        if _is_positive(x, p):
            return x
        y = x.reciprocal()
        step = _solve_definite(U + (y * y).diag(), p - y)
        x = x.sub(step, alpha=_longest(float((step * y).max())))
    x = min_norm_point(U)
    squared_length = float(torch.dot(x, torch.mv(U, x)))
    x += squared_length / (2.0 * len(x))  # inside, and U x >= squared_length / 2 still
    return x if squared_length > NOISE and float(torch.mv(U, x).min()) > 0.0 else None


def _is_positive(x: Tensor, p: Tensor) -> bool:
    """Return whether all entries of ``p = U x`` are positive by more than their rounding."""
    return float(p.min()) > NOISE * float(x.sum())


def _solve(U: Tensor, log_a: Tensor, alpha: float, start: Tensor) -> "_Point":
    """Return the point where ``h`` is as close to zero as can be."""
    found = _Equation(U, log_a, alpha).newton(start, steps=40)
    if found.size <= max(_CONVERGED, found.rounding()):
        return found
    x = start  # the path of solutions from alpha = 1, where lengths play no part, is longer but smooth
    for stage in _stages(alpha):
        x = _Equation(U, log_a, stage).newton(x, steps=6).x
    return min(found, _Equation(U, log_a, alpha).newton(x, steps=40), key=lambda point: point.size)


def _stages(alpha: float) -> list[float]:
    """Return values between 1 and ``alpha``, at most a factor of 1.2 apart."""
    count = math.ceil(abs(math.log(alpha)) / math.log(1.2))
    return [alpha ** (k / count) for k in range(1, count)]


def _longest(fall: float) -> float:
    """Return how much of a step to take if all of it lets an entry fall by this multiple of itself."""
    return 1.0 if fall <= _TO_BOUNDARY else _TO_BOUNDARY / fall


def _solve_definite(A: Tensor, b: Tensor) -> Tensor:
    """Solve ``A y = b``; no scales on the diagonal make the rounding of Cholesky's method worse."""
    L, _ = cast("tuple[Tensor, Tensor]", torch.linalg.cholesky_ex(A))
    return torch.cholesky_solve(b.unsqueeze(1), L).squeeze(1)


class _Point(NamedTuple):
    """``x``, ``p = U x``, ``h`` and the largest absolute entry of ``h``."""

    x: Tensor
    p: Tensor
    h: Tensor
    size: float

    def rounding(self) -> float:
        """Return about how much of ``h`` may be rounding."""
        return EPS * float(self.x.sum() / self.p.min())


class _Equation:
    """The equation ``h = 0`` at the top of the file."""

    def __init__(self, U: Tensor, log_a: Tensor, alpha: float) -> None:
        self.U, self.alpha = U, alpha
        self.log_c = log_a * (1.0 - 1.0 / alpha)

    def newton(self, x: Tensor, steps: int) -> _Point:
        """Return the last point of Newton's method from where ``U x > 0``, after so many steps at most."""
        point = self._corrected(x)
        for _ in range(steps):
            if point.size <= _CLOSE:
                break
            following = self._next(point)
            if following is None:
                break
            point = following
        return point

    def _at(self, x: Tensor) -> _Point:
        """Evaluate; the size is NaN where ``U x > 0`` fails."""
        p = torch.mv(self.U, x)
        h = p.log().add_(x.log(), alpha=1.0 / self.alpha).sub_(self.log_c)
        return _Point(x, p, h, float(cast("Tensor", torch.linalg.vector_norm(h, math.inf))))

    def _corrected(self, x: Tensor) -> _Point:
        """Return a point after some corrections that are exact for orthogonal rows or if all of ``h`` is the same."""
        point = self._at(x)
        while point.size > _CLOSE:
            following = self._at(point.x * (point.h * (-self.alpha / (1.0 + self.alpha))).exp_())
            if not following.size < point.size:
                break
            worth_it = following.size < 0.5 * point.size and following.size**2 < point.size**3
            point = following
            if not worth_it:  # a Newton step costs three corrections, and squares the size
                break
        return point

    def _next(self, point: _Point) -> _Point | None:
        """Return the point after one Newton step, shortened until ``h`` gets smaller; None if it does not."""
        x, p, h, size = point
        step = _solve_definite(self.U + (p / x).div_(self.alpha).diag(), p * h)
        if size < _NEAR:  # a whole step will do
            following = self._at(x - step)
            if following.size <= 0.5 * size:
                return following
        fall = step / x
        fall_of_p = torch.sub(h, fall, alpha=1.0 / self.alpha)
        t = _longest(float(torch.maximum(fall, fall_of_p).max()))
        follows = None
        if t < 1.0:  # entries of x too small to count in U x follow their own equation, over orders of magnitude
            follows = x < 0.1 * p.min()
            t = _longest(float(torch.maximum(fall.masked_fill(follows, 0.0), fall_of_p).max()))
        for _ in range(8):
            moved = torch.sub(x, step, alpha=t)
            if follows is not None:
                own = (fall_of_p * -t).log1p_().add_(h, alpha=t).mul_(-self.alpha).exp_()
                moved = torch.where(follows, own.mul_(x), moved)
            following = self._at(moved)
            if following.size <= (1.0 - 0.1 * t) * size:
                return following
            if size <= _CONVERGED:  # only rounding is left
                break
            t *= 0.5
        return None
