"""The problem of CAGrad: the best direction for the worst-served task, in a ball around the mean."""

import math
from typing import cast

import torch
from torch import Tensor

from flatmtl._linalg import floats
from flatmtl._solvers.quadratic import Program, certain, unsolved
from flatmtl._solvers.rows import DEPENDENT, EPS, NOISE, row_norms, unit_rows


def conflict_averse_weights(gramian: Tensor, c: float) -> Tensor:
    r"""Return the weights of the ``d`` that maximises :math:`\min_i \langle g_i, d \rangle` in a ball around the mean.

    The ball is :math:`\lVert d - g_0 \rVert \le c \lVert g_0 \rVert` with :math:`g_0` the mean of all rows; the minimum
    is over the rows that are not zero. Zeros are returned if the mean is zero to working precision.

    Write :math:`d = g_0 + J^\top x` with :math:`x \ge 0`. For :math:`t > 0`, let :math:`w = t x` minimise
    :math:`\tfrac12 \lVert J^\top w + t g_0 \rVert^2` over the simplex: then ``d`` is optimal for the radius
    :math:`\lVert J^\top w \rVert / t`, which falls as ``t`` grows. While the support of ``w`` stays the same,
    :math:`\lVert J^\top w \rVert^2 = A + C t^2`, so the right support gives ``t`` exactly.

    If zero is a convex combination of the rows and the ball meets the cone :math:`\langle g_i, d \rangle \ge 0`, every
    point of both is optimal: the one closest to the mean is returned.
    """
    norms = row_norms(gramian)
    mean = torch.full_like(norms, 1.0 / len(norms))
    products = torch.mv(gramian, mean)  # <g_i, g_0>
    squared_mean = float(torch.dot(products, mean))
    if squared_mean <= EPS * float(norms.mean()) ** 2:
        return torch.zeros_like(norms)
    if c <= EPS:
        return mean
    unit = float(norms.min())
    if unit > 0.0:
        return mean + _correction(gramian, norms, products, radius=c * math.sqrt(squared_mean))
    rows = norms.nonzero().squeeze(1)
    x = _correction(gramian[rows][:, rows], norms[rows], products[rows], radius=c * math.sqrt(squared_mean))
    return mean.index_add(0, rows, x)


def _correction(gramian: Tensor, norms: Tensor, products: Tensor, radius: float) -> Tensor:
    r"""Return ``x`` with :math:`d = g_0 + J^\top x`, for rows none of which is zero."""
    U, a = unit_rows(gramian, norms)
    unit = float(norms.min())
    b = (products / norms).div_(unit)
    radius /= unit
    x = _plainly(U, b, a, radius, support=products <= products.min())
    if x is not None:
        return x
    x = certain(lambda U: _carefully(Program(U, b, a), radius), U, b, a, lengths=1.0 / a)
    # Rows that are opposite up to rounding leave the optimum to rounding: be no worse than the mean then.
    worse = (products + torch.mv(gramian, x)).min() < products.min()
    return torch.zeros_like(x) if bool(worse) else x


def _plainly(U: Tensor, b: Tensor, a: Tensor, radius: float, support: Tensor) -> Tensor | None:
    """Return ``x`` by principal pivoting on the support, None if it does not get there soon.

    All rows whose sign is wrong change sides at once, and ``t`` follows from the support; where it does not, since the
    support is too large yet, it is raised. From the row that the mean serves least, this takes three or four rounds for
    most task gradients. Whether it got there is seen from the optimality condition; problems that rounding may matter
    for are left to the careful method.
    """
    c, ab = a / a.max(), torch.stack([a, b], dim=1)
    largest, t = float(b.abs().max()), 0.0
    for _ in range(20):
        s = support.to(U.dtype)
        cs = c * s
        A = (U * torch.outer(s, s)).addr_(cs, cs)  # as in quadratic.py: definite unless rows depend affinely
        A.diagonal().add_(1.0 - s)
        L, failed = cast("tuple[Tensor, Tensor]", torch.linalg.cholesky_ex(A))
        if int(failed):
            return None
        y, z = torch.cholesky_solve(ab * s.unsqueeze(1), L).unbind(1)
        ay = torch.dot(a, y)
        base, slope = y / ay, y * (torch.dot(a, z) / ay) - z
        U_base, U_slope = torch.mv(U, base), torch.mv(U, slope)
        A0, C = max(float(torch.dot(base, U_base)), 0.0), float(torch.dot(slope, U_slope))
        has_root = radius**2 > C
        t = math.sqrt(A0 / (radius**2 - C)) if has_root else 3.0 * max(t, math.sqrt(A0) / radius)
        v = torch.add(base, slope, alpha=t)
        gradient = torch.add(U_base, U_slope, alpha=t).add_(b, alpha=t)
        excess = gradient - a * torch.dot(gradient, v)  # optimality condition
        size = float(v.sum())
        wrong = torch.where(support, v < 0.0, excess < -NOISE * (t * largest + size))
        if has_root and not bool(wrong.any()):
            certain_enough = DEPENDENT * size**2 < A0 and float(L.diagonal().min()) ** 2 > DEPENDENT
            return (a * v).div_(t) if certain_enough else None
        support = support ^ wrong
    return None


def _carefully(program: Program, radius: float) -> Tensor:
    """Return ``x`` of :func:`conflict_averse_weights`; lengths are in units of the shortest row."""
    U, b, a = program.U, program.b, cast("Tensor", program.a)
    face, v = program.minimise(t=0.0)
    nearest = face.squared_length(v)
    if nearest > NOISE * float(v.sum()) ** 2:
        low = math.sqrt(nearest) / radius
    else:  # zero lies in the convex hull
        face, v = Program(U, b, None).minimise(t=1.0)
        x = face.spread(v, a)
        if math.sqrt(face.squared_length(v) + NOISE * float(v.sum()) ** 2) <= radius:
            return x
        low = 1.0 / float(x.sum())
        face, v = program.minimise(low, face.support, floats(v * low))
    high = 2.0 / (float(a.min()) * radius)  # no convex combination is longer than the longest row
    t = min(max(low, face.root(radius)), high)  # low if there is no root
    for _ in range(200):
        face, v = program.minimise(t, face.support, floats(v))
        length = math.sqrt(max(face.squared_length(v), NOISE * float(v.sum()) ** 2))
        low, high = (t, high) if length > radius * t else (low, t)
        root = face.root(radius)
        if abs(root - t) <= 4 * EPS * t or high - low <= 4 * EPS * high:
            return face.spread(v, a) * (radius / length)
        t = root if low < root < high else math.sqrt(low * high)
    raise RuntimeError(unsolved(len(a)))
