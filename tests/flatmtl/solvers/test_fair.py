"""The weights of Nash-MTL and FairGrad against their equation, closed forms, SciPy and answers in 400 bits."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from tests.flatmtl.matrices import decades, randn
from torch import Tensor

from flatmtl._solvers import fair
from flatmtl._solvers.fair import fair_weights

EPS = np.finfo(float).eps
ALPHAS = (0.5, 1.0, 2.0, 5.0)
MATRICES = json.loads((Path(__file__).parents[2] / "golden" / "aggregators.json").read_text())["matrices"]


def half_space(m: int, n: int, seed: int, height: float = 0.3) -> Tensor:
    """Random rows, all on the same side of a plane."""
    J = randn(m, n, seed=seed)
    J[:, 0] = height * (0.1 + J[:, 0].abs())
    return J


def nearly_stationary(m: int, n: int, seed: int) -> Tensor:
    """Independent rows whose mean is a hundredth of what it was."""
    J = randn(m, n, seed=seed)
    return J - 0.99 * J.mean(dim=0)


SOLVABLE = {
    "random": lambda m, s: randn(m, 2 * m + 2, seed=s),
    "one orthant": lambda m, s: randn(m, m + 1, seed=s).abs(),
    "one orthant, m > n": lambda m, s: randn(m, 3, seed=s).abs(),
    "nearly stationary": lambda m, s: nearly_stationary(m, 2 * m, s),
    "half-space, m > n": lambda m, s: half_space(m, 4, s),
    "equal rows": lambda m, s: randn(m // 2 + 1, m + 3, seed=s).repeat(2, 1)[:m],
    "parallel rows": lambda m, s: randn(m // 2 + 1, m + 3, seed=s).repeat(2, 1)[:m] * decades(m, 3, s),
    "nearly equal": lambda m, s: randn(1, m, seed=s) + 1e-7 * randn(m, m, seed=s + 1),
    "eight decades": lambda m, s: randn(m, 4 * m + 4, seed=s) * decades(m, 8, s),
    "eight decades, one orthant": lambda m, s: randn(m, m + 1, seed=s).abs() * decades(m, 8, s),
    "twelve decades, one orthant": lambda m, s: randn(m, 3, seed=s).abs() * decades(m, 12, s),
}


def residual(J: Tensor, w: Tensor, alpha: float) -> tuple[float, float]:
    """Return the residual of the weights in extended precision, and what rounding of the Gramian alone does to it."""
    G, x = (J @ J.T).numpy().astype(np.longdouble), w.numpy().astype(np.longdouble)
    products = G @ x
    rounding = EPS * float((np.abs(G) @ x / np.abs(products)).max())
    return float(np.abs(products * x ** (1 / np.longdouble(alpha)) - 1).max()), rounding


def assert_solved(J: Tensor, alpha: float, worst: float = 1e-9) -> Tensor:
    found = fair_weights(J @ J.T, alpha)
    actual, rounding = residual(J, found.weights, alpha)
    assert bool((found.weights > 0.0).all())
    assert actual <= 1e-12 + 64 * rounding  # 1e-12 where double precision allows
    assert actual <= worst
    assert abs(actual - found.residual) <= 1e-12 + 64 * rounding  # the residual is honest
    return found.weights


def assert_no_solution(J: Tensor, alpha: float) -> None:
    found = fair_weights(J @ J.T, alpha)
    assert found.residual == math.inf
    assert found.weights.tolist() == [0.0] * len(J)


def counting_newton_steps(monkeypatch) -> list[None]:
    steps, solve = [], fair._solve_definite
    monkeypatch.setattr(fair, "_solve_definite", lambda *system: steps.append(None) or solve(*system))
    return steps


@pytest.fixture(params=["plain steps first", "careful steps alone", "no plain numbers"])
def way(request, monkeypatch):
    """Each way to the solution by itself: nearly all problems are solved by the first one."""
    if request.param == "careful steps alone":
        monkeypatch.setattr(fair, "_plainly", lambda *_: None)
    if request.param == "no plain numbers":
        monkeypatch.setattr(fair, "_FEW", 0)


@pytest.mark.usefixtures("way")
class TestEquation:
    @pytest.mark.parametrize("alpha", ALPHAS)
    @pytest.mark.parametrize("m", [2, 3, 5, 10, 40])
    @pytest.mark.parametrize("family", SOLVABLE.values(), ids=SOLVABLE)
    def test_the_weights_solve_it(self, family, m, alpha):
        for seed in range(2):
            assert_solved(family(m, seed), alpha, worst=1e-8 if alpha < 1.0 else 1e-9)

    @pytest.mark.parametrize("m", [*range(1, 65), 100])
    def test_for_any_number_of_rows(self, m):
        assert_solved(randn(m, 2 * m + 2, seed=m), 1.0)
        assert_solved(randn(m, 5, seed=m).abs(), 2.0)

    @pytest.mark.parametrize("alpha", [0.05, 0.2, 1.5, 20.0, 60.0])
    def test_for_any_alpha(self, alpha):
        for m in (2, 3, 8, 20):
            assert_solved(randn(m, 4 * m, seed=m), alpha)
            assert_solved(randn(m, 4 * m, seed=m).abs() * decades(m, 3, m), alpha)

    def test_of_conflicting_rows_over_many_decades_needs_the_path_from_alpha_one(self):
        for seed in range(3):
            J = randn(40, 64, seed=seed) * decades(40, 8, seed)
            assert_solved(J, 5.0)
            assert fair_weights(J @ J.T, 20.0).residual <= 1e-6  # inner products cancel to a billionth

    @settings(max_examples=100, deadline=None)
    @given(
        rows=st.lists(st.lists(st.integers(-3, 3), min_size=3, max_size=3).filter(any), min_size=1, max_size=6),
        power=st.integers(-70, 70),
        alpha=st.sampled_from(ALPHAS),
    )
    def test_of_any_integers_at_any_scale_has_a_solution_unless_zero_is_in_the_hull(self, rows, power, alpha):
        J = torch.tensor(rows, dtype=torch.float64)
        feasible = optimize.linprog(np.zeros(3), A_ub=-J.numpy(), b_ub=-np.ones(len(J)), bounds=(None, None))
        assert feasible.status in (0, 2)
        if feasible.status == 0:  # some direction has a positive inner product with every row
            assert_solved(J * 10.0**power, alpha)
        else:
            assert_no_solution(J * 10.0**power, alpha)

    @settings(max_examples=60, deadline=None)
    @given(
        rows=st.lists(st.lists(st.floats(-1.0, 1.0), min_size=2, max_size=2), min_size=1, max_size=4),
        powers=st.lists(st.integers(-150, 150), min_size=4, max_size=4),
        alpha=st.sampled_from([0.01, 0.2, 1.0, 5.0, 500.0]),
    )
    def test_nothing_finite_gives_nan(self, rows, powers, alpha):
        scales = 10.0 ** torch.tensor(powers[: len(rows)], dtype=torch.float64)[:, None]
        J = torch.tensor(rows, dtype=torch.float64) * scales
        found = fair_weights(J @ J.T, alpha)
        assert bool(found.weights.isfinite().all())
        assert bool((found.weights >= 0.0).all())
        assert found.residual >= 0.0


@pytest.mark.usefixtures("way")
class TestOracles:
    @pytest.mark.parametrize("alpha", ALPHAS)
    @pytest.mark.parametrize("seed", range(6))
    def test_scipy_finds_the_same_root(self, seed, alpha):
        m = 2 + seed
        J = randn(m, 3 * m, seed=seed) * decades(m, 1, seed)
        G = (J @ J.T).numpy()
        found = optimize.root(
            lambda u: G @ np.exp(u) * np.exp(u / alpha) - 1.0,
            -alpha / (1.0 + alpha) * np.log(np.diag(G)),
            method="lm",
            tol=1e-13,
        )
        assert np.abs(found.fun).max() < 1e-10
        torch.testing.assert_close(
            fair_weights(J @ J.T, alpha).weights, torch.from_numpy(np.exp(found.x)), rtol=1e-8, atol=0.0
        )

    @pytest.mark.parametrize("alpha", [0.2, *ALPHAS, 20.0])
    def test_orthogonal_rows_do_not_interact(self, alpha):
        squares = torch.tensor([1e-9, 4e-3, 1.0, 1.0, 5e7, 1e11], dtype=torch.float64)
        for k in (1, 2, 6):
            weights, found = squares[:k] ** (-alpha / (1.0 + alpha)), fair_weights(squares[:k].diag(), alpha)
            torch.testing.assert_close(found.weights, weights, rtol=1e-12, atol=0.0)
            assert found.residual <= 1e-12

    @pytest.mark.parametrize("cosine", [-0.999, -0.5, 0.0, 0.3, 1.0])
    def test_nash_weights_of_two_rows_are_equal_for_unit_rows(self, cosine):
        lengths = torch.tensor([3.0, 5e-4], dtype=torch.float64)
        U = torch.tensor([[1.0, cosine], [cosine, 1.0]], dtype=torch.float64)
        w = fair_weights(U * lengths.outer(lengths), 1.0).weights
        torch.testing.assert_close(
            w * lengths, torch.full((2,), (1.0 + cosine) ** -0.5, dtype=torch.float64), rtol=1e-10, atol=0.0
        )

    @pytest.mark.parametrize("alpha", ALPHAS)
    def test_equal_rows_share_equally(self, alpha):
        w = fair_weights(torch.full((5, 5), 9.0, dtype=torch.float64), alpha).weights
        torch.testing.assert_close(
            w, torch.full((5,), 45.0 ** (-alpha / (1.0 + alpha)), dtype=torch.float64), rtol=1e-13, atol=0.0
        )

    @pytest.mark.parametrize("alpha", [1.0, 2.0, 5.0])
    @pytest.mark.parametrize("entry", MATRICES, ids=lambda entry: entry["id"])
    def test_golden(self, entry, alpha):
        exact = entry["ops"]["fairgrad"][f"{alpha:.0f}"]["exact"]
        J = torch.tensor(entry["G"], dtype=torch.float64)
        found = fair_weights(J @ J.T, alpha)
        if exact is None:
            assert entry["category"] == "zero_row" or found.residual == math.inf
            return
        if entry["id"].startswith(("20", "21")):  # the Gramian in double precision does not tell the answer
            assert found.residual > 1e-12
            return
        if entry["category"] == "nearly_opposite":
            tolerance = max(1e-7, 100 * exact["float64_gram_error"])
        else:
            tolerance = 1e-6 if entry["category"] == "scales" and alpha != 1.0 else 1e-9
        g = torch.tensor(exact["g"], dtype=torch.float64)
        torch.testing.assert_close(J.T @ found.weights, g, rtol=0.0, atol=tolerance * float(g.abs().max()))
        w = exact["w"] if alpha != 1.0 else entry["ops"]["nash"]["exact"]["alpha"]
        torch.testing.assert_close(found.weights, torch.tensor(w, dtype=torch.float64), rtol=tolerance, atol=0.0)


class TestLaws:
    @pytest.mark.parametrize("alpha", ALPHAS)
    def test_scale(self, alpha):
        G = (J := randn(7, 20, seed=1)) @ J.T
        w = fair_weights(G, alpha).weights
        for scale in (1e-12, 1e-5, 3.0, 1e12):
            expected = scale ** (-2.0 * alpha / (1.0 + alpha)) * w
            torch.testing.assert_close(fair_weights(scale**2 * G, alpha).weights, expected, rtol=1e-11, atol=0.0)

    @pytest.mark.parametrize("alpha", ALPHAS)
    def test_task_order_does_not_matter(self, alpha):
        J = randn(9, 30, seed=2) * decades(9, 4, 2)
        order = torch.randperm(9, generator=torch.Generator().manual_seed(3))
        expected = fair_weights(J @ J.T, alpha).weights[order]
        torch.testing.assert_close(fair_weights(J[order] @ J[order].T, alpha).weights, expected, rtol=1e-9, atol=0.0)

    def test_the_nash_weight_of_a_row_is_inverse_to_its_length(self):
        J, s = randn(6, 15, seed=4), decades(6, 12, 4)
        expected = fair_weights(J @ J.T, 1.0).weights / s.squeeze(1)
        torch.testing.assert_close(fair_weights((s * J) @ (s * J).T, 1.0).weights, expected, rtol=1e-10, atol=0.0)

    @pytest.mark.parametrize("m", [1, 2, 6, 25])
    def test_the_nash_direction_has_length_sqrt_m(self, m):
        J = randn(m, 2 * m, seed=m) * decades(m, 8, m)
        assert float((J.T @ fair_weights(J @ J.T, 1.0).weights).norm()) == pytest.approx(math.sqrt(m), rel=1e-11)

    def test_the_same_gramian_gives_the_same_bits(self):
        G = (J := randn(12, 24, seed=5)) @ J.T
        assert fair_weights(G, 2.0).weights.tolist() == fair_weights(G.clone(), 2.0).weights.tolist()

    def test_zero_rows_get_no_weight_and_change_nothing(self):
        J = randn(4, 9, seed=6)
        expected, residual = fair_weights(J @ J.T, 2.0)
        J = torch.cat([torch.zeros(1, 9, dtype=torch.float64), J, torch.zeros(1, 9, dtype=torch.float64)])
        found = fair_weights(J @ J.T, 2.0)
        torch.testing.assert_close(found.weights[1:-1], expected, rtol=1e-12, atol=0.0)
        assert found.weights[[0, -1]].tolist() == [0.0, 0.0]
        assert found.residual == pytest.approx(residual, abs=1e-13)

    def test_all_rows_zero_is_solved_by_zeros(self):
        assert fair_weights(torch.zeros(3, 3, dtype=torch.float64), 1.0).residual == 0.0
        assert fair_weights(torch.zeros(3, 3, dtype=torch.float64), 1.0).weights.tolist() == [0.0] * 3


def around_the_circle(m: int) -> Tensor:
    angles = torch.arange(m, dtype=torch.float64) * (2.0 * math.pi / m)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


STATIONARY = {
    "opposite": torch.tensor([[1.0, 2.0], [-1.0, -2.0]], dtype=torch.float64),
    "opposite, of different lengths": torch.tensor([[0.1, 0.7], [-1e5, -7e5]], dtype=torch.float64),
    "opposite, and a third": torch.tensor([[1.0, 2.0], [-3.0, -6.0], [2.0, -1.0]], dtype=torch.float64),
    "opposite, and ten more": torch.cat([half_space(10, 20, 0), torch.eye(1, 20).double(), -torch.eye(1, 20).double()]),
    "at 120 degrees": around_the_circle(3),
    "around the circle": around_the_circle(17),
    "random, m >> n": randn(40, 3),
    "random, m >> n, eight decades": randn(60, 4) * decades(60, 8, 0),
    "one is minus the sum of the rest": torch.cat([J := randn(6, 9), -J.sum(dim=0, keepdim=True)]),
}


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.3, 20.0])
@pytest.mark.parametrize("spread", [1.0, 2.0, 3.0])
def test_the_minimum_is_found_where_rounding_hides_the_residual(spread, alpha):
    """Newton's decrement: how far the convex objective is above its minimum, in units of the square of ``d``."""
    for seed in range(20):
        J = randn(3, 7, seed=seed) * 10.0 ** torch.tensor([-spread, 0.0, spread], dtype=torch.float64)[:, None]
        G = J @ J.T
        w = fair_weights(G, alpha).weights
        q = w ** (-1.0 / alpha)
        r = G @ w - q
        lengths = J.norm(dim=1)
        H = (G + torch.diag(q / (alpha * w))) / lengths[:, None] / lengths
        decrement = (r / lengths) @ torch.linalg.solve(H, r / lengths)
        assert float(decrement) <= 1e-20 * float(w @ G @ w)


class TestNoSolution:
    @pytest.mark.parametrize("alpha", [0.2, 1.0, 2.0, 20.0])
    @pytest.mark.parametrize("J", STATIONARY.values(), ids=STATIONARY)
    def test_zero_in_the_hull_gives_zeros_within_a_few_steps(self, J, alpha, monkeypatch):
        steps = counting_newton_steps(monkeypatch)
        assert_no_solution(J, alpha)
        assert len(steps) <= 18

    def test_a_zero_row_does_not_hide_it(self):
        J = torch.cat([STATIONARY["at 120 degrees"], torch.zeros(1, 2, dtype=torch.float64)])
        assert_no_solution(J, 1.0)

    @pytest.mark.parametrize("alpha", ALPHAS)
    @pytest.mark.parametrize("noise", [1e-2, 1e-4, 1e-6, 1e-7, 1e-8, 1e-10])
    def test_nearly_opposite_rows_have_an_honest_residual(self, noise, alpha):
        for m in (2, 5):
            J = torch.cat([half_space(m - 1, 8, m), -half_space(m - 1, 8, m)[:1]])
            J = J + noise * randn(m, 8, seed=m + 1)
            found = fair_weights(J @ J.T, alpha)
            if found.residual == math.inf:  # no longer than the rounding of the Gramian
                assert noise <= 1e-7
                continue
            actual, rounding = residual(J, found.weights, alpha)
            assert abs(actual - found.residual) <= (1e-12 + 64 * rounding) * (1.0 + actual)
            assert found.residual <= 1e-12 + 64 * rounding or rounding > 1e-3

    def test_weights_beyond_double_precision_are_no_solution(self):
        assert_no_solution(torch.full((1, 1), 1e-160, dtype=torch.float64), 1e3)


class TestEffort:
    @pytest.mark.parametrize("alpha", [1.0, 2.0, 5.0])
    def test_a_dozen_newton_steps_suffice_for_random_rows(self, alpha, monkeypatch):
        for m in (2, 3, 10, 40):
            steps = counting_newton_steps(monkeypatch)
            fair_weights((J := randn(m, 2 * m + 2, seed=m)) @ J.T, alpha)
            assert len(steps) <= 12

    def test_the_work_is_bounded_when_newton_never_gets_there(self, monkeypatch):
        steps = counting_newton_steps(monkeypatch)
        monkeypatch.setattr(fair, "_plainly", lambda *_: None)
        monkeypatch.setattr(fair, "_plainly_in_tensors", lambda *_, **__: None)
        monkeypatch.setattr(fair._Equation, "_next", lambda self, point: None)
        found = fair_weights((J := randn(5, 12)) @ J.T, 2.0)
        actual, _ = residual(J, found.weights, 2.0)
        assert len(steps) <= 8
        assert found.residual == pytest.approx(actual)
        assert found.residual > 1e-3

    def test_the_minimum_norm_point_starts_newton_where_convex_steps_do_not(self, monkeypatch):
        J = half_space(12, 4, 3, height=1e-3)
        expected = fair_weights(J @ J.T, 1.0).weights
        monkeypatch.setattr(fair, "_is_positive", lambda x, p: False)
        steps = counting_newton_steps(monkeypatch)
        torch.testing.assert_close(fair_weights(J @ J.T, 1.0).weights, expected, rtol=1e-6, atol=0.0)
        assert len(steps) > 8
