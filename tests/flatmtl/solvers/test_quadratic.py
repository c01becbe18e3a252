"""The active-set method against certificates of optimality, closed forms and SciPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy import optimize
from tests.flatmtl.matrices import randn, scaled_integer_rows
from tests.flatmtl.solvers.families import every_family, every_shape, exactly

from flatmtl._solvers import quadratic
from flatmtl._solvers.quadratic import cone_weights, min_norm_point
from flatmtl._solvers.rows import row_norms, unit_rows


@every_family
@every_shape
def test_min_norm_point_is_optimal(family, shape):
    for seed in range(4):
        J = family(*shape, seed)
        rows, w, d = exactly(J, min_norm_point(J @ J.T))
        norms = np.sqrt((rows**2).sum(axis=1))
        gap = d @ d - (rows @ d).min()
        assert (w >= 0).all()
        assert abs(w.sum() - 1) < 1e-14
        # A point shorter than the rounding of the Gramian is zero to working precision.
        assert gap <= 1e-12 * norms.max() ** 2 or np.sqrt(d @ d) <= 1e-7 * (w @ norms)


@every_family
@pytest.mark.parametrize("shape", [(3, 8), (8, 20), (40, 64)], ids=str)
def test_min_norm_point_is_optimal_for_each_row_at_its_own_scale(family, shape):
    J = family(*shape, seed := 11)
    rows, w, d = exactly(J, min_norm_point(J @ J.T))
    norms = np.sqrt((rows**2).sum(axis=1))
    if norms.min() > 0 and np.sqrt(d @ d) > 1e-6 * (w @ norms):
        assert (d @ d - rows @ d <= 1e-12 * norms * (w @ norms)).all(), seed


@pytest.mark.parametrize("m", range(1, 65))
def test_min_norm_point_of_any_number_of_rows(m):
    J = randn(m, 2 * m, seed=m) + 0.2
    G = J @ J.T
    w = min_norm_point(G)
    assert float(w @ G @ w - (G @ w).min()) <= 1e-12 * float(G.diagonal().max())


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[1.0, 0.0], [0.0, 2.0]], [0.8, 0.2]),  # inside
        ([[1.0, 0.0], [3.0, 1.0]], [1.0, 0.0]),  # the shorter row is closest to zero
        ([[3.0, 1.0], [1.0, 0.0]], [0.0, 1.0]),
        ([[1.0, 2.0], [1.0, 2.0]], [0.5, 0.5]),
        ([[1.0, 2.0], [-3.0, -6.0]], [0.75, 0.25]),
        ([[1.0, 0.0], [0.0, 1e8]], [1.0, 1e-16]),
        ([[0.0, 0.0], [0.0, 1.0]], [1.0, 0.0]),
        ([[0.0, 0.0], [0.0, 0.0]], [0.5, 0.5]),
    ],
)
def test_min_norm_point_of_two_rows_in_closed_form(rows, expected):
    J = torch.tensor(rows, dtype=torch.float64)
    torch.testing.assert_close(
        min_norm_point(J @ J.T), torch.tensor(expected, dtype=torch.float64), atol=0.0, rtol=1e-14
    )


@pytest.mark.parametrize("seed", range(20))
def test_min_norm_point_agrees_with_scipy(seed):
    m = 2 + seed % 6
    J = randn(m, 9, seed=seed)
    G = (J @ J.T).numpy()
    found = optimize.minimize(
        lambda w: w @ G @ w,
        np.full(m, 1 / m),
        jac=lambda w: 2 * G @ w,
        bounds=[(0, 1)] * m,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(m)},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert found.success
    torch.testing.assert_close(J.T @ min_norm_point(J @ J.T), J.T @ torch.from_numpy(found.x), atol=1e-6, rtol=0.0)


@every_family
@pytest.mark.parametrize("m", [2, 3, 5, 10, 20, 40])
def test_min_norm_point_is_never_longer_than_what_an_independent_solver_finds(family, m):
    """Lawson and Hanson's least squares, for the rows with a constant column that asks for weights of sum one."""
    for n in (max(m // 2, 1), 2 * m):
        J = family(m, n, 5)
        longest = J.norm(dim=1).max()
        columns = torch.cat([J.T / longest, torch.ones(1, m, dtype=torch.float64)])
        found, _ = optimize.nnls(columns.numpy(), np.eye(n + 1)[-1], maxiter=100 * m)
        theirs = J.T @ torch.from_numpy(found / found.sum())
        ours = J.T @ min_norm_point(J @ J.T)
        assert float(ours @ ours - theirs @ theirs) <= 1e-10 * float(longest) ** 2


def test_min_norm_point_of_two_rows_is_also_found_by_the_active_set_method():
    for seed in range(20):
        J = randn(2, 4, seed=seed)
        U, a = unit_rows(J @ J.T, row_norms(J @ J.T))
        face, v = quadratic.Program(U, torch.zeros_like(a), a).minimise(t=0.0)
        torch.testing.assert_close(face.spread(v, a) / face.spread(v, a).sum(), min_norm_point(J @ J.T))


@settings(max_examples=150, deadline=None)
@given(J=scaled_integer_rows)
def test_min_norm_point_of_any_integers(J):
    G = J @ J.T
    exact, _, d = exactly(J, min_norm_point(G))
    longest = np.sqrt((exact**2).sum(axis=1)).max()
    assert d @ d - (exact @ d).min() <= 1e-12 * longest**2


@every_shape
def test_cone_weights_agree_with_scipy(shape):
    J = randn(*shape, seed=3)
    for g in (randn(shape[1], seed=4), J.mean(dim=0)):
        x = cone_weights(J @ J.T, J @ g)
        expected, _ = optimize.nnls(J.T.numpy(), -g.numpy(), maxiter=1000)
        assert bool((x >= 0.0).all())
        torch.testing.assert_close(g + J.T @ x, g + J.T @ torch.from_numpy(expected), atol=1e-10, rtol=0.0)


def test_cone_weights_of_zero_rows_are_zero():
    assert (
        cone_weights(torch.zeros(3, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)).tolist() == [0.0] * 3
    )
    J = torch.tensor([[0.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    g = torch.tensor([2.0, 1.0], dtype=torch.float64)
    assert cone_weights(J @ J.T, J @ g).tolist() == [0.0, 2.0]


class TestNeverSilent:
    def test_an_unfinished_active_set_raises(self, monkeypatch):
        unseen = iter(range(10**9))

        def always_another(self, t, support, values):
            face = self._face([0])
            return quadratic.Face([next(unseen)], face.index, face.rows, face.A, face.base, face.slope)

        monkeypatch.setattr(quadratic.Program, "_descend", always_another)
        monkeypatch.setattr(quadratic.Program, "_most_violated", lambda *_: 1)
        with pytest.raises(RuntimeError, match="found no optimum for 3 tasks"):
            min_norm_point(torch.eye(3, dtype=torch.float64))
