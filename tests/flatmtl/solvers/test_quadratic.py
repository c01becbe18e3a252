"""The exact solvers against certificates of optimality, closed forms and SciPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from torch import Tensor

from flatmtl._solvers import quadratic
from flatmtl._solvers.quadratic import cone_weights, conflict_averse_weights, min_norm_point
from flatmtl._solvers.rows import row_norms, unit_rows


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def decades(m: int, span: float, seed: int) -> Tensor:
    """Factors over ``span`` decades, one for each row."""
    return 10.0 ** (span * torch.rand(m, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))


def chosen(basis: Tensor, m: int, seed: int) -> Tensor:
    """Return ``m`` rows of the basis, some of them more than once."""
    return basis[torch.randint(len(basis), (m,), generator=torch.Generator().manual_seed(seed))]


def signs(m: int, seed: int) -> Tensor:
    return torch.where(randn(m, 1, seed=seed) > 0.0, 1.0, -1.0)


FAMILIES = {
    "random": lambda m, n, s: randn(m, n, seed=s),
    "one orthant": lambda m, n, s: randn(m, n, seed=s).abs(),
    "eight decades": lambda m, n, s: randn(m, n, seed=s) * decades(m, 8, s),
    "eight decades, one orthant": lambda m, n, s: randn(m, n, seed=s).abs() * decades(m, 8, s),
    "nearly equal": lambda m, n, s: randn(1, n, seed=s) + 1e-7 * randn(m, n, seed=s + 1),
    "rounded to float32": lambda m, n, s: (randn(m, n, seed=s) + 1.0).float().double(),
    "equal": lambda m, n, s: chosen(randn(max(m // 2, 1), n, seed=s), m, s),
    "parallel": lambda m, n, s: chosen(randn(max(m // 2, 1), n, seed=s), m, s) * decades(m, 3, s),
    "opposite": lambda m, n, s: chosen(randn(max(m // 2, 1), n, seed=s), m, s) * signs(m, s),
    "nearly opposite": lambda m, n, s: (
        chosen(randn(max(m // 2, 1), n, seed=s), m, s) * signs(m, s) + 1e-7 * randn(m, n, seed=s)
    ),
    "rank one": lambda m, n, s: randn(m, 1, seed=s) * randn(1, n, seed=s + 1),
    "rank two": lambda m, n, s: randn(m, 2, seed=s) @ randn(2, n, seed=s + 1),
    "affinely dependent": lambda m, n, s: randn(m, 2, seed=s) @ randn(2, n, seed=s + 1) + randn(1, n, seed=s + 2),
    "integers": lambda m, n, s: randn(m, n, seed=s).round(),
    "tiny": lambda m, n, s: 1e-60 * randn(m, n, seed=s),
    "huge": lambda m, n, s: 1e60 * randn(m, n, seed=s),
}
SHAPES = [(1, 3), (2, 1), (2, 5), (3, 2), (3, 8), (5, 3), (8, 20), (16, 4), (40, 3), (40, 64), (64, 200)]

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def exactly(J: Tensor, w: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows, weights and direction in extended precision, so that only errors of the weights show."""
    rows, weights = J.numpy().astype(np.longdouble), w.numpy().astype(np.longdouble)
    return rows, weights, rows.T @ weights


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
        face, v = quadratic._Program(U, torch.zeros_like(a), a).minimise(t=0.0)
        torch.testing.assert_close(face.spread(v, a) / face.spread(v, a).sum(), min_norm_point(J @ J.T))


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 7).flatmap(
        lambda m: st.lists(st.lists(st.integers(-3, 3), min_size=3, max_size=3), min_size=m, max_size=m)
    ),
    powers=st.lists(st.integers(-4, 4), min_size=7, max_size=7),
)
def test_min_norm_point_and_conflict_averse_weights_of_any_integers(rows, powers):
    J = (
        torch.tensor(rows, dtype=torch.float64)
        * 10.0 ** torch.tensor(powers[: len(rows)], dtype=torch.float64)[:, None]
    )
    G = J @ J.T
    exact, _, d = exactly(J, min_norm_point(G))
    longest = np.sqrt((exact**2).sum(axis=1)).max()
    assert d @ d - (exact @ d).min() <= 1e-12 * longest**2
    assert_conflict_averse(J, 0.5)


def assert_conflict_averse(J: Tensor, c: float) -> None:
    """Check the direction against the dual bound: no direction in the ball can do better for the worst task."""
    rows, x, d = exactly(J, conflict_averse_weights(J @ J.T, c))
    norms = np.sqrt((rows**2).sum(axis=1))
    mean = rows.mean(axis=0)
    length = np.sqrt(mean @ mean)
    if length <= 1e-7 * norms.mean():
        assert np.sqrt(d @ d) <= 1e-7 * (1 + c) * norms.mean()
        return
    size = norms.max() * length * (1 + c)
    step = np.sqrt((d - mean) @ (d - mean))
    worst = (rows[norms > 0] @ d).min()
    assert step <= c * length + 1e-9 * (1 + c) * length
    assert worst >= (rows[norms > 0] @ mean).min() - 1e-12 * size
    w = x - np.longdouble(1) / len(J)
    assert (w >= -1e-15).all()
    if step >= (1 - 1e-9) * c * length:
        w /= w.sum()
        combination = rows.T @ w
        bound = combination @ mean + c * length * np.sqrt(combination @ combination)
        assert bound - worst <= 1e-9 * size
    else:  # the projection of the mean on the directions that conflict with no task
        assert worst >= -1e-9 * size
        assert abs(w @ (rows @ d)) <= 1e-9 * size


REGULAR = {name: family for name, family in FAMILIES.items() if name != "nearly opposite"}


@pytest.mark.parametrize("family", REGULAR.values(), ids=REGULAR)
@every_shape
def test_conflict_averse_weights_are_optimal(family, shape):
    for c in (0.01, 0.4, 0.99, 1.0, 3.0):
        assert_conflict_averse(family(*shape, 5), c)


@every_shape
@pytest.mark.parametrize("noise", [1e-6, 1e-7, 1e-8, 1e-10])
def test_conflict_averse_weights_of_nearly_opposite_rows_stay_near_the_ball(shape, noise):
    """The Gramian hardly tells such rows from opposite ones, so no more than this can be asked."""
    m, n = shape
    for seed in range(3):
        J = chosen(randn(max(m // 2, 1), n, seed=seed), m, seed) * signs(m, seed) + noise * randn(m, n, seed=seed)
        d, mean = J.T @ conflict_averse_weights(J @ J.T, 0.4), J.mean(dim=0)
        assert float((d - mean).norm()) <= 0.41 * float(mean.norm()) + 1e-7 * float(J.norm())


@pytest.mark.parametrize("seed", range(12))
def test_conflict_averse_weights_agree_with_scipy(seed):
    m, c = 2 + seed % 4, (0.2, 0.5, 0.9)[seed % 3]
    J = randn(m, 7, seed=seed)
    G, mean = (J @ J.T).numpy(), J.mean(dim=0)
    products, radius = (J @ mean).numpy(), c * float(mean.norm())
    found = optimize.minimize(  # the dual problem
        lambda w: w @ products + radius * np.sqrt(w @ G @ w),
        np.full(m, 1 / m),
        jac=lambda w: products + radius * G @ w / np.sqrt(w @ G @ w),
        bounds=[(0, 1)] * m,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(m)},
        method="SLSQP",
        options={"ftol": 1e-13, "maxiter": 500},
    )
    assert found.success
    combination = J.T @ torch.from_numpy(found.x)
    expected = mean + radius * combination / combination.norm()
    torch.testing.assert_close(J.T @ conflict_averse_weights(J @ J.T, c), expected, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("c", [0.1, 0.4, 0.9, 1.0, 2.5])
def test_conflict_averse_direction_of_two_unit_rows_in_closed_form(c):
    """By symmetry the mean is the best combination, as long as both rows have the same length."""
    J = torch.tensor([[0.6, 0.8], [0.6, -0.8]], dtype=torch.float64)
    d = J.T @ conflict_averse_weights(J @ J.T, c)
    torch.testing.assert_close(d, torch.tensor([0.6 * (1.0 + c), 0.0], dtype=torch.float64))


def test_conflict_averse_weights_are_found_by_bisection_alone(monkeypatch):
    problems = [(randn(m, 9, seed=m), c) for m in (2, 3, 5, 8) for c in (0.2, 0.9)]
    expected = [J.T @ conflict_averse_weights(J @ J.T, c) for J, c in problems]
    monkeypatch.setattr(quadratic._Face, "root", lambda self, radius: math.nan)
    for (J, c), d in zip(problems, expected, strict=True):
        torch.testing.assert_close(J.T @ conflict_averse_weights(J @ J.T, c), d)


def test_stationary_rows_whose_ball_meets_the_cone_give_the_closest_point_of_both():
    J = torch.tensor([[1.0, 0.0], [-2.0, 0.0], [0.0, 3.0]], dtype=torch.float64)  # mean (-1/3, 1)
    d = J.T @ conflict_averse_weights(J @ J.T, 0.5)
    torch.testing.assert_close(d, torch.tensor([0.0, 1.0], dtype=torch.float64))


def test_stationary_rows_whose_ball_misses_the_cone_give_the_best_of_the_ball():
    J = torch.tensor([[1.0, 0.0], [-2.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    d = J.T @ conflict_averse_weights(J @ J.T, 0.1)
    step = 0.1 * math.sqrt(10.0) / 3.0  # along the first row, the only one that loses
    torch.testing.assert_close(d, torch.tensor([-1.0 / 3.0 + step, 1.0], dtype=torch.float64))


def test_a_zero_row_is_left_out_of_the_minimum_but_not_of_the_mean():
    J = torch.tensor([[2.0, 0.0], [0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    x = conflict_averse_weights(J @ J.T, 0.4)
    d, mean = J.T @ x, J.mean(dim=0)
    assert float(x[1]) == pytest.approx(1.0 / 3.0)
    others, best = J[[0, 2]], float((J[[0, 2]] @ d).min())
    for angle in torch.linspace(0.0, 2.0 * math.pi, 1000, dtype=torch.float64):
        other = mean + 0.4 * mean.norm() * torch.stack([angle.cos(), angle.sin()])
        assert float((others @ other).min()) <= best + 1e-12


@pytest.mark.parametrize("c", [0.0, 1e-300, 1e-20])
def test_a_ball_of_no_size_gives_the_mean(c):
    J = randn(4, 6)
    torch.testing.assert_close(conflict_averse_weights(J @ J.T, c), torch.full((4,), 0.25, dtype=torch.float64))


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
            return quadratic._Face([next(unseen)], face.index, face.rows, face.A, face.base, face.slope)

        monkeypatch.setattr(quadratic._Program, "_descend", always_another)
        monkeypatch.setattr(quadratic._Program, "_most_violated", lambda *_: 1)
        with pytest.raises(RuntimeError, match="found no optimum for 3 tasks"):
            min_norm_point(torch.eye(3, dtype=torch.float64))

    def test_an_unfinished_search_raises(self, monkeypatch):
        monkeypatch.setattr(quadratic._Face, "root", lambda self, radius: math.nan)
        monkeypatch.setattr(quadratic, "EPS", 0.0)
        J = randn(3, 5)
        with pytest.raises(RuntimeError, match="Please report it with the Gramian"):
            conflict_averse_weights(J @ J.T, 0.4)


@pytest.mark.parametrize("c", [0.4, 0.9])
def test_conflict_averse_weights_of_rows_that_are_opposite_up_to_the_rounding_of_float32(c):
    """In the plane, against a grid of the ball: the smallest product is never short of the best there."""
    angles = torch.linspace(0.0, 2.0 * math.pi, 4001, dtype=torch.float64)
    circle = torch.stack([angles.cos(), angles.sin()], dim=1)
    grid = torch.cat([r * circle for r in (0.0, 0.25, 0.5, 0.75, 1.0)])
    for seed in range(150):
        rows = randn(3, 2, seed=seed)
        J = torch.cat([rows, -2.0 * rows[:1] + 1e-8 * randn(1, 2, seed=seed + 1000)]).float().double()
        mean = J.mean(dim=0)
        d = J.T @ conflict_averse_weights(J @ J.T, c)
        best = ((mean + c * mean.norm() * grid) @ J.T).min(dim=1).values.max()
        assert float((d - mean).norm()) <= 1.02 * c * float(mean.norm())
        assert float(best - (J @ d).min()) <= 1e-6 * float(J.norm() * mean.norm())
