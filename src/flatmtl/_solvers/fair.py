r"""Weights with :math:`G w = w^{-1/\alpha}`, the equation of Nash-MTL and FairGrad, by Newton's method.

With the rows scaled to unit length, Gramian ``U``, :math:`a_i = \min_j \lVert g_j \rVert / \lVert g_i \rVert` and
:math:`w_i = a_i x_i` in units of the shortest row, the equation is :math:`U x = c \, x^{-1/\alpha}` with
:math:`c = a^{1 - 1/\alpha}`, or :math:`h = 0` for

.. math::
    h(\log x) = \log(U x) + \tfrac1\alpha \log x - \log c.

Wherever :math:`U x > 0`, the Jacobian of ``h`` is :math:`Q^{-1} (X U X + Q / \alpha)` with :math:`X = \mathrm{diag}(x)`
and :math:`Q = \mathrm{diag}(x \circ U x)`: Newton's equation is definite, also for rows that depend on each other. As
every right-hand side :math:`c > 0` has exactly one solution, ``h`` maps :math:`\{x > 0 : U x > 0\}` one to one onto
:math:`\mathbb{R}^m`, so that nothing but rounding keeps a Newton method that reduces ``h`` from getting to zero. This
set is empty if and only if zero is a convex combination of the rows: then there are no such weights.
"""

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor

from flatmtl._solvers.quadratic import min_norm_point
from flatmtl._solvers.rows import EPS, NOISE, row_norms, unit_rows

_CLOSE = 256 * EPS  # size of h that is rounding
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
    rows = norms.nonzero().squeeze(1)
    if len(rows) == 0:
        return Fair(norms, 0.0)
    if len(rows) < len(norms):
        weights, residual = fair_weights(gramian[rows][:, rows], alpha)
        return Fair(torch.zeros_like(norms).index_copy_(0, rows, weights), residual)
    U, a = unit_rows(gramian, norms)
    x = _interior(U, guess=a ** ((alpha - 1.0) / (alpha + 1.0)))
    if x is None:
        return Fair(torch.zeros_like(norms), math.inf)
    found = _solve(U, a.log(), alpha, x)
    unit = norms.min() ** (-2.0 * alpha / (1.0 + alpha))
    weights, residual = found.x * a * unit, float(found.h.expm1().abs().max())
    beyond = not math.isfinite(residual + float(weights.sum()))  # the range of double precision
    return Fair(torch.zeros_like(norms), math.inf) if beyond else Fair(weights, residual)


def _interior(U: Tensor, guess: Tensor) -> Tensor | None:
    r"""Return a point with :math:`x > 0` and :math:`U x > 0`, the guess if it is one, None if there is none.

    Newton's method for :math:`U x = 1 / x`, the minimum of :math:`\tfrac12 x^\top U x - \sum_i \log x_i`, soon gets
    close enough to be positive or goes off to infinity. The point of minimum norm decides if neither is clear.
    """
    if _is_positive(guess, torch.mv(U, guess)):
        return guess
    x, identity = torch.full_like(guess, len(guess) ** -0.5), torch.eye(len(guess), dtype=torch.float64)
    for _ in range(8):
        p = torch.mv(U, x)
        if float(torch.dot(x, p)) <= NOISE * float(x.sum()) ** 2:
            return None
        if _is_positive(x, p):
            return x
        step = _solve_definite(identity, U, x, 1.0 - x * p)
        x = x * (1.0 + step * _longest(float(step.min())))
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
    """Return how much of a step to take if it lets an entry fall by this negative multiple of the entry."""
    return min(1.0, -_TO_BOUNDARY / fall) if fall < 0.0 else 1.0


def _solve_definite(D: Tensor, U: Tensor, e: Tensor, b: Tensor) -> Tensor:
    """Solve ``(D + E U E) y = b`` with ``E = diag(e)``."""
    L, _ = cast("tuple[Tensor, Tensor]", torch.linalg.cholesky_ex(torch.addcmul(D, U, e.outer(e))))
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
        self.D = torch.eye(len(U), dtype=torch.float64).div_(alpha)

    def newton(self, x: Tensor, steps: int) -> _Point:
        """Return the last point of Newton's method from where ``U x > 0``, after so many steps at most."""
        point = self._best_multiple(x)
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

    def _best_multiple(self, x: Tensor) -> _Point:
        """Return the multiple of ``x`` of the smallest size: a factor shifts all entries of ``h`` alike."""
        least, greatest = self._at(x).h.aminmax()
        shift = least.add_(greatest).mul_(-0.5 * self.alpha / (1.0 + self.alpha))
        return self._at(x * shift.exp_())

    def _next(self, point: _Point) -> _Point | None:
        """Return the point after one Newton step, shortened until ``h`` gets smaller; None if it does not."""
        x, p, h, size = point
        root = (x * p).sqrt_()
        step = _solve_definite(self.D, self.U, (x / p).sqrt_(), h * root).div_(root).neg_()
        rise = torch.add(h, step, alpha=1.0 / self.alpha).neg_()  # the relative change of U x, as step is of x
        # An entry too small to count in U x follows its own equation, over any number of orders of magnitude.
        small = 0.1 * float(p.min())
        follows = x < small if float(x.min()) < small else None
        fall = step if follows is None else step.masked_fill(follows, 0.0)
        t = _longest(float(torch.minimum(fall, rise).min()))
        for _ in range(8):
            moved = torch.addcmul(x, x, step, value=t)
            if follows is not None:
                own = (rise * t).log1p_().add_(h, alpha=t).mul_(-self.alpha).exp_()
                moved = torch.where(follows, own * x, moved)
            following = self._at(moved)
            if following.size <= (1.0 - 0.1 * t) * size:
                return following
            if size <= _CONVERGED:  # only rounding is left
                break
            t *= 0.5
        return None
