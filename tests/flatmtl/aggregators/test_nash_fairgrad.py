"""Nash-MTL and FairGrad: what they promise beyond the common laws, and what is said where there is no solution."""

import copy
import math
import warnings

import pytest
import torch
from tests.flatmtl.matrices import randn
from torch import Tensor

from flatmtl.aggregators import IMTLG, MGDA, AlignedMTL, CAGrad, ConFIG, Context, FairGrad, NashMTL
from flatmtl.aggregators import base as aggregators_base

ALPHAS = [0.5, 1.0, 2.0, 5.0]


def in_one_half_space(m: int, n: int, seed: int = 0) -> Tensor:
    """Rows that some direction serves, with conflict among them."""
    J = randn(m, n, seed=seed)
    return J * torch.where(J[:, :1] < 0.0, -1.0, 1.0)


def present(*rows: int) -> Context:
    return Context(rows, torch.ones(len(rows), dtype=torch.float64))


class TestNashMTL:
    @pytest.mark.parametrize("m", [1, 2, 3, 10, 40])
    def test_gains_are_the_inverse_weights_and_the_length_is_that_of_the_square_root_of_m(self, m):
        J = in_one_half_space(m, 2 * m, seed=m)
        w = NashMTL().weights(J @ J.T)
        d = NashMTL()(J)
        torch.testing.assert_close(w * (J @ d), torch.ones(m, dtype=torch.float64), rtol=0.0, atol=1e-10)
        assert float(d.norm()) == pytest.approx(math.sqrt(m), rel=1e-10)

    def test_scale_of_a_single_task_does_not_matter(self):
        J = in_one_half_space(5, 9)
        louder = J * torch.tensor([1.0, 1e6, 1.0, 1e-6, 1.0], dtype=torch.float64)[:, None]
        torch.testing.assert_close(NashMTL()(louder), NashMTL()(J), rtol=0.0, atol=1e-9)

    def test_is_fairgrad_with_alpha_one(self):
        J = in_one_half_space(6, 9)
        torch.testing.assert_close(FairGrad(alpha=1.0)(J), NashMTL()(J), rtol=1e-12, atol=1e-12)

    def test_product_of_gains_is_largest(self):
        J = in_one_half_space(4, 6)
        best = NashMTL()(J)
        for seed in range(200):
            d = best + 0.3 * randn(6, seed=seed)
            gains = J @ (d * best.norm() / d.norm())
            assert bool((gains <= 0.0).any()) or float(gains.log().sum()) <= float((J @ best).log().sum())

    @pytest.mark.parametrize("max_norm", [0.1, 1.0, 100.0])
    def test_max_norm_shortens_and_does_not_turn(self, max_norm):
        J = in_one_half_space(5, 8)
        d, limited = NashMTL()(J), NashMTL(max_norm=max_norm)(J)
        torch.testing.assert_close(limited, d * min(1.0, max_norm / 5.0**0.5), rtol=1e-10, atol=1e-12)

    def test_weights_are_found_anew_at_every_so_many_calls(self):
        nash = NashMTL(update_every=3)
        steps = [in_one_half_space(4, 6, seed) for seed in range(7)]
        for k, J in enumerate(steps):
            used = steps[3 * (k // 3)]
            expected = J.T @ NashMTL().weights(used @ used.T)
            torch.testing.assert_close(nash(J), expected, rtol=1e-12, atol=1e-12)

    def test_weights_in_between_do_not_depend_on_how_the_gramian_is_scaled(self):
        """The scale that keeps squares in range differs from step to step; the weights used again do not."""
        J, nash = in_one_half_space(3, 5), NashMTL(update_every=2)
        nash(J)
        tiny = torch.ldexp(J, torch.tensor(-300))
        w = NashMTL().weights(J @ J.T)
        torch.testing.assert_close(nash(tiny) * 2.0**300, J.T @ w, rtol=1e-12, atol=1e-12)

    def test_limit_holds_for_weights_used_again(self):
        nash, J = NashMTL(max_norm=0.5, update_every=2), in_one_half_space(3, 5)
        nash(J)
        assert float(nash(1000.0 * J).norm()) == pytest.approx(0.5)

    def test_weights_are_found_anew_when_other_tasks_are_present(self):
        nash, J = NashMTL(update_every=10), in_one_half_space(4, 6)
        nash(J, present(0, 1, 2, 3))
        part = 2.0 * J[[0, 2, 3]]
        torch.testing.assert_close(nash(part, present(0, 2, 3)), NashMTL()(part))
        again = 3.0 * part
        expected = again.T @ NashMTL().weights(part @ part.T)
        torch.testing.assert_close(nash(again, present(0, 2, 3)), expected)
        torch.testing.assert_close(nash(part, present(1, 2, 3)), NashMTL()(part))  # as many, but others

    def test_resuming_between_two_solutions_goes_on_exactly(self):
        nash, restored = NashMTL(update_every=3), NashMTL(update_every=3)
        nash(in_one_half_space(4, 6))
        restored.load_state_dict(nash.state_dict())
        for seed in range(1, 5):
            J = in_one_half_space(4, 6, seed)
            assert torch.equal(restored(J), nash(J))

    @pytest.mark.parametrize("options", [{"max_norm": 0.0}, {"max_norm": -1.0}, {"max_norm": math.nan}])
    def test_bad_limits(self, options):
        with pytest.raises(ValueError, match="max_norm must be a positive number, or None for no limit"):
            NashMTL(**options)

    @pytest.mark.parametrize("every", [0, -1, 1.5])
    def test_bad_intervals(self, every):
        with pytest.raises(ValueError, match="update_every must be a whole number of calls of at least 1"):
            NashMTL(update_every=every)


class TestFairGrad:
    @pytest.mark.parametrize("alpha", ALPHAS)
    @pytest.mark.parametrize("m", [1, 2, 3, 10, 40])
    def test_equation_holds(self, m, alpha):
        J = in_one_half_space(m, 2 * m, seed=m)
        w = FairGrad(alpha).weights(J @ J.T)
        gains = J @ FairGrad(alpha)(J)
        torch.testing.assert_close(gains * w ** (1.0 / alpha), torch.ones(m, dtype=torch.float64), rtol=0.0, atol=1e-9)

    @pytest.mark.parametrize("alpha", [0.5, 2.0, 5.0])
    def test_sum_of_utilities_is_largest_for_its_length(self, alpha):
        J = in_one_half_space(4, 6)
        best = FairGrad(alpha)(J)
        utility = ((J @ best) ** (1.0 - alpha) / (1.0 - alpha)).sum()
        for seed in range(200):
            d = best + 0.3 * float(best.norm()) * randn(6, seed=seed)
            gains = J @ (d * best.norm() / d.norm())
            assert bool((gains <= 0.0).any()) or (gains ** (1.0 - alpha) / (1.0 - alpha)).sum() <= utility

    def test_gains_get_closer_with_alpha(self):
        J = in_one_half_space(4, 6) * torch.tensor([1.0, 3.0, 0.5, 2.0], dtype=torch.float64)[:, None]
        spreads = [float((J @ FairGrad(alpha)(J)).log().std()) for alpha in (0.5, 1.0, 2.0, 5.0, 20.0)]
        assert spreads == sorted(spreads, reverse=True)

    @pytest.mark.parametrize("alpha", [0.0, -1.0, math.inf, math.nan])
    def test_bad_alpha(self, alpha):
        with pytest.raises(ValueError, match="alpha must be a positive number"):
            FairGrad(alpha)


ZERO_ROW = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0], [0.0, 3.0, 1.0]], dtype=torch.float64)
OPPOSITE = torch.tensor([[1.0, 2.0], [-2.0, -4.0], [1.0, 1.0]], dtype=torch.float64)


@pytest.mark.parametrize("make", [NashMTL, FairGrad, IMTLG, CAGrad, ConFIG, AlignedMTL], ids=lambda make: make.__name__)
class TestZeroRow:
    def test_is_said_once(self, make):
        aggregator = make()
        with pytest.warns(UserWarning, match=r"a task gradient is zero: it .*\(rows \[1\], from 0\).*return None"):
            aggregator(ZERO_ROW)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            aggregator(ZERO_ROW)
            copy.deepcopy(aggregator)(ZERO_ROW)

    def test_nothing_is_said_where_there_is_no_gradient_at_all(self, make):
        assert bool((make()(torch.zeros(3, 2)) == 0.0).all())


@pytest.mark.filterwarnings("ignore:.*a task gradient is zero")
@pytest.mark.parametrize("make", [NashMTL, FairGrad, IMTLG], ids=lambda make: make.__name__)
def test_a_zero_row_is_left_out(make):
    torch.testing.assert_close(make()(ZERO_ROW), make()(ZERO_ROW[[0, 2]]))
    assert float(make().weights(ZERO_ROW @ ZERO_ROW.T)[1]) == 0.0


@pytest.mark.filterwarnings("ignore:.*a task gradient is zero")
def test_cagrad_keeps_a_zero_row_in_the_mean_but_not_in_the_minimum():
    c, rows, mean = 0.4, ZERO_ROW[[0, 2]], ZERO_ROW.mean(dim=0)
    d = CAGrad(c)(ZERO_ROW)
    assert float((d - mean).norm()) == pytest.approx(c * float(mean.norm()))
    for seed in range(200):
        step = randn(3, seed=seed)
        other = mean + step * c * float(mean.norm()) / float(step.norm())
        assert float((rows @ other).min()) <= float((rows @ d).min()) + 1e-12


def test_mgda_with_a_zero_row_is_zero_which_is_its_solution_and_no_matter_for_a_warning():
    assert bool((MGDA()(ZERO_ROW) == 0.0).all())


@pytest.mark.parametrize("make", [NashMTL, FairGrad], ids=lambda make: make.__name__)
class TestNoSolution:
    def test_is_said_once_and_the_direction_is_zero(self, make):
        aggregator = make()
        with pytest.warns(UserWarning, match="no direction serves every task.*Mean and CAGrad move on"):
            assert bool((aggregator(OPPOSITE) == 0.0).all())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert bool((aggregator(OPPOSITE) == 0.0).all())

    def test_a_residual_that_rounding_leaves_is_said(self, make, monkeypatch):
        monkeypatch.setattr(aggregators_base, "SOLVED", 0.0)
        with pytest.warns(UserWarning, match="the weights are not exact.*relative residual is"):
            make()(in_one_half_space(7, 9))


@pytest.mark.parametrize("scale", [1e-240, 1e240, 1e300])
def test_weights_beyond_float64_are_said(scale):
    with pytest.raises(FloatingPointError, match="float64 does not hold. Multiply all losses by one constant"):
        FairGrad()(scale * in_one_half_space(3, 5))


def test_the_default_device_does_not_matter():
    J = in_one_half_space(3, 5)
    expected = NashMTL()(J), FairGrad()(J)
    with torch.device("meta"):
        assert torch.equal(NashMTL()(J), expected[0])
        assert torch.equal(FairGrad()(J), expected[1])
