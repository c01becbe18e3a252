"""Projections on the directions that conflict with no task: of each task gradient, and of their mean."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from scipy.optimize import nnls
from tests.flatmtl.matrices import integer_rows, randn
from torch import Tensor
from torchjd import aggregation as torchjd

from flatmtl._solvers.quadratic import cone_weights
from flatmtl.aggregators.dualproj import DualProj
from flatmtl.aggregators.upgrad import UPGrad, _project_all

MATRICES = json.loads((Path(__file__).parents[2] / "golden" / "aggregators.json").read_text())["matrices"]
both = pytest.mark.parametrize("aggregator", [UPGrad(), DualProj()], ids=repr)
many_tasks = pytest.mark.parametrize(
    ("m", "n"), [(1, 3), (2, 5), (3, 2), (3, 9), (5, 8), (10, 4), (12, 30), (40, 64), (64, 30), (64, 100)]
)


def conflicting(m: int, n: int, seed: int) -> Tensor:
    """Rows of very different lengths that conflict often, although the cone holds more than zero where ``n > m``."""
    rows = randn(m, n, seed=seed) - 0.5 * randn(1, n, seed=seed + 1000)
    return rows * 10 ** (4 * torch.rand(m, 1, generator=torch.Generator().manual_seed(seed)).double() - 2)


def projection(J: Tensor, g: Tensor) -> Tensor:
    """The point of ``J d >= 0`` closest to ``g``, from nonnegative least squares: SciPy's Lawson and Hanson."""
    lengths = J.norm(dim=1, keepdim=True)
    units = (J / torch.where(lengths > 0.0, lengths, 1.0)).numpy()
    size = float(g.norm()) or 1.0
    x, _ = nnls(units.T, -g.numpy() / size, maxiter=1000)
    return g + size * torch.from_numpy(units.T @ x)


def naive(aggregator: UPGrad | DualProj, J: Tensor) -> Tensor:
    if isinstance(aggregator, DualProj):
        return projection(J, J.mean(dim=0))
    return torch.stack([projection(J, g) for g in J]).mean(dim=0)


def worst_conflict(J: Tensor, d: Tensor) -> float:
    """The smallest product with a row, relative to the longest row squared: below 0 for a conflict."""
    return float((J.double() @ d.double()).min()) / (float(J.double().norm(dim=1).max()) ** 2 or 1.0)


@both
class TestBoth:
    @many_tasks
    def test_equals_nonnegative_least_squares(self, aggregator, m, n):
        for seed in range(3):
            J = conflicting(m, n, seed=seed)
            error = (aggregator(J) - naive(aggregator, J)).norm() / J.norm(dim=1).max()
            assert float(error) <= 1e-9

    @settings(max_examples=150, deadline=None)
    @given(J=integer_rows)
    def test_equals_nonnegative_least_squares_for_any_integers(self, aggregator, J):
        d = aggregator(J)
        torch.testing.assert_close(d, naive(aggregator, J), atol=1e-9, rtol=0.0)
        assert worst_conflict(J, d) >= -1e-12

    @many_tasks
    @pytest.mark.parametrize(
        ("dtype", "rounding"), [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
    )
    def test_never_conflicts(self, aggregator, m, n, dtype, rounding):
        for seed in range(3):
            J = conflicting(m, n, seed=seed).to(dtype)
            d = aggregator(J)
            assert d.dtype == dtype
            assert worst_conflict(J, d) >= -rounding

    @pytest.mark.parametrize("distance", [1e-2, 1e-5, 1e-7, 1e-9])
    def test_never_conflicts_for_nearly_opposite_rows(self, aggregator, distance):
        for seed in range(10):
            row = randn(1, 20, seed=seed)
            J = torch.cat([row, -2.0 * row + distance * randn(1, 20, seed=seed + 50), randn(1, 20, seed=seed + 90)])
            assert worst_conflict(J, aggregator(J)) >= -1e-8  # the Gramian has half the digits of a cosine near -1

    def test_never_conflicts_for_rows_that_depend_on_each_other_up_to_rounding(self, aggregator):
        """Their Gramian is singular or not by chance, and without a bound on the weights these would be noise."""
        for seed in range(100):
            rows = torch.randint(-3, 4, (6, 7), generator=torch.Generator().manual_seed(seed)).double()
            rows[3], rows[4] = -rows[0], rows[1] - 2.0 * rows[2]
            J = rows + 1e-8 * randn(6, 7, seed=seed)
            assert worst_conflict(J, aggregator(J)) >= -1e-7

    @pytest.mark.parametrize("m", [1, 2, 7, 64])
    def test_without_conflict_it_is_the_mean(self, aggregator, m):
        J = randn(m, 8, seed=m).abs()
        torch.testing.assert_close(aggregator(J), J.mean(dim=0))

    @pytest.mark.parametrize("m", [2, 3, 40])
    def test_equal_rows_give_the_row(self, aggregator, m):
        row = randn(6)
        torch.testing.assert_close(aggregator(row.expand(m, -1)), row)

    def test_opposite_rows_leave_what_is_orthogonal_to_them(self, aggregator):
        J = torch.tensor([[1.0, 0.0, 0.0], [-3.0, 0.0, 0.0], [0.5, 2.0, 0.0]], dtype=torch.float64)
        torch.testing.assert_close(aggregator(J), torch.tensor([0.0, 2.0 / 3.0, 0.0], dtype=torch.float64))
        assert float(aggregator(J[:2]).abs().max()) <= 1e-13

    def test_a_zero_row_restricts_nothing_and_counts_in_the_mean(self, aggregator):
        J = conflicting(4, 9, seed=3)
        with_zero = torch.cat([J[:2], torch.zeros(1, 9, dtype=torch.float64), J[2:]])
        torch.testing.assert_close(aggregator(with_zero), aggregator(J) * (4.0 / 5.0))

    @pytest.mark.parametrize("scale", [1e-150, 1e-30, 1e-12, 1e12, 1e150])
    def test_scale(self, aggregator, scale):
        J = conflicting(7, 12, seed=1)
        error = (aggregator(scale * J) / scale - aggregator(J)).norm() / J.norm()
        assert float(error) <= 1e-12

    def test_no_conflict_even_where_gradients_are_small(self, aggregator):
        for scale in (1e-10, 1e-4, 1.0):
            J = scale * conflicting(5, 9, seed=2)
            assert worst_conflict(J, aggregator(J)) >= -1e-12

    def test_the_peer_finds_about_the_same(self, aggregator):
        peer = torchjd.UPGrad() if isinstance(aggregator, UPGrad) else torchjd.DualProj()
        for seed in range(5):
            J = randn(4, 9, seed=seed)  # the peer adds 1e-4 to the diagonal of the Gramian
            assert float((aggregator(J) - peer(J)).norm() / J.norm()) <= 1e-3


@pytest.mark.parametrize("entry", MATRICES, ids=[entry["id"] for entry in MATRICES])
def test_golden(entry):
    d = UPGrad()(torch.tensor(entry["G"], dtype=torch.float64))
    g = torch.tensor(entry["ops"]["upgrad"]["exact"]["g"], dtype=torch.float64)
    size = float(g.abs().max()) or max(entry["row_norms"]) or 1.0
    torch.testing.assert_close(d / size, g / size, atol=1e-6, rtol=0.0)


def test_two_tasks_by_hand():
    """Projected off each other: (1/2, 1/2) and (0, 2), whose mean is the first; the mean (-1/2, 1) becomes (0, 1)."""
    J = torch.tensor([[1.0, 0.0], [-2.0, 2.0]], dtype=torch.float64)
    assert UPGrad()(J).tolist() == pytest.approx([0.25, 1.25], abs=1e-13)
    assert DualProj()(J).tolist() == pytest.approx([0.0, 1.0], abs=1e-13)


def test_a_short_gradient_keeps_a_gain_where_the_projected_mean_leaves_it_none():
    J = torch.tensor([[0.01, 0.0], [-2.0, 2.0]], dtype=torch.float64)
    assert float((J @ UPGrad()(J))[0]) > 1e-5
    assert float((J @ DualProj()(J))[0]) == pytest.approx(0.0, abs=1e-13)


class TestPivoting:
    @pytest.mark.parametrize(("m", "n"), [(2, 5), (10, 30), (40, 64), (64, 1000)])
    def test_solves_all_problems_of_independent_rows_as_the_active_set_method_does(self, m, n):
        J = conflicting(m, n, seed=m)
        lengths = J.norm(dim=1)
        added, unsolved = _project_all((J @ J.T) / lengths[:, None] / lengths)
        assert unsolved == []
        units = J / lengths[:, None]
        for i, v in enumerate(added):
            assert bool((v >= 0.0).all())
            expected = units.T @ cone_weights(units @ units.T, units @ units[i])
            torch.testing.assert_close(units.T @ v, expected, atol=1e-12, rtol=0.0)

    def test_what_it_leaves_open_is_solved_too(self):
        units = torch.nn.functional.normalize(randn(20, 10))
        _, unsolved = _project_all(units @ units.T)
        assert unsolved
        assert float((UPGrad()(units) - naive(UPGrad(), units)).norm()) <= 1e-9
