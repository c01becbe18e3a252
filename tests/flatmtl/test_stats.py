"""Statistics of steps, from hand-made results."""

import math

import pytest
import torch

from flatmtl import Monitor, StepResult
from flatmtl._linalg import as_cosines, conflict_share


def gramian(rows) -> torch.Tensor:
    J = torch.tensor(rows, dtype=torch.float64)
    return J @ J.T


class TestConflict:
    def test_is_the_share_of_pairs_with_a_negative_inner_product(self):
        assert conflict_share(gramian([[1.0, 0.0], [-1.0, 1.0], [-1.0, -2.0]])) == pytest.approx(1.0)
        assert conflict_share(gramian([[1.0, 0.0], [0.0, 1.0], [-1.0, 1.0]])) == pytest.approx(1 / 3)

    def test_a_zero_gradient_is_no_conflict(self):
        assert conflict_share(gramian([[0.0, 0.0], [-1.0, 1.0]])) == 0

    def test_absent_tasks_do_not_count(self):
        G = gramian([[1.0, 0.0], [-1.0, 1.0], [5.0, 5.0]])
        G[2], G[:, 2] = math.nan, math.nan
        assert conflict_share(G) == 1

    def test_one_task_has_no_pair(self):
        assert conflict_share(gramian([[1.0, 0.0]])).isnan()


def test_cosines_are_exact_at_any_scale():
    expected = torch.tensor([[1.0, -0.8], [-0.8, 1.0]], dtype=torch.float64)
    for scale in (1e-60, 1.0, 1e60):
        G = torch.tensor([[25.0, -4.0 * scale], [-4.0 * scale, scale**2]], dtype=torch.float64)
        torch.testing.assert_close(as_cosines(G), expected)


class TestResult:
    result = StepResult(
        tasks=("a", "b"),
        losses=torch.tensor([1.0, 2.0]),
        perturbed_losses=torch.tensor([1.5, 4.0]),
        gramian_loss=gramian([[3.0, 4.0], [0.0, -1.0]]),
    )

    def test_derived_statistics(self):
        assert self.result.sharpness.tolist() == [0.5, 2.0]
        assert self.result.norms.tolist() == [5.0, 1.0]
        assert self.result.norms_flat is None
        assert self.result.conflict == 1.0

    def test_flat_gradients_against_loss_gradients(self):
        g = torch.tensor([[3.0, 4.0], [0.0, -1.0], [math.nan, math.nan]], dtype=torch.float64)
        f = torch.tensor([[0.3, -0.4], [0.1, 0.1], [math.nan, math.nan]], dtype=torch.float64)
        result = StepResult(
            tasks=("a", "b", "absent"),
            losses=torch.tensor([1.0, 2.0, math.nan]),
            gramian_loss=g @ g.T,
            gramian_flat=f @ f.T,
            intra=(g * f).sum(dim=1),
            inter=f @ (g[0] + g[1]),
        )
        found = {name: value.tolist() for name, value in result.statistics().items()}
        near = {"rel": 1e-12, "nan_ok": True}
        assert found["flat_to_loss"] == pytest.approx([0.1, math.sqrt(0.02), math.nan], **near)
        assert found["intra_conflict"] == pytest.approx([1.0, 1.0, math.nan], **near)  # 0.9 - 1.6 and -0.1
        assert found["inter_conflict"] == pytest.approx([1.0, 0.0, math.nan], **near)  # 0.9 - 1.2 and 0.3 + 0.3
        assert found["cosine"] == pytest.approx(-0.8, **near)
        assert found["cosine_flat"] == pytest.approx(-0.01 / (0.5 * math.sqrt(0.02)), **near)
        assert (found["conflict"], found["conflict_flat"]) == (1.0, 1.0)

    def test_one_task_has_no_pair_to_take_the_cosine_of(self):
        assert StepResult(("a",), torch.ones(1), gramian_loss=gramian([[3.0, 4.0]])).cosine.isnan()

    def test_scalars_are_named_by_task(self):
        scalars = {name: float(value) for name, value in self.result.scalars().items()}
        assert scalars["sharpness/b"] == 2.0
        assert scalars["conflict"] == 1.0
        assert "norm_flat/a" not in scalars

    def test_conflict_is_a_float64_number_like_all_others(self):
        assert self.result.conflict.dtype == torch.float64

    def test_a_step_is_empty_if_no_task_had_labels(self):
        nothing, some = torch.full((2,), math.nan), torch.tensor([1.0, math.nan])
        assert StepResult(("a", "b"), nothing, skipped=True).empty
        assert not StepResult(("a", "b"), nothing, skipped=True, dropped=("a",)).empty
        assert not StepResult(("a", "b"), some, skipped=True).empty
        assert not StepResult(("a", "b"), some).empty

    def test_printed_form(self):
        assert repr(self.result) == "StepResult(a=1, b=2)"
        assert repr(StepResult(("a",), torch.tensor([1.0]), dropped=("a",), skipped=True)) == (
            "StepResult(a=1; dropped: a; skipped)"
        )


class TestPrecision:
    """Gradients of which some entries are as they come from autograd in some precision."""

    def sample(self, dtype: torch.dtype) -> torch.Tensor:
        g = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
        g[:, ::3] = 0.0  # as behind a ReLU
        return g.to(dtype).float()

    @pytest.mark.parametrize(
        ("dtype", "unit"), [(torch.float32, 2**-24), (torch.float16, 2**-11), (torch.bfloat16, 2**-8)]
    )
    def test_the_rounding_error_shows_in_the_entries(self, dtype, unit):
        result = StepResult(("a", "b", "c"), torch.ones(3), sample=self.sample(dtype))
        assert result.roundoff.tolist() == [unit] * 3

    def test_float64_is_known_by_its_type_and_an_absent_task_has_none(self):
        sample = self.sample(torch.float32).double()
        sample[1] = math.nan
        found = StepResult(("a", "b", "c"), torch.ones(3), sample=sample).roundoff.tolist()
        assert found == pytest.approx([2.0**-53, math.nan, 2.0**-53], rel=0.0, abs=0.0, nan_ok=True)

    def test_signal_to_noise_is_the_flat_gradient_over_one_rounding_of_the_two_that_it_is_made_of(self):
        g, f = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([0.3, -0.1], dtype=torch.float64)
        result = StepResult(
            ("a",),
            torch.ones(1),
            gramian_loss=gramian([[3.0, 4.0]]),
            gramian_flat=gramian([[0.3, -0.1]]),
            intra=(g @ f)[None],
            sample=self.sample(torch.bfloat16)[:1],
        )
        error = 2**-8 * (g.norm() ** 2 + (g + f).norm() ** 2).sqrt()
        torch.testing.assert_close(result.signal_to_noise, (f.norm() / error)[None])
        assert result.scalars()["signal_to_noise/a"] == result.signal_to_noise[0]


def test_monitor_knows_tasks_by_name_whatever_others_are_in_the_step():
    monitor = Monitor()
    monitor.update(StepResult(("a", "b"), torch.tensor([1.0, 2.0])))
    monitor.update(StepResult(("b", "c"), torch.tensor([4.0, 5.0])))
    means = monitor.compute()
    assert (means["loss/a"], means["loss/b"], means["loss/c"]) == (1.0, 3.0, 5.0)


def test_monitor_averages_over_the_steps_that_know_a_statistic():
    monitor = Monitor()
    monitor.update(StepResult(("a",), torch.tensor([1.0]), gramian_loss=gramian([[2.0]])))
    monitor.update(StepResult(("a",), torch.tensor([math.nan]), dropped=("a",), skipped=True))
    means = monitor.compute()
    assert means["loss/a"] == 1.0
    assert means["norm/a"] == 2.0
    assert (means["steps"], means["skipped"], means["dropped"]) == (2, 1, 1)
    assert math.isnan(means["conflict"])
    monitor.reset()
    assert monitor.compute() == {"steps": 0.0, "skipped": 0.0, "dropped": 0.0}


def test_a_monitor_goes_on_from_its_state():
    results = [StepResult(("a", "b"), torch.tensor([float(i), math.nan if i == 1 else 2.0 * i])) for i in range(4)]
    whole, first, second = Monitor(), Monitor(), Monitor()
    for result in results:
        whole.update(result)
    for result in results[:2]:
        first.update(result)
    state = first.state_dict()
    first.update(results[0])  # the state is a copy
    second.load_state_dict(state)
    for result in results[2:]:
        second.update(result)
    assert second.compute() == whole.compute()
    with pytest.raises(ValueError, match=r"the state has \['steps'\]; expected what Monitor.state_dict\(\) returns"):
        second.load_state_dict({"steps": 3})
