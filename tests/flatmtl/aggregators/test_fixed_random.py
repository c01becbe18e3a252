"""Weights that the user gives, and weights that are drawn."""

import copy

import pytest
import torch
from tests.flatmtl.matrices import randn

from flatmtl.aggregators.context import Context
from flatmtl.aggregators.fixed import Fixed
from flatmtl.aggregators.random_weights import Random


def of_tasks(*rows: int) -> Context:
    return Context(rows, torch.ones(len(rows), dtype=torch.float64))


class TestFixed:
    def test_is_the_weighted_sum(self):
        J = randn(3, 5)
        torch.testing.assert_close(Fixed([0.5, -2.0, 3.0])(J), 0.5 * J[0] - 2.0 * J[1] + 3.0 * J[2])

    def test_by_hand(self):
        J = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
        assert Fixed([2.0, -1.0])(J).tolist() == [-1.0, 5.0]
        assert Fixed((0, 3))(J).tolist() == [9.0, -3.0]

    def test_all_64_tasks(self):
        J, w = randn(64, 9), randn(64, seed=1)
        torch.testing.assert_close(Fixed(w.tolist())(J), w @ J)

    def test_an_absent_task_takes_its_own_weight_with_it(self):
        J = randn(4, 6)
        found = Fixed([1.0, 10.0, 100.0, 1000.0])(J[[0, 3]], of_tasks(0, 3))
        torch.testing.assert_close(found, J[0] + 1000.0 * J[3])

    def test_one_of_three_tasks_alone(self):
        J = randn(1, 6)
        torch.testing.assert_close(Fixed([1.0, 10.0, 100.0])(J, of_tasks(1)), 10.0 * J[0])

    @pytest.mark.parametrize("m", [1, 2, 4])
    def test_without_a_context_rows_are_all_the_tasks(self, m):
        message = (
            rf"has weights for 3 tasks and got {m} rows; expected one row for each task\. Give one weight per task"
        )
        with pytest.raises(ValueError, match=message):
            Fixed([1.0, 2.0, 3.0])(randn(m, 2))

    def test_a_task_without_a_weight(self):
        with pytest.raises(ValueError, match=r"has weights for 2 tasks, but task 2 \(from 0\) is present\. Give one"):
            Fixed([1.0, 2.0])(randn(2, 2), of_tasks(0, 2))

    def test_weights_that_are_no_numbers(self):
        with pytest.raises(ValueError, match=r"weights \[nan, inf\] of tasks \[0, 2\] \(from 0\) are not finite"):
            Fixed([float("nan"), 1.0, float("inf")])
        with pytest.raises(ValueError, match="weights are empty; expected one number for each task"):
            Fixed([])

    def test_the_weights_given_are_copied(self):
        given = [1.0, 2.0]
        aggregator = Fixed(given)
        given[0] = 7.0
        assert repr(aggregator) == "Fixed(weights=(1.0, 2.0))"

    @pytest.mark.parametrize("weights", [(1.0,), (0.1, -2.5e-7, 3e300)])
    def test_printed_form_builds_it_again(self, weights):
        assert repr(eval(repr(Fixed(weights)))) == repr(Fixed(weights))

    @pytest.mark.parametrize("scale", [1e-150, 1e-20, 1e20, 1e150])
    def test_scale(self, scale):
        J = randn(3, 5)
        d = Fixed([1.0, -2.0, 3.0])(scale * J) / scale
        torch.testing.assert_close(d, Fixed([1.0, -2.0, 3.0])(J), rtol=1e-14, atol=0.0)

    def test_narrow_rows_are_rounded_once(self):
        J = randn(3, 50).bfloat16()
        exact = Fixed([1.0, -2.0, 3.0])(J.double())
        d = Fixed([1.0, -2.0, 3.0])(J)
        assert d.dtype == torch.bfloat16
        torch.testing.assert_close(d, exact.bfloat16(), rtol=0.0, atol=0.0)

    def test_rows_that_are_not_finite_are_named(self):
        J = randn(3, 2)
        J[2, 0] = float("nan")
        with pytest.raises(ValueError, match=r"task gradients \[2\] \(rows, from 0\) are not finite"):
            Fixed([1.0, 1.0, 0.0])(J)


class TestRandom:
    @pytest.mark.parametrize("m", [1, 2, 3, 40, 64])
    def test_weights_are_softmax_of_normal_numbers(self, m):
        aggregator, generator = Random(seed=5), torch.Generator().manual_seed(5)
        for _ in range(3):
            z = torch.randn(m, dtype=torch.float64, generator=generator)
            w = aggregator.weights(torch.eye(m, dtype=torch.float64))
            torch.testing.assert_close(w, z.exp() / z.exp().sum())

    def test_the_direction_is_a_convex_combination(self):
        J, aggregator = randn(1, 4).expand(7, -1), Random()
        for _ in range(5):
            torch.testing.assert_close(aggregator(J), J[0])

    def test_weights_are_the_mean_on_average(self):
        aggregator, G = Random(), torch.eye(3, dtype=torch.float64)
        average = torch.stack([aggregator.weights(G) for _ in range(4000)]).mean(dim=0)
        assert float((average - 1.0 / 3.0).abs().max()) <= 0.015  # five standard errors

    def test_equal_seeds_draw_alike_and_calls_differ(self):
        J, first, second, other = randn(4, 6), Random(3), Random(3), Random(4)
        directions = [first(J) for _ in range(3)]
        assert all(torch.equal(second(J), d) for d in directions)
        assert not torch.equal(directions[0], directions[1])
        assert not torch.equal(other(J), directions[0])

    def test_draws_do_not_depend_on_the_rows(self):
        assert torch.equal(Random().weights(torch.eye(3)), Random().weights(1e-30 * torch.ones(3, 3)))

    def test_it_goes_on_exactly_after_a_resume(self):
        J, aggregator = randn(5, 3), Random(seed=1)
        aggregator(J)
        state = copy.deepcopy(aggregator.state_dict())
        expected = [aggregator(J) for _ in range(3)]
        resumed = Random(seed=9)
        resumed.load_state_dict(state)
        assert all(torch.equal(resumed(J), d) for d in expected)

    def test_rows_that_are_not_finite_cost_no_draw(self):
        aggregator = Random()
        with pytest.raises(ValueError, match=r"task gradients \[0\] \(rows, from 0\) are not finite"):
            aggregator(torch.full((1, 2), torch.inf))
        assert torch.equal(aggregator(randn(2, 3)), Random()(randn(2, 3)))

    def test_printed_form(self):
        assert repr(Random(seed=7)) == "Random(seed=7)"
