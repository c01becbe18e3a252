"""The best direction for the worst-served row: certificates of optimality, closed forms, a grid, and SciPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from scipy import optimize
from tests.flatmtl.matrices import randn, scaled_integer_rows
from tests.flatmtl.solvers.families import FAMILIES, chosen, every_shape, exactly, signs
from torch import Tensor

from flatmtl._solvers import conflict_averse, quadratic
from flatmtl._solvers.conflict_averse import conflict_averse_weights


@pytest.fixture(params=["plain rounds first", "careful search alone"], autouse=True)
def way(request, monkeypatch):
    """Each way to the solution by itself: nearly all problems are solved by the first one."""
    if request.param == "careful search alone":
        monkeypatch.setattr(conflict_averse, "_plainly", lambda *_, **__: None)


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
    monkeypatch.setattr(conflict_averse, "_plainly", lambda *_, **__: None)
    problems = [(randn(m, 9, seed=m), c) for m in (2, 3, 5, 8) for c in (0.2, 0.9)]
    expected = [J.T @ conflict_averse_weights(J @ J.T, c) for J, c in problems]
    monkeypatch.setattr(quadratic.Face, "root", lambda self, radius: math.nan)
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


def test_an_unfinished_search_raises(monkeypatch):
    monkeypatch.setattr(conflict_averse, "_plainly", lambda *_, **__: None)
    monkeypatch.setattr(quadratic.Face, "root", lambda self, radius: math.nan)
    monkeypatch.setattr(conflict_averse, "EPS", 0.0)
    J = randn(3, 5)
    with pytest.raises(RuntimeError, match="Please report it with the Gramian"):
        conflict_averse_weights(J @ J.T, 0.4)


@settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(J=scaled_integer_rows)
def test_conflict_averse_weights_of_any_integers(J):
    assert_conflict_averse(J, 0.5)
