"""One sign kept in each coordinate."""

import copy
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.flatmtl.matrices import randn
from torch import Tensor
from torchjd import aggregation as torchjd

from flatmtl import _linalg
from flatmtl.aggregators.context import Context
from flatmtl.aggregators.graddrop import GradDrop, sign_purity

MATRICES = json.loads((Path(__file__).parents[2] / "golden" / "aggregators.json").read_text())["matrices"]


def of_tasks(*rows: int) -> Context:
    return Context(rows, torch.ones(len(rows), dtype=torch.float64))


def uniform(n: int, seed: int = 0) -> Tensor:
    """What an aggregator of this seed draws first."""
    return torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def naive(J: Tensor, U: Tensor, leak: list[float]) -> Tensor:
    """Entry by entry as in the paper."""
    d = torch.zeros_like(J[0])
    for k, u in enumerate(U.tolist()):
        column = J[:, k].tolist()
        size = sum(map(abs, column))
        P = 0.5 * (1.0 + sum(column) / size) if size else 0.5
        for g, share in zip(column, leak, strict=True):
            kept = (u < P and g > 0.0) or (u >= P and g < 0.0)
            d[k] += (share + (1.0 - share) * kept) * g
    return d


@pytest.mark.parametrize("entry", MATRICES, ids=[entry["id"] for entry in MATRICES])
def test_golden_purity(entry):
    P = sign_purity(torch.tensor(entry["G"], dtype=torch.float64))
    torch.testing.assert_close(P, torch.tensor(entry["ops"]["graddrop"]["P"], dtype=torch.float64), atol=1e-9, rtol=0.0)


def test_purity_is_exact_where_it_matters():
    """A sign that nobody has is never chosen, whatever is drawn."""
    column = randn(64, 1).abs()
    J = torch.cat([column, -column, torch.zeros_like(column), 1e-300 * column], dim=1)
    assert sign_purity(J).tolist() == [1.0, 0.0, 0.5, 1.0]


@pytest.mark.parametrize("leak", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("m", "n"), [(1, 4), (2, 9), (5, 30), (64, 20)])
def test_equals_choosing_entry_by_entry(m, n, leak):
    J = randn(m, n, seed=m)
    torch.testing.assert_close(GradDrop(leak=leak)(J), naive(J, uniform(n), [leak] * m))


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 6).flatmap(
        lambda m: st.lists(st.lists(st.integers(-3, 3), min_size=4, max_size=4), min_size=m, max_size=m)
    ),
    seed=st.integers(0, 1000),
)
def test_equals_choosing_entry_by_entry_for_any_integers(rows, seed):
    J = torch.tensor(rows, dtype=torch.float64)
    leak = [0.25 * (i % 5) for i in range(len(rows))]
    torch.testing.assert_close(GradDrop(leak=leak, seed=seed)(J), naive(J, uniform(4, seed), leak))


@pytest.mark.parametrize("leak", [0.0, 0.3])
def test_equals_the_peer_where_it_draws_the_same_numbers(leak, monkeypatch):
    J, U = randn(4, 50), uniform(50)
    d = GradDrop(leak=leak)(J)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: U)
    torch.testing.assert_close(d, torchjd.GradDrop(leak=torch.full((4,), leak, dtype=torch.float64))(J))


def test_each_coordinate_is_the_sum_of_its_positive_or_of_its_negative_entries():
    J, aggregator = randn(5, 40), GradDrop()
    above, below = J.clamp(min=0.0).sum(dim=0), J.clamp(max=0.0).sum(dim=0)
    for _ in range(10):
        d = aggregator(J)
        assert bool((torch.isclose(d, above) | torch.isclose(d, below)).all())


def test_the_positive_sign_is_chosen_as_often_as_the_purity_says():
    column = torch.tensor([[3.0], [-1.0], [-0.5]])
    d = GradDrop()(column.expand(-1, 100_000))
    assert float((d > 0.0).double().mean()) == pytest.approx(2.0 / 3.0, abs=0.0075)  # five standard errors


def test_without_conflict_nothing_is_dropped():
    J = randn(4, 9).abs()
    J[:, 3:6] *= -1.0
    torch.testing.assert_close(GradDrop()(J), J.sum(dim=0))


def test_a_whole_leak_is_the_sum():
    J = randn(4, 9)
    torch.testing.assert_close(GradDrop(leak=1.0)(J), J.sum(dim=0))


def test_equal_rows_give_their_sum():
    row = randn(9)
    torch.testing.assert_close(GradDrop()(row.expand(7, -1)), 7.0 * row)


def test_opposite_rows_give_one_sign_of_each_entry():
    row = randn(50)
    d = GradDrop()(torch.stack([row, -row]))
    torch.testing.assert_close(d.abs(), row.abs())
    assert 0 < int((d > 0.0).sum()) < 50


def test_zero_rows_change_nothing():
    J = randn(3, 20)
    zero = torch.zeros(1, 20, dtype=torch.float64)
    torch.testing.assert_close(GradDrop()(torch.cat([zero, J, zero])), GradDrop()(J))
    assert GradDrop()(zero).tolist() == [0.0] * 20


class TestLeakOfEachTask:
    def test_an_absent_task_takes_its_own_leak_with_it(self):
        J = randn(2, 30)
        found = GradDrop(leak=[0.1, 0.5, 0.9])(J, of_tasks(0, 2))
        torch.testing.assert_close(found, GradDrop(leak=[0.1, 0.9])(J))
        torch.testing.assert_close(found, naive(J, uniform(30), [0.1, 0.9]))

    @pytest.mark.parametrize(("rows", "context"), [(2, None), (4, None), (2, of_tasks(0, 3))])
    def test_a_leak_for_another_number_of_tasks(self, rows, context):
        with pytest.raises(
            ValueError, match=r"leak is for 3 tasks, but the rows are those of tasks \(.*Give one number"
        ):
            GradDrop(leak=[0.1, 0.2, 0.3])(randn(rows, 2), context)

    def test_one_leak_fits_any_tasks(self):
        J = randn(2, 30)
        torch.testing.assert_close(GradDrop(leak=0.2)(J, of_tasks(1, 7)), GradDrop(leak=0.2)(J))

    def test_the_leak_given_is_copied(self):
        given = [0.0, 1]
        aggregator = GradDrop(leak=given)
        given[0] = 0.5
        assert repr(aggregator) == "GradDrop(leak=(0.0, 1.0), seed=0)"


@pytest.mark.parametrize("leak", [-0.1, 1.5, float("nan"), [0.0, 2.0], [float("nan")]])
def test_a_leak_that_is_no_share(leak):
    with pytest.raises(ValueError, match=r"leak must be between 0 and 1, got .*leak=0 drops entries"):
        GradDrop(leak=leak)


@pytest.mark.parametrize("aggregator", [GradDrop(), GradDrop(0.25, seed=3), GradDrop([0.5, 0.125])], ids=repr)
def test_printed_form_builds_it_again(aggregator):
    assert repr(eval(repr(aggregator))) == repr(aggregator)


class TestBlocks:
    @pytest.mark.parametrize("entries", [1, 7, 64, 1000])
    def test_draws_do_not_depend_on_the_size_of_the_blocks(self, entries, monkeypatch):
        """So they do not on the device either, which has blocks of its own."""
        J = randn(3, 501)
        whole = GradDrop()(J)
        monkeypatch.setattr(_linalg, "BLOCK_IN_CACHE", entries)
        assert torch.equal(GradDrop()(J), whole)

    def test_more_parameters_than_fit_one_block(self):
        n = _linalg.BLOCK_IN_CACHE + 3
        J = randn(2, n)
        U = uniform(n)
        P = 0.5 * (1.0 + J.sum(dim=0) / J.abs().sum(dim=0))
        expected = torch.where(U < P, J.clamp(min=0.0), J.clamp(max=0.0)).sum(dim=0)
        torch.testing.assert_close(GradDrop()(J), expected)


class TestDtypes:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_narrow_rows_are_rounded_once(self, dtype):
        J = randn(7, 60).to(dtype)
        d = GradDrop(leak=0.2)(J)
        assert d.dtype == dtype
        torch.testing.assert_close(d, GradDrop(leak=0.2)(J.double()).to(dtype), rtol=0.0, atol=0.0)

    def test_the_largest_float16_is_finite(self):
        J = torch.tensor([[65504.0, -65504.0], [0.0, 0.0]], dtype=torch.float16)
        assert GradDrop()(J).tolist() == [65504.0, -65504.0]

    @pytest.mark.parametrize("scale", [2.0**-600, 1e-150, 1e-12, 1e12, 1e150])
    def test_scale(self, scale):
        J = randn(5, 40)
        torch.testing.assert_close(GradDrop(leak=0.1)(scale * J) / scale, GradDrop(leak=0.1)(J), rtol=1e-12, atol=0.0)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    def test_rows_that_are_not_finite_are_named_and_cost_no_draw(self, dtype, bad):
        J, aggregator = randn(4, 9).to(dtype), GradDrop()
        J[1, 2] = J[3, 0] = bad
        with pytest.raises(ValueError, match=r"task gradients \[1, 3\] \(rows, from 0\) are not finite"):
            aggregator(J)
        assert torch.equal(aggregator(J[[0, 2]]), GradDrop()(J[[0, 2]]))


def test_equal_seeds_draw_alike_and_calls_differ():
    J, first, second, other = randn(4, 60), GradDrop(seed=3), GradDrop(seed=3), GradDrop(seed=4)
    directions = [first(J) for _ in range(3)]
    assert all(torch.equal(second(J), d) for d in directions)
    assert not torch.equal(directions[0], directions[1])
    assert not torch.equal(other(J), directions[0])


def test_it_goes_on_exactly_after_a_resume():
    J, aggregator = randn(5, 30), GradDrop(seed=1)
    aggregator(J)
    state, twin = copy.deepcopy(aggregator.state_dict()), copy.deepcopy(aggregator)
    expected = [aggregator(J) for _ in range(3)]
    resumed = GradDrop(seed=9)
    resumed.load_state_dict(state)
    for d in expected:
        assert torch.equal(resumed(J), d)
        assert torch.equal(twin(J), d)


def test_input_and_global_random_state_are_left_alone():
    J = randn(5, 30)
    before, state = J.clone(), torch.get_rng_state()
    GradDrop(leak=0.5)(J)
    assert torch.equal(J, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_no_parameters_give_an_empty_direction():
    assert GradDrop()(torch.zeros(3, 0)).shape == (0,)
