"""What each method promises beyond the common laws."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.flatmtl.matrices import integer_rows, randn
from torch import Tensor

from flatmtl.aggregators import IMTLG, MGDA, CAGrad, Context, Mean, PCGrad, Sum

pytestmark = pytest.mark.filterwarnings("ignore:.*a task gradient is zero")


def assert_close(actual: Tensor, expected: Tensor, size: float, tolerance: float = 1e-12) -> None:
    """Equal up to ``tolerance`` of ``size``."""
    torch.testing.assert_close(actual / size, expected / size, atol=tolerance, rtol=0.0)


many_tasks = pytest.mark.parametrize(("m", "n"), [(1, 3), (2, 5), (3, 2), (5, 8), (10, 4), (40, 64), (64, 30)])


def test_mean_and_sum():
    J = randn(4, 6)
    assert_close(Mean()(J), J.mean(dim=0), size=1.0)
    assert_close(Sum()(J), J.sum(dim=0), size=1.0)


class TestMGDA:
    @many_tasks
    def test_never_conflicts(self, m, n):
        for seed in range(5):
            J = randn(m, n, seed=seed)
            d = MGDA()(J)
            assert float((J @ d - d @ d).min()) >= -1e-12 * float(J.norm(dim=1).max()) ** 2

    @settings(max_examples=150, deadline=None)
    @given(J=integer_rows)
    def test_never_conflicts_for_any_integers(self, J):
        d = MGDA()(J)
        assert float((J @ d - d @ d).min()) >= -1e-12 * float(J.norm(dim=1).max()) ** 2

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_never_conflicts_for_nearly_opposite_rows_in_narrow_dtypes(self, dtype):
        """Weights are exact and the sum is rounded once, so that cancellation does no harm."""
        for seed in range(20):
            row = randn(1, 50, seed=seed)
            J = torch.cat([row, -row + 0.02 * randn(1, 50, seed=seed + 100)]).to(dtype)
            d = MGDA()(J).double()
            products = J.double() @ d / (J.double().norm(dim=1) * d.norm())
            rounding = torch.finfo(dtype).eps
            assert float(products.min()) >= -rounding

    @pytest.mark.parametrize("m", [2, 3, 5, 20, 40])
    def test_is_zero_at_pareto_stationary_points(self, m):
        J = randn(m, 2 * m, seed=m)
        J[-1] = -(J[:-1] * torch.linspace(0.5, 2.0, m - 1, dtype=torch.float64)[:, None]).sum(dim=0)
        assert float(MGDA()(J).norm()) <= 1e-12 * float(J.norm())

    def test_a_zero_row_is_pareto_stationary(self):
        J = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 1.0]])
        for normalise in ("none", "l2"):
            assert MGDA(normalise)(J).tolist() == [0.0, 0.0]

    @pytest.mark.parametrize("normalise", ["l2", "loss", "loss+"])
    def test_normalisation_concerns_the_weights_only(self, normalise):
        J, losses = randn(4, 7), torch.tensor([0.5, 1.0, 2.0, 8.0], dtype=torch.float64)
        divisors = {"l2": J.norm(dim=1), "loss": losses, "loss+": losses * J.norm(dim=1)}[normalise]
        scaled = J / divisors[:, None]
        expected = J.T @ MGDA().weights(scaled @ scaled.T)
        assert_close(MGDA(normalise)(J, Context((0, 1, 2, 3), losses)), expected, size=float(J.norm()))

    def test_two_unit_rows_share_the_weight(self):
        J = torch.tensor([[2.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
        assert_close(MGDA("l2")(J), torch.tensor([2.5, 2.0], dtype=torch.float64), size=1.0)

    @pytest.mark.parametrize("normalise", ["loss", "loss+"])
    def test_losses_that_cannot_be_divided_by(self, normalise):
        J = randn(2, 3)
        with pytest.raises(ValueError, match="got no losses; expected them as the second argument"):
            MGDA(normalise)(J)
        for bad in (0.0, -1.0, float("nan")):
            losses = torch.tensor([1.0, bad])
            with pytest.raises(
                ValueError, match=r"of rows \[1\] \(from 0\) are not positive.*Use normalise='none' or 'l2'"
            ):
                MGDA(normalise)(J, Context((0, 1), losses))
        with pytest.raises(ValueError, match=r"losses have shape \(3,\); expected one for each of 2 rows"):
            MGDA(normalise)(J, Context((0, 1), torch.ones(3)))

    def test_only_losses_need_a_context(self):
        assert [MGDA(n).uses_context for n in ("none", "l2", "loss", "loss+")] == [False, False, True, True]


def surgery(J: Tensor, order: list[list[int]]) -> Tensor:
    """The rows after projection, vector by vector as in the paper; the last axis holds the parameters."""
    projected = J.clone()
    for i, others in enumerate(order):
        for j in others:
            product, square = projected[i] @ J[j], J[j] @ J[j]
            if product < 0.0 and square > 0.0:
                projected[i] = projected[i] - product / square * J[j]
    return projected


class TestPCGrad:
    @pytest.mark.parametrize(("m", "n"), [(1, 3), (2, 5), (3, 2), (3, 9), (4, 3), (7, 20), (16, 8), (40, 64)])
    def test_equals_projecting_vector_by_vector(self, m, n):
        J = randn(m, n, seed=m)
        order = [
            [j for j in torch.randperm(m, generator=torch.Generator().manual_seed(i)).tolist() if j != i]
            for i in range(m)
        ]
        assert_close(PCGrad(order=order)(J), surgery(J, order).sum(dim=0), size=float(J.norm()))
        assert_close(PCGrad("mean", order=order)(J), surgery(J, order).mean(dim=0), size=float(J.norm()))

    @settings(max_examples=100, deadline=None)
    @given(J=integer_rows, random=st.randoms(use_true_random=False))
    def test_equals_projecting_vector_by_vector_for_any_integers(self, J, random):
        order = [
            random.sample(others, len(others))
            for i in range(len(J))
            for others in [[j for j in range(len(J)) if j != i]]
        ]
        assert_close(PCGrad(order=order)(J), surgery(J, order).sum(dim=0), size=1.0, tolerance=1e-10)

    def test_two_tasks_never_conflict(self):
        for seed in range(20):
            J = randn(2, 4, seed=seed)
            assert float((J @ PCGrad()(J)).min()) >= -1e-12

    def test_without_conflict_it_is_the_sum(self):
        J = randn(5, 7).abs()
        assert_close(PCGrad()(J), J.sum(dim=0), size=float(J.norm()))

    def test_three_orders_of_three_tasks_by_hand(self):
        """Projections are on the original rows: this task would gain from projected ones."""
        J = torch.tensor([[1.0, 0.0], [-1.0, 1.0], [-1.0, -2.0]], dtype=torch.float64)
        found = {order: PCGrad(order=[list(order), [0, 2], [0, 1]])(J).tolist() for order in ((1, 2), (2, 1))}
        # Task 0 off task 1: (1/2, 1/2), which conflicts with task 2: plus 3/10 of it: (1/5, -1/10).
        rest = surgery(J, [[], [0, 2], [0, 1]])[1:].sum(dim=0)
        assert_close(
            torch.tensor(found[1, 2], dtype=torch.float64) - rest,
            torch.tensor([0.2, -0.1], dtype=torch.float64),
            size=1.0,
        )
        # Task 0 off task 2: (4/5, -2/5), which conflicts with task 1: plus 3/5 of it: (1/5, 1/5).
        assert_close(
            torch.tensor(found[2, 1], dtype=torch.float64) - rest,
            torch.tensor([0.2, 0.2], dtype=torch.float64),
            size=1.0,
        )

    def test_a_row_that_ends_up_against_its_own_original_is_left_so(self):
        J = torch.tensor([[1.0, 0.1], [-1.0, 0.02], [0.05, -1.0]], dtype=torch.float64)
        order = [[1, 2], [0, 2], [0, 1]]
        assert_close(PCGrad(order=order)(J), surgery(J, order).sum(dim=0), size=1.0)

    def test_every_draw_is_an_arrangement_of_the_others_and_all_occur(self):
        aggregator = PCGrad(seed=1)
        drawn = [aggregator._orders(4).tolist() for _ in range(200)]
        for order in drawn:
            for i, others in enumerate(order):
                assert sorted(others) == [j for j in range(4) if j != i]
        assert {tuple(order[2]) for order in drawn} == set(itertools.permutations([0, 1, 3]))

    def test_each_task_has_its_own_order(self):
        order = PCGrad()._orders(10).tolist()
        assert len({tuple(sorted(range(9), key=others.__getitem__)) for others in order}) > 1

    def test_equal_seeds_draw_alike_and_calls_differ(self):
        J = randn(8, 4)
        first, second, other = PCGrad(seed=5), PCGrad(seed=5), PCGrad(seed=6)
        directions = [first(J) for _ in range(4)]
        for d in directions:
            assert torch.equal(second(J), d)
        assert not torch.equal(directions[0], directions[1])
        assert not torch.equal(other(J), directions[0])

    def test_two_rows_need_no_draw_and_fit_any_order(self):
        J, aggregator = randn(2, 3), PCGrad()
        before = aggregator.state_dict()["generator"]
        aggregator(J)
        assert torch.equal(aggregator.state_dict()["generator"], before)
        ordered = PCGrad(order=[[1, 2], [2, 0], [0, 1]])
        assert torch.equal(ordered(J), aggregator(J))

    def test_absent_tasks_are_passed_over(self):
        order = [[3, 2, 1], [0, 3, 2], [1, 3, 0], [2, 0, 1]]
        J = randn(4, 3, seed=2)
        present = (0, 2, 3)
        expected = surgery(J[list(present)], [[2, 1], [2, 0], [1, 0]]).sum(dim=0)
        found = PCGrad(order=order)(J[list(present)], Context(present, torch.ones(3)))
        assert_close(found, expected, size=float(J.norm()))

    def test_an_order_for_fewer_tasks_than_there_are(self):
        with pytest.raises(ValueError, match=r"order is for 3 tasks, but task 3 \(from 0\) is present"):
            PCGrad(order=[[1, 2], [0, 2], [0, 1]])(randn(4, 3))

    def test_the_order_given_is_copied(self):
        order = [[1, 2], [2, 0], [0, 1]]
        aggregator = PCGrad(order=order)
        order[0].reverse()
        assert aggregator.order == ((1, 2), (2, 0), (0, 1))


class TestCAGrad:
    @many_tasks
    @pytest.mark.parametrize("c", [0.0, 0.2, 0.4, 0.9, 1.0, 2.0])
    def test_stays_in_the_ball_and_serves_the_worst_task_no_worse_than_the_mean(self, m, n, c):
        J = randn(m, n, seed=m)
        d, mean = CAGrad(c)(J), J.mean(dim=0)
        assert float((d - mean).norm()) <= c * float(mean.norm()) * (1 + 1e-9) + 1e-12 * float(mean.norm())
        assert float((J @ d).min()) >= float((J @ mean).min()) - 1e-12 * float(J.norm()) * float(mean.norm())

    @settings(max_examples=100, deadline=None)
    @given(J=integer_rows, c=st.sampled_from([0.1, 0.4, 1.0, 3.0]))
    def test_the_same_for_any_integers(self, J, c):
        d, mean = CAGrad(c)(J), J.mean(dim=0)
        nonzero = J[J.norm(dim=1) > 0.0]
        assert float((d - mean).norm()) <= c * float(mean.norm()) * (1 + 1e-9) + 1e-12
        if len(nonzero):
            assert float((nonzero @ d).min()) >= float((nonzero @ mean).min()) - 1e-9

    def test_c_of_zero_is_the_mean(self):
        J = randn(4, 6)
        assert_close(CAGrad(c=0.0)(J), Mean()(J), size=1.0, tolerance=1e-15)

    def test_a_large_ball_turns_to_the_direction_of_mgda(self):
        J = randn(4, 6) + 1.0
        far, shortest = CAGrad(c=1e6)(J), MGDA()(J)
        assert_close(far / far.norm(), shortest / shortest.norm(), size=1.0, tolerance=1e-5)

    def test_no_longer_zero_for_small_gradients(self):
        J = randn(3, 6)
        assert_close(1e6 * CAGrad()(1e-6 * J), CAGrad()(J), size=float(J.norm()))

    @pytest.mark.parametrize(("rescale", "divisor"), [(None, 1.0), ("1+c2", 1.25), ("1+c", 1.5)])
    def test_rescaling_divides(self, rescale, divisor):
        J = randn(3, 6)
        assert_close(divisor * CAGrad(0.5, rescale)(J), CAGrad(0.5)(J), size=float(J.norm()))

    def test_one_row_gains_the_whole_ball(self):
        assert_close(CAGrad(0.4)(torch.tensor([[3.0, -1.0]])), torch.tensor([4.2, -1.4]), size=1.0, tolerance=1e-6)

    def test_a_zero_mean_gives_zero(self):
        J = randn(3, 5)
        assert float(CAGrad()(J - J.mean(dim=0)).norm()) <= 1e-7 * float(J.norm())


class TestIMTLG:
    @pytest.mark.parametrize(("m", "n"), [(1, 3), (2, 5), (3, 9), (5, 8), (10, 64), (40, 100)])
    def test_projections_are_equal(self, m, n):
        J = randn(m, n, seed=m) * 10 ** (6 * torch.rand(m, 1, generator=torch.Generator().manual_seed(m)).double() - 3)
        w = IMTLG().weights(J @ J.T)
        projections = J @ (J.T @ w) / J.norm(dim=1)
        size = float((J.T * w).norm(dim=0).max())
        assert float(w.sum()) == pytest.approx(1.0)
        assert float(projections.max() - projections.min()) <= 1e-9 * size

    @settings(max_examples=150, deadline=None)
    @given(J=integer_rows)
    def test_projections_are_equal_for_any_integers(self, J):
        nonzero = J[J.norm(dim=1) > 0.0]
        d = IMTLG()(J)
        if len(nonzero):
            projections = nonzero @ d / nonzero.norm(dim=1)
            w = IMTLG().weights(J @ J.T)
            size = max(float((J.T * w).norm(dim=0).max()), 1.0)
            assert float(projections.max() - projections.min()) <= 1e-7 * size

    def test_two_rows_in_closed_form(self):
        J = randn(2, 5)
        lengths = J.norm(dim=1)
        expected = (J[0] * lengths[1] + J[1] * lengths[0]) / lengths.sum()
        assert_close(IMTLG()(J), expected, size=float(J.norm()))

    def test_weights_of_independent_rows_solve_the_paper_system(self):
        J = randn(4, 9)
        U, D = (J / J.norm(dim=1, keepdim=True)), J
        U, D = U[:1] - U[1:], D[:1] - D[1:]
        rest = torch.linalg.solve((D @ U.T).T, (J[0] @ U.T))
        expected = torch.cat([1.0 - rest.sum()[None], rest])
        torch.testing.assert_close(IMTLG().weights(J @ J.T), expected)

    def test_a_zero_row_is_left_out(self):
        J = randn(3, 6)
        with_zero = torch.cat([J[:1], torch.zeros(1, 6, dtype=torch.float64), J[1:]])
        w = IMTLG().weights(with_zero @ with_zero.T)
        assert float(w[1]) == 0.0
        assert_close(IMTLG()(with_zero), IMTLG()(J), size=float(J.norm()))

    def test_of_several_weights_the_shortest_is_taken(self):
        row = randn(1, 6)
        J = torch.cat([row, row, 2.0 * row])
        torch.testing.assert_close(IMTLG().weights(J @ J.T), torch.full((3,), 1.0 / 3.0, dtype=torch.float64))

    @pytest.mark.parametrize("distance", [1e-3, 1e-5, 1e-6])
    def test_nearly_parallel_rows_are_still_told_apart(self, distance):
        J = randn(3, 6)
        J[1] = J[0] + distance * J[1]
        d = IMTLG()(J)
        projections = J @ d / J.norm(dim=1)
        assert float(projections.max() - projections.min()) <= 1e-3 * distance * float(d.norm())

    def test_rows_that_depend_linearly_but_not_affinely_give_zero(self):
        J = torch.cat([randn(3, 6), randn(3, 6).sum(dim=0, keepdim=True)])
        assert float(IMTLG()(J).norm()) <= 1e-9 * float(J.norm())

    def test_tips_on_one_line_have_no_weights_with_equal_projections(self):
        J = torch.tensor([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]], dtype=torch.float64)
        assert IMTLG().weights(J @ J.T).tolist() == [0.0, 0.0, 0.0]
        assert IMTLG()(J).tolist() == [0.0, 0.0]


@given(
    seed=st.integers(0, 10_000), shape=st.sampled_from([(3, 3), (4, 2), (5, 20)]), c=st.sampled_from([0.2, 0.4, 0.9])
)
def test_cagrad_is_no_worse_than_the_mean_where_rows_are_opposite_up_to_rounding(seed, shape, c):
    generator = torch.Generator().manual_seed(seed)
    J = torch.randn(shape, generator=generator)
    J[1] = -J[0] * (0.2 + 3 * torch.rand((), generator=generator))
    J = J.double()
    worst, mean = (J @ CAGrad(c)(J)).min(), (J @ J.mean(dim=0)).min()
    assert worst >= mean - 1e-12 * J.norm(dim=1).max() ** 2
