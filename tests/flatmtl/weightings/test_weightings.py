"""Laws that hold for every loss weighting; a new one joins all of them by its entry in ``WEIGHTINGS``."""

import copy
import io
import random

import pytest
import torch
from torch import Tensor

from flatmtl.aggregators.context import Context
from flatmtl.aggregators.weightings import DWA, FAMO, GLS, IMTLL, LS, RLW, SI, UW

TASKS = 64


def in_first_epoch() -> DWA:
    dwa = DWA()
    dwa.start_epoch(0)
    return dwa


WEIGHTINGS = {
    "ls": LS,
    "si": SI,
    "gls": GLS,
    "rlw": lambda: RLW(seed=3),
    "dwa": in_first_epoch,
    "uw": lambda: UW(TASKS),
    "imtl_l": lambda: IMTLL(TASKS),
    "famo": lambda: FAMO(TASKS),
}
NEED_POSITIVE = ("si", "gls", "famo")
NEED_NOT_NEGATIVE = ("dwa", "uw", "imtl_l")

every_weighting = pytest.mark.parametrize("make", WEIGHTINGS.values(), ids=WEIGHTINGS)


def some(names):
    return pytest.mark.parametrize("make", [WEIGHTINGS[name] for name in names], ids=names)


def losses(m: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * m + seed)
    return 0.1 + 3.0 * torch.rand(m, dtype=torch.float64, generator=generator)


def go(weighting, steps: range) -> list[Tensor]:
    """Train for some steps on changing losses of changing tasks, in epochs of three steps."""
    found: list[Tensor] = []
    optimizer = torch.optim.SGD(parameters, lr=0.1) if (parameters := list(weighting.parameters())) else None
    for step in steps:
        weighting.start_epoch(step // 3)
        rows = (0, 2, 3) if step % 4 == 1 else (0, 1, 2, 3)
        L, context = losses(len(rows), seed=step), Context(rows, losses(len(rows), seed=step))
        for parameter, gradient in weighting.own_gradients(L, context):
            parameter.grad = gradient
        found.append(weighting.weights(L, context))
        if hasattr(weighting, "after_step") and step % 5 != 2:
            weighting.after_step(0.9 * losses(len(rows), seed=-step), context)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return found


def numbers(state: dict[str, object]) -> dict[str, object]:
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in state.items()}


@every_weighting
class TestLaws:
    @pytest.mark.parametrize("m", [1, 2, 3, 64])
    def test_weights_are_positive_constants_of_the_step(self, make, m):
        w = make().weights(losses(m).requires_grad_())
        assert w.shape == (m,)
        assert bool((w > 0.0).all())
        assert bool(torch.isfinite(w).all())
        assert not w.requires_grad

    @pytest.mark.parametrize("value", [1e-6, 1.0, 1e6])
    def test_one_task_gives_a_positive_multiple(self, make, value):
        w = make().weights(torch.tensor([value], dtype=torch.float64))
        assert float(w) == pytest.approx(1.0 / value if isinstance(make(), SI) else 1.0)

    @pytest.mark.parametrize("value", [1e-20, 1e20])
    def test_sixty_four_tiny_or_huge_losses(self, make, value):
        w = make().weights(torch.full((64,), value, dtype=torch.float64))
        assert bool(torch.isfinite(w).all())
        assert bool((w > 0.0).all())

    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)], ids=str
    )
    def test_narrow_losses_give_weights_of_their_dtype_that_are_rounded_only_once(self, make, dtype, tolerance):
        L = losses(5).to(dtype)
        w = make().weights(L)
        assert w.dtype == dtype
        torch.testing.assert_close(w.double(), make().weights(L.double()), rtol=tolerance, atol=0.0)

    def test_weights_are_on_the_device_of_the_losses_whatever_the_default_device_is(self, make):
        with torch.device("meta"):
            weighting = make()
            w = weighting.weights(torch.ones(3, device="cpu"))
            list(weighting.own_gradients(torch.ones(3, device="cpu")))
            weighting.weights(torch.ones(3, device="cpu"))
        assert w.device.type == "cpu"
        assert all(parameter.device.type == "cpu" for parameter in weighting.parameters())

    def test_direction_is_the_weighted_sum_of_the_rows(self, make):
        J = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        context = Context((0, 2, 5), losses(3))
        torch.testing.assert_close(make()(J, context), J.T @ make().weights(losses(3), context))

    @pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e6])
    def test_direction_has_degree_one_at_given_losses(self, make, scale):
        J = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        context = Context((0, 1, 2), losses(3))
        assert make().degree == 1.0
        torch.testing.assert_close(make()(scale * J, context) / scale, make()(J, context))

    def test_input_is_left_alone(self, make):
        L = losses(4)
        make().weights(L)
        assert torch.equal(L, losses(4))

    def test_weights_have_memory_of_their_own(self, make):
        L = torch.ones(1, dtype=torch.float64)
        make().weights(L).zero_()
        assert float(L) == 1.0

    def test_global_random_state_is_left_alone(self, make):
        before, python = torch.get_rng_state(), random.getstate()
        go(make(), range(4))
        assert torch.equal(torch.get_rng_state(), before)
        assert random.getstate() == python

    @pytest.mark.parametrize("steps", range(8))
    def test_a_restored_run_goes_on_exactly(self, make, steps):
        whole = make()
        go(whole, range(steps))
        file = io.BytesIO()
        torch.save(whole.state_dict(), file)
        file.seek(0)
        restored = make()
        go(restored, range(3))  # what it did before does not matter
        restored.load_state_dict(torch.load(file, weights_only=True))
        rest = range(steps, steps + 8)
        for a, b in zip(go(whole, rest), go(restored, rest), strict=True):
            assert torch.equal(a, b)

    def test_a_copy_goes_on_alike_and_apart(self, make):
        first, expected = make(), make()
        go(first, range(5))
        go(expected, range(5))
        twin = copy.deepcopy(first)
        go(twin, range(5, 9))
        for a, b in zip(go(first, range(5, 12)), go(expected, range(5, 12)), strict=True):
            assert torch.equal(a, b)

    def test_a_state_shares_nothing_with_those_it_comes_from_and_goes_to(self, make):
        first, second = make(), make()
        go(first, range(5))
        state = first.state_dict()
        before = copy.deepcopy(state)
        second.load_state_dict(state)
        for weighting in (first, second):
            go(weighting, range(5, 9))
            assert numbers(state) == numbers(before)

    def test_state_of_another_class_is_refused(self, make):
        with pytest.raises(ValueError, match="Load the state of the same aggregator"):
            make().load_state_dict({"from": "elsewhere"})

    def test_printed_form_builds_it_again(self, make):
        weighting = make()
        again = eval(repr(weighting))
        assert repr(again) == repr(weighting)
        assert type(again) is type(weighting)

    @pytest.mark.parametrize(
        "L", [torch.tensor(1.0), torch.ones(0), torch.ones(2, 2), torch.ones(2, dtype=torch.int64)], ids=str
    )
    def test_what_is_no_vector_of_losses_is_refused(self, make, L):
        with pytest.raises(ValueError, match=r"expected a floating-point vector \(m,\).*torch.stack"):
            make().weights(L)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    def test_losses_that_are_not_finite_are_named_and_leave_no_trace(self, make, bad):
        weighting = make()
        with pytest.raises(ValueError, match=r"rows \[1, 3\] \(from 0\) are not finite.*Leave these tasks out"):
            weighting.weights(torch.tensor([1.0, bad, 2.0, bad]))
        assert torch.equal(weighting.weights(losses(3)), make().weights(losses(3)))

    def test_losses_that_do_not_fit_the_tasks_are_refused(self, make):
        with pytest.raises(ValueError, match=r"losses have shape \(3,\); expected one for each of the rows \[0, 4\]"):
            make().weights(losses(3), Context((0, 4), losses(2)))


class TestRefusals:
    @some(NEED_POSITIVE)
    @pytest.mark.parametrize("bad", [0.0, -1.0])
    def test_losses_that_are_not_positive_are_named(self, make, bad):
        with pytest.raises(ValueError, match=r"rows \[1\] \(from 0\) are not positive; .*\(.*\) needs.*Use LS or RLW"):
            make().weights(torch.tensor([1.0, bad]))

    @some(NEED_NOT_NEGATIVE)
    def test_negative_losses_are_named(self, make):
        with pytest.raises(ValueError, match=r"losses \[-1.0\] of rows \[1\] \(from 0\) are negative; .*Use LS or RLW"):
            make().weights(torch.tensor([1.0, -1.0]))

    @some(NEED_NOT_NEGATIVE)
    def test_losses_of_zero_are_allowed(self, make):
        assert make().weights(torch.zeros(2)).tolist() == [1.0, 1.0]

    @some(("ls", "rlw"))
    def test_any_losses_are_allowed_where_they_do_not_matter(self, make):
        w = make().weights(losses(3))
        assert torch.equal(make().weights(torch.tensor([-5.0, 0.0, 5.0], dtype=torch.float64)), w)

    @pytest.mark.parametrize("of", [UW, IMTLL, FAMO])
    def test_a_task_beyond_those_told_of_is_named(self, of):
        with pytest.raises(ValueError, match=r"tasks=2.* is for 2 tasks, but task 4 \(from 0\) is present. Make it"):
            of(2).weights(losses(2), Context((0, 4), losses(2)))

    @pytest.mark.parametrize("of", [UW, IMTLL, FAMO])
    def test_the_state_of_another_number_of_tasks_is_refused(self, of):
        with pytest.raises(ValueError, match=r"state holds values of shape \(3,\); .* expects one for each of 2 tasks"):
            of(2).load_state_dict(of(3).state_dict())

    @pytest.mark.parametrize("of", [UW, IMTLL, FAMO])
    @pytest.mark.parametrize("tasks", [0, -1, 2.0, ["left", "right"]], ids=str)
    def test_what_is_no_number_of_tasks_is_refused(self, of, tasks):
        with pytest.raises(ValueError, match=r"tasks is .*; expected the number of all tasks"):
            of(tasks)


OBJECTIVES = {
    LS: lambda L: L.sum(),
    SI: lambda L: L.log().sum(),
    GLS: lambda L: L.prod() ** (1.0 / len(L)),
}


@pytest.mark.parametrize("of", OBJECTIVES, ids=lambda of: of.__name__)
@pytest.mark.parametrize("m", [1, 2, 7])
def test_weights_are_the_gradient_of_what_is_trained(of, m):
    L = losses(m).requires_grad_()
    (expected,) = torch.autograd.grad(OBJECTIVES[of](L), L)
    torch.testing.assert_close(of().weights(L), expected)


def test_si_by_hand():
    assert SI().weights(torch.tensor([0.25, 4.0])).tolist() == [4.0, 0.25]


def test_gls_by_hand():
    w = GLS().weights(torch.tensor([1.0, 8.0, 27.0], dtype=torch.float64))  # geometric mean 6
    torch.testing.assert_close(w, torch.tensor([2.0, 0.25, 2.0 / 27.0], dtype=torch.float64))


@pytest.mark.parametrize("value", [1e-20, 1e20])
def test_gls_is_the_mean_of_equal_losses_however_small_or_large(value):
    w = GLS().weights(torch.full((64,), value))
    torch.testing.assert_close(w, torch.full((64,), 1.0 / 64))


def test_gls_of_losses_far_apart():
    w = GLS().weights(torch.tensor([1e-150, 1e150] * 32, dtype=torch.float64))  # geometric mean 1
    torch.testing.assert_close(w, torch.tensor([1e150, 1e-150] * 32, dtype=torch.float64) / 64, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("m", [1, 2, 40])
def test_rlw_sums_to_one(m):
    rlw = RLW()
    for _ in range(5):
        assert float(rlw.weights(losses(m)).sum()) == pytest.approx(1.0)


def test_rlw_draws_the_softmax_of_normal_numbers():
    rlw = RLW(seed=5)
    logs = torch.stack([rlw.weights(losses(3)).log() for _ in range(4000)])
    differences = logs[:, 0] - logs[:, 1]  # normal, of variance 2
    assert abs(float(differences.mean())) < 0.08
    assert float(differences.var()) == pytest.approx(2.0, rel=0.1)
    assert float((differences.abs() < 2**0.5).double().mean()) == pytest.approx(0.6827, abs=0.03)


def test_rlw_follows_its_seed():
    draws = [[tuple(rlw.weights(losses(3)).tolist()) for _ in range(3)] for rlw in (RLW(1), RLW(1), RLW(2))]
    assert draws[0] == draws[1]
    assert len({*draws[0], *draws[2]}) == 6
