"""A model under fully_shard on several ranks does what one process does with the batches of all of them."""

from functools import partial

import pytest
import torch
from tests.flatmtl import sharded
from tests.flatmtl.sharded import Plan, Sharding, train
from tests.flatmtl.team import Batch, Failed, Team
from tests.flatmtl.toys import aggregator
from torch import nn

from flatmtl import ASAM, SAM, FlatMTL
from flatmtl.aggregators import AGGREGATORS

EXACT = {"rtol": 1e-9, "atol": 1e-12}
PERTURBATIONS = {"plain": None, "sam": SAM(0.05), "asam": ASAM(0.5)}
WHOLE, BLOCKS = Sharding(), Sharding(blocks=True)
SHARDINGS = [Sharding(blocks, reshard) for blocks in (False, True) for reshard in (None, True, False)]
SHARDINGS += [Sharding(reshard_after_backward=False), Sharding(True, False, False)]


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    team = Team(tmp_path_factory.mktemp("team"))
    yield team
    team.close()


def make(name, perturbation, **options):
    made = largest_of_each if name == "a function" else aggregator(name)
    return FlatMTL(made, PERTURBATIONS.get(perturbation, perturbation), **options)


def largest_of_each(J):
    """A function of whole rows that treats entries by their place."""
    return J.max(dim=0).values * torch.linspace(0.5, 1.5, J.shape[1], dtype=J.dtype)


flat = partial(make, "cagrad", "sam")


def run(team, size, *arguments):
    found = team.run(size, *arguments)
    assert not any(isinstance(one, Failed) for one in found), found[0]
    return found


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, equal_nan=True, **EXACT)


def assert_bits(found, expected):
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=0.0, atol=0.0)


def check(team, plan, sharding=WHOLE):
    """All ranks come bit for bit to the same, and to what one process comes to with the closures of all of them."""
    ranks = run(team, len(plan.batches), train, plan, sharding)
    for other in ranks[1:]:
        assert_bits(other, ranks[0])
    alone = train(None, 0, plan._replace(batches=[[batch for some in plan.batches for batch in some]]))
    if ranks[0]["gramian_loss"] is None:  # a sum of losses by one pass has none
        alone |= {"gramian_loss": None, "intra": None}
    assert_same(ranks[0], alone)


HALVES = [[Batch(0, 12)], [Batch(12, 24)]]
THIRDS = [[Batch(0, 8)], [Batch(8, 16)], [Batch(16, 24)]]


class TestEquality:
    @pytest.mark.parametrize("perturbation", PERTURBATIONS)
    @pytest.mark.parametrize("name", [*AGGREGATORS, "a function"])
    def test_two_ranks_equal_one_process(self, team, name, perturbation):
        check(team, Plan(partial(make, name, perturbation), HALVES, steps=2), BLOCKS)

    @pytest.mark.parametrize("name", [*AGGREGATORS, "a function"])
    def test_three_ranks_some_with_empty_shards_equal_one_process(self, team, name):
        check(team, Plan(partial(make, name, "asam"), THIRDS, steps=2))

    @pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
    def test_five_steps_of_training_however_it_is_sharded(self, team, sharding):
        check(team, Plan(flat, THIRDS, steps=5), sharding)

    @pytest.mark.parametrize("sharding", [WHOLE, SHARDINGS[-1]], ids=str)
    @pytest.mark.parametrize("name", ["graddrop", "uw", "famo"])
    def test_five_steps_of_training_of_other_kinds(self, team, name, sharding):
        check(team, Plan(partial(make, name, "sam"), THIRDS, steps=5), sharding)

    @pytest.mark.parametrize("combine", ["individual", "direct", "second", "each"])
    @pytest.mark.parametrize("name", ["fairgrad", "graddrop"])
    def test_every_way_to_combine(self, team, name, combine):
        check(team, Plan(partial(make, name, "sam", combine=combine), HALVES, steps=2))

    @pytest.mark.parametrize("name", ["cagrad", "uw"])
    @pytest.mark.parametrize("local", [0.0, 0.5])
    def test_common_perturbations(self, team, name, local):
        check(team, Plan(partial(make, name, SAM(0.05, local=local, norm="joint")), HALVES, steps=2))

    @pytest.mark.parametrize("name", ["cagrad", "ls", "famo"])
    def test_micro_batches(self, team, name):
        batches = [[Batch(0, 4), Batch(4, 12)], [Batch(12, 20), Batch(20, 24)]]
        check(team, Plan(partial(make, name, "sam"), batches, steps=2), BLOCKS)

    @pytest.mark.parametrize("name", ["cagrad", "ls"])
    def test_tasks_that_no_rank_has(self, team, name):
        tasks = ("left", "third")
        check(team, Plan(partial(make, name, "sam"), [[Batch(0, 12, tasks)], [Batch(12, 24, tasks)]]), BLOCKS)

    def test_two_ranks_equal_one_process_on_the_whole_batch(self, team):
        plan = Plan(flat, HALVES)
        alone = train(None, 0, plan._replace(batches=[[Batch(0, 24)]]))
        assert_same(run(team, 2, train, plan, WHOLE)[0]["gradients"], alone["gradients"])

    def test_a_single_rank_equals_one_process(self, team):
        check(team, Plan(flat, [[Batch(0, 24)]], steps=3), BLOCKS)

    @pytest.mark.parametrize("dropout", [0.0, 0.5])
    def test_dropout_and_batch_norm_of_each_rank_are_those_of_ranks_that_are_not_sharded(self, team, dropout):
        plan = Plan(flat, HALVES, steps=2, norm=nn.BatchNorm1d, dropout=dropout)
        for found, expected in zip(run(team, 2, train, plan, BLOCKS), run(team, 2, train, plan), strict=True):
            assert_same(found, expected)

    @pytest.mark.parametrize("perturbation", PERTURBATIONS)
    @pytest.mark.parametrize("scale", [1e-200, 1e150])
    def test_losses_of_any_size_where_ranks_hold_nothing(self, team, scale, perturbation):
        step = partial(make, "mgda", perturbation)
        assert_same(run(team, 3, sharded.small, step, WHOLE, scale)[0], sharded.small(None, 0, step, None, scale))


class TestOneStep:
    def test_it_adds_to_what_is_there_and_runs_hooks_once(self, team):
        for found in run(team, 2, sharded.adds, flat):
            assert found["same"]
            assert_same(found["difference"], found["fresh"])
            assert found["ran"] == ["trunk"]
            assert found["stranger"] == 5.0

    def test_weights_are_the_same_bit_for_bit_and_listed_as_shards(self, team):
        for found in run(team, 2, sharded.adds, flat):
            assert found["after"]["kinds"] == found["before"]["kinds"]
            assert_bits(found["after"]["weights"], found["before"]["weights"])

    def test_rows_and_places_take_the_memory_of_shards(self, team):
        found = run(team, 2, sharded.memory, flat)
        assert sum(shard for _, shard, _ in found) == found[0][2]
        assert all(entries == (3 + 2) * shard for entries, shard, _ in found)

    @pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
    @pytest.mark.parametrize(
        ("where", "call"), [("closure", 1), ("forward", 1), ("backward", 1), ("forward", 3), ("backward", 3)]
    )
    def test_one_that_fails_leaves_all_as_before(self, team, sharding, where, call):
        plan = Plan(flat, HALVES, norm=nn.BatchNorm1d)
        expected = list(run(team, 2, train, plan, sharding)[0]["gradients"].values())
        for found in run(team, 2, sharded.fails, flat, sharding, where, call):
            assert "spoilt" in found["error"]
            assert found["after"].pop("kinds") == found["before"].pop("kinds")
            assert_bits(found["after"], found["before"])
            assert_same(found["next"], expected)

    def test_a_failed_backward_pass_that_cannot_be_forgotten_ends_the_training(self, team):
        for found in team.run(2, sharded.fails_without_reset, flat):
            assert "Make the model again from a checkpoint" in found.message

    def test_a_copy_of_what_has_done_a_step_does_the_same(self, team):
        expected = list(run(team, 2, train, Plan(flat, HALVES), WHOLE)[0]["gradients"].values())
        assert_same(run(team, 2, sharded.copies, flat)[0], expected)

    def test_all_ranks_run_the_same_passes_though_one_draws_more_random_numbers(self, team):
        expected = list(run(team, 2, train, Plan(flat, HALVES), WHOLE)[0]["gradients"].values())
        assert_same(run(team, 2, sharded.draws, flat)[0], expected)

    @pytest.mark.parametrize("name", ["cagrad", "ls"])
    def test_ranks_with_different_tasks_all_say_so(self, team, name):
        plan = Plan(partial(make, name, "sam"), [[Batch(0, 12)], [Batch(12, 24, ("left",))]])
        for found in team.run(2, train, plan, WHOLE):
            assert found.kind == "Disagreement"
            assert "the model is sharded, so all ranks must have the same tasks" in found.message

    def test_an_overflow_on_one_rank_skips_on_all(self, team):
        for gradients in run(team, 2, sharded.overflows, flat):
            assert all(bool(g.isinf().all()) for g in gradients)

    @pytest.mark.parametrize("name", ["cagrad", "ls"])
    def test_a_task_that_is_not_finite_on_one_rank_is_dropped_on_all(self, team, name):
        step = partial(make, name, "sam", on_nonfinite="drop_task")
        assert run(team, 2, sharded.drops, step) == [("right",)] * 2


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_parameters_are_split_as_in_one_process(team, sharding):
    expected = sharded.split(None, 0, None)
    assert run(team, 2, sharded.split, sharding) == [expected] * 2


REFUSED = {
    "another kind": "a DTensor that fully_shard did not make",
    "two axes": "on a mesh of 2 axes",
    "two meshes": "on another mesh than the shared parameters",
    "a part": r"parameter 'heads.left.weight' is not sharded, though the model is",
    "gathered": r"'shared \[0\]' is not sharded.* or it is the copy that a forward pass gathered",
    "no model": r"Pass TaskParameters\(shared, heads, model\)",
    "divide factor": "set_gradient_divide_factor",
    "no sync": "pass a list of closures",
    "another group": "process_group is not that of the mesh",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_understood_is_refused_by_name(team, what):
    for found in team.run(2, sharded.refused, flat, what):
        assert found.kind == "ValueError", found
        with pytest.raises(ValueError, match=REFUSED[what]):
            raise ValueError(found.message)


def test_perturbing_by_rank_is_refused(team):
    for found in team.run(2, train, Plan(partial(make, "cagrad", SAM(0.05, scope="rank")), HALVES), WHOLE):
        assert found.kind == "ValueError"
        assert "its backward pass averages them" in found.message
