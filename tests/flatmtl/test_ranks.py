"""Several ranks that train together do what one process does with the closures of all of them."""

from functools import partial

import pytest
import torch
from tests.flatmtl.jobs import (
    Draws,
    DrawsForLosses,
    begin_apart,
    differ,
    fail,
    freeze_another,
    make_drawing,
    make_random,
    outside,
    overflow,
    record,
    split_otherwise,
    spoil,
    spoil_alone,
    step_with,
    step_within_a_step,
    take_turns_with_backward,
    with_mixed_precision,
    with_scales,
)
from tests.flatmtl.team import TASKS, Batch, Failed, Net, Plan, SyncedNorm, Team, closure_of, mean_of, train
from tests.flatmtl.toys import aggregator
from torch import nn

from flatmtl import ASAM, SAM, FlatMTL, TaskParameters, split_parameters
from flatmtl.aggregators import AGGREGATORS, MGDA, Mean

EXACT = {"rtol": 1e-9, "atol": 1e-12}
PERTURBATIONS = {"plain": None, "sam": SAM(0.05), "asam": ASAM(0.5)}


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    team = Team(tmp_path_factory.mktemp("team"))
    yield team
    team.close()


def make(name, perturbation, group, **options):
    return FlatMTL(aggregator(name), PERTURBATIONS.get(perturbation, perturbation), process_group=group, **options)


def alone(plan):
    """Return what one process comes to with the closures of all ranks, in their order."""
    return train(None, 0, plan._replace(batches=[[batch for some in plan.batches for batch in some]]))


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, equal_nan=True, **EXACT)


def check(team, plan):
    """All ranks hold bit for bit the same, and what one process holds."""
    ranks = team.run(len(plan.batches), train, plan)
    assert not any(isinstance(found, Failed) for found in ranks), ranks
    for other in ranks[1:]:
        torch.testing.assert_close(other["gradients"], ranks[0]["gradients"], rtol=0.0, atol=0.0)
        torch.testing.assert_close(other["state"], ranks[0]["state"], rtol=0.0, atol=0.0)
    found, expected = ranks[0], alone(plan)
    if found["gramian_loss"] is None or expected["gramian_loss"] is None:  # a sum of losses by one pass has none
        found, expected = (
            {k: v for k, v in x.items() if k not in ("gramian_loss", "intra")} for x in (found, expected)
        )
    assert_same(found, expected)
    return ranks


def parameters_of(net, model):
    return TaskParameters(net.trunk.parameters(), {t: net.heads[t].parameters() for t in TASKS}, model)


def assert_disagree(ranks, words):
    for found in ranks:
        assert found.kind == "Disagreement"
        assert words in found.message


HALVES = [[Batch(0, 12)], [Batch(12, 24)]]
THIRDS = [[Batch(0, 8)], [Batch(8, 16)], [Batch(16, 24)]]


class TestEquality:
    @pytest.mark.parametrize("perturbation", PERTURBATIONS)
    @pytest.mark.parametrize("name", AGGREGATORS)
    def test_two_ranks_equal_one_process(self, team, name, perturbation):
        check(team, Plan(partial(make, name, perturbation), HALVES, steps=3))

    @pytest.mark.parametrize("perturbation", PERTURBATIONS)
    @pytest.mark.parametrize("name", AGGREGATORS)
    def test_three_ranks_equal_one_process(self, team, name, perturbation):
        check(team, Plan(partial(make, name, perturbation), THIRDS, steps=2))

    @pytest.mark.parametrize("combine", ["individual", "direct", "second", "each"])
    def test_every_way_to_combine(self, team, combine):
        check(team, Plan(partial(make, "fairgrad", "sam", combine=combine), HALVES, steps=2))

    @pytest.mark.parametrize("name", ["cagrad", "uw"])
    @pytest.mark.parametrize("local", [0.0, 0.5])
    def test_common_perturbations(self, team, name, local):
        check(team, Plan(partial(make, name, SAM(0.05, local=local, norm="joint")), HALVES, steps=2))

    @pytest.mark.parametrize("name", ["cagrad", "ls", "famo"])
    def test_micro_batches_of_unequal_number(self, team, name):
        batches = [[Batch(0, 4), Batch(4, 8), Batch(8, 12)], [Batch(12, 24)]]
        check(team, Plan(partial(make, name, "sam"), batches, steps=2))

    def test_two_ranks_equal_one_process_on_the_whole_batch(self, team):
        """Halves of one size: the mean of their means is the mean of the whole."""
        plan = Plan(partial(make, "cagrad", "sam"), HALVES)
        whole = train(None, 0, plan._replace(batches=[[Batch(0, 24)]]))
        assert_same(team.run(2, train, plan)[0]["gradients"], whole["gradients"])

    def test_a_group_of_one_is_one_process_bit_for_bit(self, team):
        plan = Plan(partial(make, "cagrad", "sam"), [[Batch(0, 24)]], steps=3)
        assert_exactly = partial(torch.testing.assert_close, rtol=0.0, atol=0.0)
        assert_exactly(team.run(1, train, plan)[0]["state"], alone(plan)["state"])


class TestTasksOnSomeRanks:
    """Rows and heads are means over the closures that have the task, wherever they are."""

    @pytest.mark.parametrize("perturbation", PERTURBATIONS)
    @pytest.mark.parametrize("name", ["cagrad", "pcgrad", "ls", "uw", "famo"])
    def test_each_rank_has_a_task_of_its_own(self, team, name, perturbation):
        batches = [[Batch(0, 12, ("left", "right"))], [Batch(12, 24, ("right", "third"))]]
        check(team, Plan(partial(make, name, perturbation), batches, steps=3))

    @pytest.mark.parametrize("name", ["cagrad", "ls"])
    def test_a_rank_without_labels(self, team, name):
        check(team, Plan(partial(make, name, "sam"), [[Batch(0, 12)], [Batch(12, 24, ())]], steps=2))

    @pytest.mark.parametrize("name", ["cagrad", "ls"])
    def test_a_head_that_no_rank_has_data_for_keeps_no_gradient(self, team, name):
        tasks = ("left", "third")
        ranks = check(team, Plan(partial(make, name, "asam"), [[Batch(0, 12, tasks)], [Batch(12, 24, tasks)]]))
        assert all(found["gradients"]["heads.right.weight"] is None for found in ranks)

    def test_tasks_in_some_micro_batches(self, team):
        batches = [
            [Batch(0, 6, ("left",)), Batch(6, 12, ("right",))],
            [Batch(12, 16, ("third", "left")), Batch(16, 20), Batch(20, 24, ())],
        ]
        check(team, Plan(partial(make, "nash_mtl", "sam"), batches, steps=2))

    def test_no_rank_has_any(self, team):
        ranks = team.run(2, train, Plan(partial(make, "cagrad", "sam"), [[Batch(0, 12, ())], [Batch(12, 24, ())]]))
        assert all(found["skipped"] for found in ranks)


FLAGS = {
    "as it is": {},
    "static_graph": {"static_graph": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
}


class TestWrapper:
    @pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
    def test_its_flags_do_not_matter(self, team, flags):
        batches = [[Batch(0, 12, ("left", "right"))], [Batch(12, 24, ("right", "third"))]]
        check(team, Plan(partial(make, "cagrad", "sam"), batches, steps=3, wrapper=flags))

    def test_ordinary_backward_passes_in_between_are_averaged_as_ever(self, team):
        for flags in FLAGS.values():
            for found in team.run(2, take_turns_with_backward, flags):
                assert not isinstance(found, Failed), found
                for mixed, plain in found:
                    torch.testing.assert_close(mixed, plain, **EXACT)

    def test_each_step_begins_with_the_buffers_of_the_first_rank(self, team):
        plan = Plan(partial(make, "cagrad", "sam"), HALVES, steps=2, norm=nn.BatchNorm1d, wrapper={})
        for rank, found in enumerate(team.run(2, train, plan)):
            model, forward = Net(nn.BatchNorm1d), []
            model.load_state_dict(found["state"])
            model.trunk[1].reset_running_stats()
            torch.manual_seed(0)
            for number, batch in enumerate([HALVES[0][0], HALVES[rank][0]]):
                weights = found["weights"][number]
                model.load_state_dict({**model.state_dict(), **weights})
                forward.append(closure_of(model, batch, number)(TASKS))
            assert_same(found["state"]["trunk.1.running_mean"], model.trunk[1].running_mean)
            assert_same(found["state"]["trunk.1.running_var"], model.trunk[1].running_var)

    def test_a_step_within_a_step_leaves_the_wrapper_to_the_outer_one(self, team):
        for found in team.run(2, step_within_a_step, make):
            assert found == [True, True]


class TestSyncedNorms:
    """Layers that talk to each other within a pass."""

    @pytest.mark.parametrize("name", ["cagrad", "ls"])
    def test_two_ranks_equal_one_process_on_the_whole_batch(self, team, name):
        plan = Plan(partial(make, name, "sam"), HALVES, norm=SyncedNorm)
        whole = train(None, 0, plan._replace(batches=[[Batch(0, 24)]]))
        for found in team.run(2, train, plan):
            assert_same(found["gradients"], whole["gradients"])

    @pytest.mark.parametrize("name", ["cagrad", "ls"])
    @pytest.mark.parametrize(
        "batches",
        [
            [[Batch(0, 12, ("left", "right"))], [Batch(12, 24, ("right", "third"))]],
            [[Batch(0, 12)], [Batch(12, 24, ())]],
        ],
        ids=["other tasks", "no labels"],
    )
    def test_other_tasks_are_refused_on_every_rank(self, team, name, batches):
        plan = Plan(partial(make, name, "sam"), batches, norm=SyncedNorm)
        assert_disagree(team.run(2, train, plan), "SyncBatchNorm")


class TestPerturbationsOfEachRank:
    """With scope="rank" each rank perturbs along its own gradients."""

    @pytest.mark.parametrize("name", ["mean", "ls"])
    @pytest.mark.parametrize("kind", [SAM, ASAM])
    def test_sam_gradients_are_the_means_of_those_that_each_rank_takes_alone(self, team, name, kind):
        plan = Plan(partial(make, name, kind(0.3, scope="rank"), combine="direct"), HALVES)
        by_itself = [train(None, 0, plan._replace(batches=[batches])) for batches in HALVES]
        for found in team.run(2, train, plan):
            assert_same(found["gradients"], mean_of(by_itself))

    @pytest.mark.parametrize("options", [{}, {"local": 0.5}, {"local": 0.0}, {"norm": "joint"}], ids=str)
    @pytest.mark.parametrize("name", ["cagrad", "uw"])
    def test_ranks_with_the_same_data_are_one_process(self, team, name, options):
        """Also where tasks are in unequal numbers of closures: what is perturbed along are means over these."""
        batches = [Batch(0, 8), Batch(8, 16, ("left",)), Batch(16, 24, ("left", "third"))]
        plan = Plan(partial(make, name, SAM(0.3, scope="rank", **options)), [batches, batches])
        found = team.run(2, train, plan)[0]
        assert_same(found["gradients"], train(None, 0, plan._replace(batches=[batches]))["gradients"])

    @pytest.mark.parametrize("options", [{}, {"local": 0.5}, {"local": 0.0}, {"norm": "joint"}], ids=str)
    @pytest.mark.parametrize("name", ["nash_mtl", "uw"])
    def test_all_ranks_stay_the_same(self, team, name, options):
        batches = [[Batch(0, 12, ("left", "right"))], [Batch(12, 24, ("right", "third"))]]
        plan = Plan(partial(make, name, SAM(0.3, scope="rank", **options)), batches, steps=3)
        first, second = team.run(2, train, plan)
        assert not isinstance(first, Failed), first
        torch.testing.assert_close(first["state"], second["state"], rtol=0.0, atol=0.0)
        everywhere = plan._replace(make=partial(make, name, SAM(0.3, **options)))
        assert not torch.equal(first["state"]["trunk.0.weight"], alone(everywhere)["state"]["trunk.0.weight"])

    def test_in_one_process_it_is_the_same(self):
        plan = Plan(partial(make, "cagrad", SAM(0.3, scope="rank")), HALVES)
        assert_same(alone(plan), alone(plan._replace(make=partial(make, "cagrad", SAM(0.3)))))


class TestTrouble:
    """What goes wrong on one rank ends the step on all of them, and none waits for another."""

    @pytest.mark.parametrize("name", ["cagrad", "ls"])
    @pytest.mark.parametrize("perturbation", ["plain", "sam"])
    @pytest.mark.parametrize("call", [1, 2], ids=["clean", "perturbed"])
    @pytest.mark.parametrize("gradient", [False, True], ids=["loss", "gradient"])
    def test_what_is_not_finite_on_one_rank_is_named_on_all(self, team, name, perturbation, call, gradient):
        found = team.run(
            2, step_with, partial(spoil, calls=range(call, 9), gradient=gradient), make, name, perturbation
        )
        if perturbation == "plain" and call == 2:
            assert not any(isinstance(rank, Failed) for rank in found)
            return
        for rank in found:
            assert rank.kind == "FloatingPointError"
            assert "task 'right'" in rank.message

    @pytest.mark.parametrize("how", ["drop_task", "skip_step"])
    def test_it_is_dropped_or_skipped_on_all(self, team, how):
        for found in team.run(2, step_with, spoil, partial(make, on_nonfinite=how), "cagrad", "sam"):
            assert found["dropped"] == ("right",)
            assert found["skipped"] == (how == "skip_step")
            assert found["gradient of right"] is None

    def test_an_overflow_on_one_rank_skips_on_all(self, team):
        for found in team.run(2, overflow, make):
            assert found["skipped"]
            assert found["same weights"]
            assert found["scale"] == 512.0

    @pytest.mark.parametrize("name", ["cagrad", "ls"])
    def test_a_closure_that_fails_on_one_rank(self, team, name):
        first, second = team.run(2, step_with, fail, make, name, "sam")
        assert (second.kind, second.message) == ("KeyError", "'the second rank has no such file'")
        assert first.kind == "Disagreement"
        assert "failed on rank 1" in first.message

    def test_ranks_that_split_otherwise(self, team):
        assert_disagree(team.run(2, split_otherwise, make), "do not have the same tasks")

    @pytest.mark.parametrize("name", ["cagrad", "ls", "uw", "famo"])
    @pytest.mark.parametrize("perturbation", ["plain", "sam"])
    def test_a_rank_that_has_only_the_task_to_be_dropped(self, team, name, perturbation):
        how = partial(make, on_nonfinite="drop_task")
        for found in team.run(2, step_with, partial(spoil_alone, calls=range(1, 9)), how, name, perturbation):
            assert found["dropped"] == ("right",)
            assert found["gradient of right"] is None

    @pytest.mark.parametrize(
        ("options", "aggregators"),
        [
            ([{"combine": "direct"}, {"combine": "each"}], [Mean(), Mean()]),
            ([{"perturbation": SAM(0.1)}, {"perturbation": SAM(0.2)}], [Mean(), Mean()]),
            ([{"perturbation": SAM(0.1)}, {}], [Mean(), Mean()]),
            ([{"on_nonfinite": "raise"}, {"on_nonfinite": "drop_task"}], [Mean(), Mean()]),
            ([{}, {}], [Mean(), MGDA()]),
        ],
        ids=["combine", "radius", "plain and flat", "on_nonfinite", "aggregator"],
    )
    def test_ranks_that_do_not_do_the_same(self, team, options, aggregators):
        assert_disagree(team.run(2, differ, options, aggregators), "do not do the same")

    def test_ranks_that_begin_with_other_weights(self, team):
        assert_disagree(team.run(2, begin_apart, make), "begin with other weights")

    def test_ranks_that_froze_other_layers(self, team):
        assert_disagree(team.run(2, freeze_another, make), "do not have the same tasks")

    def test_a_group_without_this_process(self, team):
        _, _, found = team.run(3, outside, make)
        assert found.kind == "ValueError"
        assert "not in the process_group" in found.message


@pytest.mark.parametrize(
    "make",
    [make_random, partial(make_drawing, Draws), partial(make_drawing, DrawsForLosses)],
    ids=["function", "aggregator", "weighting"],
)
@pytest.mark.parametrize("batches", [HALVES, [[Batch(0, 6), Batch(6, 12)], [Batch(12, 24)]]], ids=["one", "several"])
def test_what_draws_random_numbers_gives_all_ranks_one_direction(team, make, batches):
    first, second = team.run(2, train, Plan(make, batches, steps=2))
    torch.testing.assert_close(first["state"], second["state"], rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    ("name", "perturbation", "rows"),
    [
        ("cagrad", None, 3),
        ("cagrad", SAM(0.1), 6),
        ("ls", None, 1),
        ("ls", SAM(0.1), 2),
        ("ls", SAM(0.1, scope="rank"), 1),
    ],
    ids=str,
)
def test_so_many_rows_travel(team, name, perturbation, rows):
    """Each task's row once in each kind of pass; of a weighted sum one, and with scope="rank" only the perturbed."""
    for events in team.run(2, record, make, name, perturbation):
        assert sum(event == "send" for event, _ in events) == rows


def test_a_row_travels_while_the_next_task_is_computed(team):
    for events in team.run(2, record, make, "cagrad", SAM(0.1)):
        perturbed = events[events.index(("forward", ("left",))) :]
        assert perturbed[:4] == [
            ("forward", ("left",)),
            ("send", 0),
            ("forward", ("right",)),
            ("arrive", 0),
        ]


class TestScaler:
    @pytest.mark.parametrize("name", ["cagrad", "ls"])
    def test_its_scale_does_not_change_the_step(self, team, name):
        for found in team.run(2, with_scales, make, name):
            plain, *others = found
            for scaled in others:
                torch.testing.assert_close(scaled, plain, rtol=1e-5, atol=1e-7)


class TestRefusals:
    """Wrappers whose gradients cannot be averaged here are refused by name, with what to use instead."""

    @pytest.mark.parametrize(
        ("module", "name", "reason"),
        [
            ("deepspeed.runtime.engine", "DeepSpeedEngine", "own partitions"),
            ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "freed after the first"),
        ],
    )
    def test_wrappers_of_others(self, module, name, reason):
        net = Net()
        wrapper = type(name, (nn.Module,), {"__module__": module})()
        wrapper.net = net
        closure = closure_of(net, Batch(0, 12))
        for act in (
            lambda: split_parameters(wrapper, closure, TASKS),
            lambda: FlatMTL(Mean()).backward(closure, parameters_of(net, wrapper)),
        ):
            with pytest.raises(ValueError, match=f"wrapped in {name}, .*{reason}.*DistributedDataParallel"):
                act()

    def test_a_wrapper_that_casts_in_its_hooks(self, team):
        for found in team.run(1, with_mixed_precision):
            assert found.kind == "ValueError"
            assert "mixed_precision" in found.message
            assert "torch.autocast" in found.message
