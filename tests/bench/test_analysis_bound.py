"""The bound against formulas evaluated in decimal arithmetic, and a model evaluated by hand."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2
from tests.bench.state import state
from torch import nn

from flatmtl import TaskParameters
from flatmtl_bench.analysis.bound import Bound, Rise, bounds, largest_sigma, penalty, rise_under_noise
from flatmtl_bench.models import MultiHead

FORMS = ("printed", "corrected")
COUNTS = st.integers(1, 10**7)
SIZES = st.integers(1, 10**8)
POSITIVE = st.floats(1e-3, 1e3)
DELTAS = st.floats(1e-6, 0.999)


def in_decimals(form, N, T, norm, sigma, L, delta, m):
    """Return f^i, evaluated as it is written, with 60 digits."""
    with localcontext() as context:
        context.prec = 60
        N, T, norm, sigma, L, delta, m = (Decimal(x) for x in (N, T, norm, sigma, L, delta, m))
        root = N.sqrt()
        weights = T / 2 * (1 + norm**2 / (T * sigma**2)).ln()
        confidence = (m / delta).ln() if form == "corrected" else (1 / delta).ln()
        inner = Decimal("0.5") + weights + confidence + 6 * (N + T).ln() + L**2 / 8
        residual = {
            "corrected": L * (1 - (1 - 1 / root) ** 2),
            "printed": (1 - 1 / root) * L / root + 1 / root,
        }
        return float(inner / root + residual[form])


def total(form, *numbers):
    return math.fsum(penalty(form, *numbers).values())


@pytest.mark.parametrize("form", FORMS)
class TestPenalty:
    @given(
        N=COUNTS,
        T=SIZES,
        norm=st.floats(0.0, 1e4),
        sigma=st.floats(1e-9, 1e2),
        L=POSITIVE,
        delta=DELTAS,
        m=st.integers(1, 40),
    )
    def test_it_is_the_formula(self, form, N, T, norm, sigma, L, delta, m):
        assert total(form, N, T, norm, sigma, L, delta, m) == pytest.approx(
            in_decimals(form, N, T, norm, sigma, L, delta, m), rel=1e-12
        )

    @pytest.mark.parametrize("sigma", [1e-300, 1e-200, 1e200])
    def test_numbers_whose_squares_leave_float64_do_no_harm(self, form, sigma):
        numbers = (1000, 10**6, 30.0, sigma, 5.0, 0.05, 2)
        assert total(form, *numbers) == pytest.approx(in_decimals(form, *numbers), rel=1e-12)

    @given(N=COUNTS, T=SIZES, norm=st.floats(0.1, 1e3), sigma=st.floats(1e-6, 1.0), L=POSITIVE, delta=DELTAS)
    def test_it_rises_with_the_norm_and_falls_with_delta_and_sigma(self, form, N, T, norm, sigma, L, delta):
        here = total(form, N, T, norm, sigma, L, delta, 2)
        assert total(form, N, T, 1.5 * norm, sigma, L, delta, 2) > here
        assert total(form, N, T, norm, 1.5 * sigma, L, delta, 2) < here
        assert total(form, N, T, norm, sigma, L, delta / 2, 2) > here
        assert total(form, N, T, norm, sigma, 1.5 * L, delta, 2) > here

    @given(N=st.integers(4, 10**7), T=SIZES, norm=st.floats(0.1, 1e3), sigma=st.floats(1e-6, 1.0), L=POSITIVE)
    def test_more_samples_never_make_it_larger(self, form, N, T, norm, sigma, L):
        # 6 log(N + T) / sqrt(N) falls once log(N + T) >= 2, as it does from N + T = 8
        assert total(form, 2 * N + 8, T, norm, sigma, L, 0.05, 2) <= total(form, N + 8, T, norm, sigma, L, 0.05, 2)


class TestForms:
    @given(N=COUNTS, T=SIZES, delta=DELTAS, m=st.integers(1, 40))
    def test_m_tasks_need_the_confidence_of_one_at_delta_over_m(self, N, T, delta, m):
        many = penalty("corrected", N, T, 1.0, 0.1, 1.0, delta, m)
        assert many == pytest.approx(penalty("corrected", N, T, 1.0, 0.1, 1.0, delta / m, 1), rel=1e-12)

    @given(N=COUNTS, L=st.floats(0.01, 100.0))
    def test_the_printed_residual_is_too_small_for_losses_above_one(self, N, L):
        printed, corrected = (penalty(form, N, 10, 1.0, 0.1, L, 0.05, 1)["residual"] for form in FORMS)
        assert corrected - printed == pytest.approx((L - 1) / math.sqrt(N), rel=1e-9, abs=1e-12)
        assert corrected <= L

    def test_an_unknown_form_is_an_error(self):
        with pytest.raises(ValueError, match="unknown form 'print'. Did you mean 'printed'?"):
            penalty("print", 10, 10, 1.0, 0.1, 1.0, 0.05, 1)


class TestSigma:
    @given(
        rho=POSITIVE,
        rho_heads=POSITIVE,
        shared=st.integers(1, 10**6),
        heads=st.lists(st.integers(0, 10**4), min_size=1, max_size=4),
        N=st.integers(2, 10**6),
    )
    def test_noise_stays_in_every_ball_as_often_as_the_proof_needs(self, rho, rho_heads, shared, heads, N):
        sigma = largest_sigma(rho, rho_heads, shared, heads, N)
        for radius, size in ((rho, shared), *((rho_heads, size) for size in heads if size)):
            assert chi2.sf((radius / sigma) ** 2, size) <= 1 / math.sqrt(N)

    def test_the_tightest_ball_decides(self):
        def by_hand(rho, size, N):
            t = math.log(math.sqrt(N))
            return rho / math.sqrt(2 * t + size + 2 * math.sqrt(size * t))

        assert largest_sigma(0.5, 0.5, 100, [7, 9], 400) == pytest.approx(by_hand(0.5, 100, 400))
        assert largest_sigma(0.5, 0.1, 100, [7, 9], 400) == pytest.approx(by_hand(0.1, 9, 400))


class Scaled(nn.Module):
    """A head of one number."""

    def __init__(self, scale):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale, dtype=torch.float64))

    def forward(self, z):
        return self.scale * z


def square(output, target):
    return (output[:, 0] - target).square().mean()


LIMIT, RHO, RHO_HEADS = 2.0, 0.3, 0.1


def linear(samples=12, parts=3):
    """Return a linear map with two scaled outputs, and everything else that `bounds` takes."""
    generator = np.random.default_rng(1)
    X = torch.tensor(generator.normal(size=(samples, 4)))
    y = {task: torch.tensor(generator.normal(size=samples)) for task in ("left", "right")}
    model = MultiHead(nn.Linear(4, 1, bias=False).double(), {"left": Scaled(1.0), "right": Scaled(-2.0)})
    with torch.no_grad():
        model.encoder.weight.copy_(torch.tensor([[0.5, -0.2, 0.3, 0.1]], dtype=torch.float64))
    batches = [(X[k::parts], {task: target[k::parts] for task, target in y.items()}) for k in range(parts)]
    heads = {task: [model.heads[task].scale] for task in y}
    parameters = TaskParameters(model.encoder.parameters(), heads, model)
    return model, batches, dict.fromkeys(y, square), parameters


def by_hand(batches, task, w, scale):
    """Return clipped loss and, after one step up the slope in either ball, the largest one found; with NumPy alone."""
    X = np.concatenate([inputs.numpy() for inputs, _ in batches])
    y = np.concatenate([targets[task].numpy() for _, targets in batches])

    def loss(w, scale):
        return np.minimum((scale * X @ w - y) ** 2, LIMIT)

    error = np.where((scale * X @ w - y) ** 2 < LIMIT, scale * X @ w - y, 0.0)
    g = 2 * scale * X.T @ error / len(y)
    h = 2 * float(error @ (X @ w)) / len(y)
    return loss(w, scale).mean(), loss(w + RHO * g / np.linalg.norm(g), scale + RHO_HEADS * np.sign(h)).mean()


class TestBounds:
    def test_it_is_the_evaluation_by_hand(self):
        model, batches, losses, parameters = linear()
        found = bounds(model, batches, losses, parameters, RHO, rho_heads=RHO_HEADS, limit=LIMIT, delta=0.1)
        w, scales = np.array([0.5, -0.2, 0.3, 0.1]), {"left": 1.0, "right": -2.0}
        t = math.log(math.sqrt(12))
        sigma = min(RHO / math.sqrt(4 + 2 * math.sqrt(4 * t) + 2 * t), RHO_HEADS / math.sqrt(1 + 2 * t**0.5 + 2 * t))
        for task, scale in scales.items():
            clean, worst = by_hand(batches, task, w, scale)
            norms = {"printed": math.sqrt(w @ w + 1 + 4), "corrected": math.sqrt(w @ w + scale**2)}
            for form, bound in found[task].items():
                assert bound.terms["loss"] == pytest.approx(clean, rel=1e-12)
                assert bound.terms["sharpness"] == pytest.approx(worst - clean, rel=1e-9)
                assert (bound.samples, bound.size, bound.limit) == (12, 5, LIMIT)
                assert (bound.sigma, bound.norm) == (pytest.approx(sigma), pytest.approx(norms[form]))
                expected = worst + in_decimals(form, 12, 5, norms[form], sigma, LIMIT, 0.1, 2)
                assert bound.total == pytest.approx(expected, rel=1e-10)

    def test_some_sample_is_clipped_in_that_test(self):
        model, batches, losses, parameters = linear()
        clipped, free = (bounds(model, batches, losses, parameters, RHO, limit=limit) for limit in (LIMIT, 1e3))
        assert clipped["right"]["corrected"].terms["loss"] < free["right"]["corrected"].terms["loss"] - 0.01

    @pytest.mark.parametrize(("constant", "vacuous"), [(0.4, False), (0.5, True), (0.6, True)])
    def test_a_bound_is_vacuous_where_it_reaches_the_largest_loss_that_there_is(self, constant, vacuous):
        found = Bound({"loss": 0.5, "constant": constant}, samples=9, size=4, norm=1.0, sigma=0.1, limit=1.0)
        assert (found.total, found.vacuous) == (0.5 + constant, vacuous)

    def test_samples_without_a_label_count_for_no_task(self):
        model, batches, _, parameters = linear()

        def known(output, target):
            return None if target.isnan().all() else square(output, target)

        losses = dict.fromkeys(parameters.tasks, known)
        for _, targets in batches:
            targets["left"][2] = torch.nan
        found = bounds(model, batches, losses, parameters, RHO, limit=LIMIT)
        w = np.array([0.5, -0.2, 0.3, 0.1])
        rest = [(x[[0, 1, 3]], {task: t[[0, 1, 3]] for task, t in targets.items()}) for x, targets in batches]
        assert found["left"]["corrected"].samples == 9
        assert found["left"]["corrected"].terms["loss"] == pytest.approx(by_hand(rest, "left", w, 1.0)[0])
        assert found["right"]["corrected"].samples == 12
        assert found["left"]["corrected"].sigma == largest_sigma(RHO, RHO, 4, [1, 1], 12)

    def test_how_samples_with_labels_fall_into_batches_does_not_matter(self):
        def known(output, target):
            return None if target.isnan().all() else square(output, target)

        model, ((X, y),), _, parameters = linear(samples=11, parts=1)
        y["left"][1:5] = torch.nan
        parts = [slice(0, 5), slice(5, 6), slice(6, 11)]
        batches = [(X[part], {task: target[part] for task, target in y.items()}) for part in parts]
        losses = dict.fromkeys(y, known)
        whole, torn = (bounds(model, some, losses, parameters, RHO, limit=LIMIT) for some in ([(X, y)], batches))
        for task in y:
            assert torn[task]["corrected"].terms == pytest.approx(whole[task]["corrected"].terms, rel=1e-9)

    def test_more_steps_of_ascent_find_no_smaller_loss(self):
        one, more = (bounds(*linear(), RHO, limit=LIMIT, steps=steps) for steps in (1, 8))
        for task, forms in one.items():
            assert more[task]["corrected"].total >= forms["corrected"].total

    def test_a_step_beyond_the_valley_does_not_make_the_largest_loss_smaller_than_the_loss(self):
        model = MultiHead(nn.Linear(1, 1, bias=False), {"only": nn.Identity()})
        nn.init.constant_(model.encoder.weight, 1.0)

        def hill(output, target):
            return (1.0 - (output - 1.5) ** 2).mean()

        batches = [(torch.ones(4, 1), {"only": torch.zeros(4)})]
        parameters = TaskParameters(model.encoder.parameters(), {"only": []}, model)
        found = bounds(model, batches, {"only": hill}, parameters, 1.4, limit=LIMIT)
        assert found["only"]["corrected"].terms["sharpness"] == 0.0

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"rho": 0.0}, "rho must be a positive number, got 0.0"),
            ({"rho": -0.1}, "rho must be a positive number, got -0.1"),
            ({"rho": math.nan}, "rho must be a positive number, got nan"),
            ({"rho_heads": 0.0}, "rho_heads must be a positive number"),
            ({"limit": 0.0}, "limit must be a positive number"),
            ({"limit": math.inf}, "limit must be a positive number"),
            ({"delta": 0.0}, "delta must lie between 0 and 1, got 0.0"),
            ({"delta": 1.0}, "delta must lie between 0 and 1, got 1.0"),
            ({"steps": 0}, "at least one step of ascent"),
        ],
    )
    def test_impossible_numbers_are_errors(self, options, said):
        with pytest.raises(ValueError, match=said):
            bounds(*linear(), **{"rho": RHO, "limit": LIMIT, **options})

    def test_a_loss_that_is_no_number_is_an_error(self):
        model, batches, losses, parameters = linear()
        batches[0][1]["right"][0] = torch.nan
        with pytest.raises(FloatingPointError, match="task 'right'"):
            bounds(model, batches, losses, parameters, RHO, limit=LIMIT)

    def test_a_task_without_labels_is_an_error(self):
        model, batches, losses, parameters = linear()
        losses["right"] = lambda output, target: None
        with pytest.raises(ValueError, match="no sample has a label for task 'right'"):
            bounds(model, batches, losses, parameters, RHO, limit=LIMIT)


def one_weight(loss):
    """Return a model of one weight, whose only task has a loss of that weight, and everything else."""
    model = MultiHead(nn.Linear(1, 1, bias=False).double(), {"only": nn.Identity()})
    nn.init.constant_(model.encoder.weight, 2.0)
    batches = [(torch.ones(2, 1, dtype=torch.float64), {"only": torch.zeros(2)})]
    parameters = TaskParameters(model.encoder.parameters(), {"only": []}, model)
    return model, batches, {"only": lambda output, target: loss(output).mean()}, parameters


class TestNoise:
    def test_it_raises_a_quadratic_by_half_the_variance_times_the_trace(self):
        model, batches, losses, parameters = linear(samples=40, parts=2)
        parameters = TaskParameters(parameters.shared, {"left": [], "right": []}, model)
        found = rise_under_noise(model, batches, losses, parameters, 0.1, limit=1e3, draws=100)
        X = torch.cat([x for x, _ in batches])
        for task, scale in {"left": 1.0, "right": -2.0}.items():
            expected = 0.1**2 * scale**2 * float(X.square().sum(dim=1).mean())
            assert found[task].mean == pytest.approx(expected, abs=4 * found[task].error)
            assert found[task].error < 0.2 * expected
            assert found[task].verdict == "holds"

    def test_a_slope_alone_gives_no_rise_and_no_error(self):
        found = rise_under_noise(*one_weight(lambda y: y), 0.1, limit=9.0)["only"]
        assert (found.mean, found.error) == (pytest.approx(0.0, abs=1e-12), pytest.approx(0.0, abs=1e-12))

    def test_a_hill_fails_the_assumption(self):
        assert rise_under_noise(*one_weight(lambda y: 9.0 - y**2), 0.1, limit=9.0)["only"].verdict == "fails"

    @pytest.mark.parametrize(
        ("mean", "verdict"), [(0.3, "holds"), (0.2, "holds"), (0.1, "undecided"), (-0.2, "undecided"), (-0.3, "fails")]
    )
    def test_what_lies_within_two_standard_errors_is_undecided(self, mean, verdict):
        assert Rise(mean, 0.1).verdict == verdict

    def test_own_parameters_get_noise_too(self):
        model, batches, losses, parameters = linear()
        heads = TaskParameters(parameters.heads["right"], {"left": [], "right": []}, model)
        found = rise_under_noise(model, batches, losses, heads, 0.1, limit=1e3)
        assert found["left"].mean == 0.0
        assert found["right"].mean > 0.0

    def test_losses_are_clipped(self):
        model, batches, losses, parameters = one_weight(lambda y: y**2)
        found = rise_under_noise(model, batches, losses, parameters, 0.1, limit=0.5)["only"]
        assert (found.mean, found.error) == (0.0, 0.0)

    def test_a_seed_decides_the_numbers(self):
        first, same, other = (rise_under_noise(*linear(), 0.1, limit=LIMIT, seed=seed) for seed in (1, 1, 2))
        assert first == same != other

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"draws": 1}, "got 1 draws of noise; expected at least 2"),
            ({"sigma": 0.0}, "sigma must be a positive number, got 0.0"),
            ({"limit": -1.0}, "limit must be a positive number, got -1.0"),
        ],
    )
    def test_impossible_numbers_are_errors(self, options, said):
        with pytest.raises(ValueError, match=said):
            rise_under_noise(*linear(), **{"sigma": 0.1, "limit": LIMIT, **options})


def test_they_leave_everything_as_it_was():
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    model = MultiHead(trunk, {"left": nn.Linear(3, 1), "right": nn.Linear(3, 1)})
    model.heads["left"].eval()
    model.heads["left"].weight.grad = torch.ones(1, 3)
    batches = [(torch.randn(6, 4), {"left": torch.randn(6), "right": torch.randn(6)})]
    heads = {task: list(head.parameters()) for task, head in model.heads.items()}
    parameters = TaskParameters(trunk.parameters(), heads, model)
    losses = dict.fromkeys(heads, square)

    before = state(model)
    bounds(model, batches, losses, parameters, 0.1, limit=LIMIT)
    rise_under_noise(model, batches, losses, parameters, 0.1, limit=LIMIT, draws=2)
    assert state(model) == before
