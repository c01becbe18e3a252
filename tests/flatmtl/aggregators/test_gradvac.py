"""Task gradients turned towards each other until their cosines reach the targets."""

import copy
import itertools

import pytest
import torch
from tests.flatmtl.matrices import randn
from torch import Tensor
from torchjd import aggregation as torchjd

from flatmtl.aggregators.context import Context
from flatmtl.aggregators.gradvac import GradVac
from flatmtl.aggregators.pcgrad import PCGrad


def of_tasks(*rows: int) -> Context:
    return Context(rows, torch.ones(len(rows), dtype=torch.float64))


def correlated(m: int, n: int, step: int) -> Tensor:
    """Rows that mostly agree, so that targets become positive, and at times do not."""
    return randn(m, n, seed=step) + (1.5 if step % 3 else -0.2) * randn(1, n, seed=100 + step)


def orders_of(aggregator: GradVac, m: int) -> list[list[int]]:
    """The orders that the next call will draw."""
    return copy.deepcopy(aggregator)._orders(m).tolist()


def vaccine(J: Tensor, targets: dict, order: list[list[int]], tasks: tuple[int, ...], beta: float) -> Tensor:
    """One call, vector by vector as in the paper; updates ``targets`` of pairs of tasks."""
    turned = J.clone()
    for i, others in enumerate(order):
        for j in others:
            x, g, pair = turned[i], J[j], (tasks[i], tasks[j])
            if x.norm() <= 1e-7 * J[i].norm() or g.norm() == 0.0:
                continue
            target, cosine = targets.get(pair, 0.0), float((x @ g / x.norm() / g.norm()).clamp(-1.0, 1.0))
            if cosine < target:
                own, wanted = (1.0 - cosine**2) ** 0.5, (1.0 - target**2) ** 0.5
                turned[i] = x + x.norm() * (target * own - cosine * wanted) / (g.norm() * wanted) * g
            targets[pair] = (1.0 - beta) * target + beta * cosine
    return turned.sum(dim=0)


def assert_close(actual: Tensor, expected: Tensor, size: float, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual / size, expected / size, atol=tolerance, rtol=0.0)


@pytest.mark.parametrize("beta", [0.01, 0.5, 0.9])
@pytest.mark.parametrize(("m", "n"), [(1, 3), (2, 5), (3, 9), (5, 20), (16, 40), (64, 100)])
def test_equals_turning_vector_by_vector(m, n, beta):
    aggregator, targets = GradVac(beta=beta), {}
    for step in range(4 if m > 16 else 8):
        J = correlated(m, n, step)
        order = orders_of(aggregator, m)
        expected = vaccine(J, targets, order, tuple(range(m)), beta)
        assert_close(aggregator(J), expected, size=float(expected.norm()))  # may be far longer than the rows
    for (i, j), target in targets.items():
        assert float(aggregator.state_dict()["targets"][i, j]) == pytest.approx(target, abs=1e-9)


@pytest.mark.parametrize(("m", "n"), [(2, 5), (4, 9), (10, 30)])
def test_equals_the_peer_where_it_draws_the_same_orders(m, n, monkeypatch):
    ours, peer = GradVac(beta=0.5), torchjd.GradVac(beta=0.5, eps=0.0)
    for step in range(6):
        J = correlated(m, n, step)
        drawn = iter([[j - (j > i) for j in others] for i, others in enumerate(orders_of(ours, m))])
        with monkeypatch.context() as patch:
            patch.setattr(torch, "randperm", lambda _, drawn=drawn: torch.tensor(next(drawn)))
            expected = peer(J)
        assert_close(ours(J), expected, size=float(J.norm()))


def test_two_calls_by_hand():
    """Cosine 0.6 is above the target 0, which becomes 0.3; cosine 0 is then turned to 0.3, and the target to 0.15."""
    aggregator = GradVac(beta=0.5)
    agreeing = torch.tensor([[1.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    assert aggregator(agreeing).tolist() == pytest.approx([4.0, 4.0])
    assert aggregator.state_dict()["targets"].tolist() == [[0.0, pytest.approx(0.3)], [pytest.approx(0.3), 0.0]]
    orthogonal = torch.tensor([[2.0, 0.0], [0.0, 5.0]], dtype=torch.float64)
    d = aggregator(orthogonal)
    tangent = 0.3 / 0.91**0.5  # the first becomes (2, 2 tangent)
    assert d.tolist() == pytest.approx([2.0 + 5.0 * tangent, 5.0 + 2.0 * tangent])
    assert aggregator.state_dict()["targets"].tolist() == [[0.0, pytest.approx(0.15)], [pytest.approx(0.15), 0.0]]


def test_turning_reaches_the_target_and_keeps_what_is_orthogonal():
    aggregator = GradVac(beta=0.5)
    aggregator.load_state_dict({**aggregator.state_dict(), "targets": torch.tensor([[0.0, 0.4], [-1.0, 0.0]])})
    J = torch.tensor([[3.0, 0.0], [-1.0, 2.0]], dtype=torch.float64)
    x = aggregator(J) - J[1]  # the second row is left alone by its target
    assert float(x @ J[1] / x.norm() / J[1].norm()) == pytest.approx(0.4)
    across = torch.tensor([2.0, 1.0], dtype=torch.float64)  # orthogonal to the second row
    assert float(x @ across) == pytest.approx(float(J[0] @ across))


def test_targets_belong_to_ordered_pairs():
    aggregator = GradVac(beta=0.5)
    for step in range(5):
        aggregator(correlated(4, 9, step))
    targets = aggregator.state_dict()["targets"]
    assert not torch.allclose(targets, targets.T)
    assert targets.diagonal().tolist() == [0.0] * 4


def test_targets_follow_every_cosine_also_those_above_them():
    aggregator = GradVac(beta=0.1)
    aggregator(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    assert float(aggregator.state_dict()["targets"][0, 1]) == pytest.approx(0.1 * 0.5**0.5)


@pytest.mark.parametrize("m", [1, 2, 3, 8, 40])
def test_the_first_call_and_all_calls_without_memory_are_gradient_surgery(m):
    surgery, first, never = PCGrad(seed=3), GradVac(seed=3), GradVac(beta=0.0, seed=3)
    for step in range(3):
        J = randn(m, 2 * m, seed=step)
        expected = surgery(J)
        assert_close(never(J), expected, size=float(J.norm()))
        if step == 0:
            assert_close(first(J), expected, size=float(J.norm()))


class TestAbsentTasks:
    def test_targets_of_absent_tasks_stay_and_those_of_present_ones_are_theirs(self):
        aggregator, targets = GradVac(beta=0.3), {}
        for step, tasks in enumerate([(0, 1, 2, 3), (1, 3), (0, 2, 3), (2,), (0, 1, 2, 3), (3, 5), (0, 5), (1, 2, 4)]):
            J = correlated(6, 9, step)[list(tasks)]
            order = orders_of(aggregator, len(tasks))
            before = aggregator.state_dict()["targets"]
            expected = vaccine(J, targets, order, tasks, beta=0.3)
            assert_close(aggregator(J, of_tasks(*tasks)), expected, size=float(J.norm()))
            after = aggregator.state_dict()["targets"]
            for i, j in itertools.product(range(len(before)), repeat=2):
                if i not in tasks or j not in tasks:
                    assert after[i, j] == before[i, j]

    def test_the_state_grows_with_the_highest_task_seen(self):
        aggregator = GradVac(beta=0.5)
        sizes = []
        for tasks in [(0, 1), (1, 4), (0, 2)]:
            aggregator(randn(len(tasks), 3), of_tasks(*tasks))
            sizes.append(tuple(aggregator.state_dict()["targets"].shape))
        assert sizes == [(2, 2), (5, 5), (5, 5)]

    def test_a_task_that_comes_late_starts_at_zero(self):
        aggregator = GradVac(beta=0.5)
        aggregator(correlated(2, 5, 1))
        before = aggregator.state_dict()["targets"]
        aggregator(randn(1, 5), of_tasks(3))
        after = aggregator.state_dict()["targets"]
        assert torch.equal(after[:2, :2], before)
        assert float(after[2:].abs().max()) == float(after[:, 2:].abs().max()) == 0.0


class TestZeros:
    def test_zero_rows_take_no_part(self):
        aggregator, without = GradVac(beta=0.5), GradVac(beta=0.5)
        for step in range(4):
            J = correlated(2, 6, step)
            with_zero = torch.cat([J[:1], torch.zeros(1, 6, dtype=torch.float64), J[1:]])
            assert_close(aggregator(with_zero), without(J), size=float(J.norm()))
        targets = aggregator.state_dict()["targets"]
        assert float(targets[1].abs().max()) == float(targets[:, 1].abs().max()) == 0.0
        torch.testing.assert_close(targets[[0, 2]][:, [0, 2]], without.state_dict()["targets"])

    def test_a_row_projected_to_nothing_takes_no_further_part(self):
        """It is opposite to another: at cosine 0 nothing is left of it but rounding, whose cosines say nothing."""
        aggregator = GradVac(beta=0.5)
        row = randn(30)
        J = torch.stack([row, -0.3 * row, randn(30, seed=1)])
        order = orders_of(aggregator, 3)
        expected = vaccine(J, targets := {}, order, (0, 1, 2), beta=0.5)
        assert_close(aggregator(J), expected, size=float(J.norm()))
        for pair in itertools.permutations(range(3), 2):
            assert float(aggregator.state_dict()["targets"][pair]) == pytest.approx(targets.get(pair, 0.0), abs=1e-9)

    def test_opposite_rows_cancel(self):
        row = randn(5)
        assert float(GradVac()(torch.stack([row, -row])).norm()) <= 1e-15

    def test_no_gradients_at_all(self):
        aggregator = GradVac(beta=0.5)
        assert aggregator(torch.zeros(3, 4)).tolist() == [0.0] * 4
        assert float(aggregator.state_dict()["targets"].abs().max()) == 0.0


class TestTargetsNearOne:
    @pytest.mark.parametrize("beta", [0.01, 0.5, 1.0])
    def test_equal_rows_stay_as_they_are_for_ever(self, beta):
        aggregator, rows = GradVac(beta=beta), randn(1, 7)
        J = torch.cat([rows, 3.0 * rows, 0.1 * rows])
        for _ in range(2000 if beta == 0.01 else 100):
            d = aggregator(J)
        assert_close(d, J.sum(dim=0), size=float(J.norm()))

    def test_a_target_of_one_is_approached_and_not_divided_by(self):
        aggregator = GradVac(beta=1.0)
        row = randn(2, 5)
        aggregator(row[:1].expand(2, -1))
        assert bool(torch.isfinite(aggregator(row)).all())


def test_each_task_has_an_order_of_its_own_and_all_occur():
    aggregator = GradVac(seed=1)
    drawn = [aggregator._orders(4).tolist() for _ in range(200)]
    for order in drawn:
        for i, others in enumerate(order):
            assert sorted(others) == [j for j in range(4) if j != i]
    assert {tuple(order[2]) for order in drawn} == set(itertools.permutations([0, 1, 3]))


def test_it_goes_on_exactly_after_a_resume():
    aggregator = GradVac(beta=0.3, seed=4)
    for step in range(3):
        aggregator(correlated(5, 9, step))
    state = copy.deepcopy(aggregator.state_dict())
    resumed = GradVac(beta=0.3, seed=8)
    resumed.load_state_dict(state)
    for step in range(3, 6):
        assert torch.equal(resumed(correlated(5, 9, step)), aggregator(correlated(5, 9, step)))
    assert torch.equal(resumed.state_dict()["targets"], aggregator.state_dict()["targets"])


def test_states_are_copies():
    aggregator = GradVac(beta=0.5)
    aggregator(correlated(3, 5, 1))
    state = aggregator.state_dict()
    before, resumed = state["targets"].clone(), GradVac(beta=0.5)
    resumed.load_state_dict(state)
    aggregator(correlated(3, 5, 2))
    resumed(correlated(3, 5, 3))
    assert torch.equal(state["targets"], before)


def test_a_state_without_targets_is_refused():
    with pytest.raises(ValueError, match=r"the state has \['generator'\]; GradVac expects \['generator', 'targets'\]"):
        GradVac().load_state_dict(PCGrad().state_dict())


@pytest.mark.parametrize("scale", [1e-150, 1e-30, 1e-12, 1e12, 1e150])
def test_scale(scale):
    scaled, plain = GradVac(beta=0.5), GradVac(beta=0.5)
    for step in range(4):
        J = correlated(5, 9, step)
        assert_close(scaled(scale * J) / scale, plain(J), size=float(J.norm()), tolerance=1e-12)


def test_targets_do_not_depend_on_the_scale_of_one_task():
    scaled, plain = GradVac(beta=0.5), GradVac(beta=0.5)
    factors = torch.tensor([1.0, 1e-8, 1e8], dtype=torch.float64)[:, None]
    for step in range(4):
        scaled(factors * correlated(3, 9, step))
        plain(correlated(3, 9, step))
    torch.testing.assert_close(scaled.state_dict()["targets"], plain.state_dict()["targets"])


def test_narrow_rows_are_rounded_once():
    narrow, exact = GradVac(beta=0.5), GradVac(beta=0.5)
    for step in range(4):
        J = correlated(4, 30, step).bfloat16()
        d, expected = narrow(J), exact(J.double())
        assert d.dtype == torch.bfloat16
        assert_close(d.double(), expected, size=float(expected.abs().max()), tolerance=4e-3)


@pytest.mark.parametrize("beta", [-0.1, 1.1, float("nan")])
def test_a_beta_that_is_no_share(beta):
    with pytest.raises(ValueError, match=rf"beta must be between 0 and 1, got {beta}\. beta=0 is PCGrad"):
        GradVac(beta=beta)


def test_rows_that_are_not_finite_change_no_state():
    aggregator = GradVac(beta=0.5)
    aggregator(correlated(3, 5, 1))
    before = copy.deepcopy(aggregator.state_dict())
    with pytest.raises(ValueError, match=r"task gradients \[1\] \(rows, from 0\) are not finite"):
        aggregator(torch.tensor([[1.0], [torch.nan], [2.0]]))
    assert all(torch.equal(before[key], value) for key, value in aggregator.state_dict().items())
