"""Who owns which parameter."""

import copy

import pytest
import torch
from tests.flatmtl.toys import TASKS, Toy, assert_same
from torch import nn

from flatmtl import SAM, FlatMTL, TaskParameters, split_parameters
from flatmtl.aggregators import Mean, Sum


def names(model: nn.Module, parameters) -> set[str]:
    own = {id(p) for p in parameters}
    return {name for name, p in model.named_parameters() if id(p) in own}


class TestSplit:
    def test_what_two_tasks_reach_is_shared_and_what_one_reaches_is_its_head(self):
        toy = Toy()
        parameters = toy.split()
        assert parameters.tasks == TASKS
        assert names(toy, parameters.shared) == {n for n, _ in toy.named_parameters() if n.startswith("trunk")}
        for task in TASKS:
            assert names(toy, parameters.heads[task]) == {f"heads.{task}.weight", f"heads.{task}.bias"}

    def test_a_branch_that_some_tasks_share_is_shared(self):
        toy = Toy()
        toy.branch = nn.Linear(5, 5).double()

        def closure(tasks):
            z = toy.trunk(toy.x)
            return {t: toy.heads[t](z if t == "left" else toy.branch(z)).sum() for t in tasks}

        parameters = split_parameters(toy, closure, TASKS)
        assert names(toy, parameters.shared) >= {"branch.weight", "branch.bias"}
        FlatMTL(Mean(), SAM(0.1)).backward(closure, parameters)
        assert toy.branch.weight.grad.norm() > 0

    def test_with_one_task_everything_it_reaches_is_shared(self):
        toy = Toy()
        parameters = toy.split(["right"])
        assert parameters.heads == {"right": ()}
        assert names(toy, parameters.shared) == {
            n for n, _ in toy.named_parameters() if n.startswith(("trunk", "heads.right"))
        }

    def test_frozen_and_unreached_parameters_are_left_alone(self):
        toy = Toy()
        toy.trunk[0].weight.requires_grad_(False)
        toy.unused = nn.Linear(2, 2)
        parameters = toy.split()
        everything = [*parameters.shared, *(p for head in parameters.heads.values() for p in head)]
        assert "trunk.0.weight" not in names(toy, everything)
        FlatMTL(Sum(), SAM(0.1)).backward(toy.closure, parameters)
        assert toy.unused.weight.grad is None
        assert toy.trunk[0].weight.grad is None

    def test_tied_weights_count_once(self):
        toy = Toy(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)))
        toy.trunk[3].weight = toy.trunk[1].weight
        parameters = toy.split()
        assert len({id(p) for p in parameters.shared}) == len(parameters.shared)
        FlatMTL(Sum()).backward(toy.closure, parameters)
        found = toy.gradients()
        toy.zero_grad()
        sum(toy.closure(TASKS).values()).backward()
        torch.testing.assert_close(found, toy.gradients())

    def test_buffers_random_streams_and_gradients_are_left_as_they_were(self):
        toy = Toy(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)))
        toy.trunk[0].weight.grad = torch.ones_like(toy.trunk[0].weight)
        before = toy.contents(), toy.gradients(), torch.get_rng_state()
        toy.split()
        assert_same((toy.contents(), toy.gradients(), torch.get_rng_state()), before)

    def test_a_compiled_model_is_split_like_the_model_itself(self):
        toy = Toy()
        compiled = copy.deepcopy(toy)
        trunk = torch.compile(compiled.trunk, backend="eager")

        def closure(tasks):
            z = trunk(compiled.x)
            return {t: compiled.heads[t](z).sum() for t in tasks}

        parameters = split_parameters(compiled, closure, TASKS)
        assert names(compiled, parameters.shared) == names(toy, toy.split().shared)


class TestRefusals:
    def test_independent_tasks(self):
        toy = Toy()
        with pytest.raises(ValueError, match="no gradient of task 'left' reaches any shared parameter"):
            split_parameters(toy, lambda ts: {t: toy.heads[t](toy.x.new_ones(2, 5)).sum() for t in ts}, TASKS)

    def test_a_parameter_outside_the_model(self):
        toy = Toy()
        with pytest.raises(ValueError, match=r"'left' reaches a parameter of shape \(2, 5\) that is not in the model"):
            split_parameters(toy.trunk, toy.closure, TASKS)

    def test_tasks_without_labels(self):
        toy = Toy()
        with pytest.raises(ValueError, match=r"None for \['right'\].*all tasks have labels"):
            split_parameters(toy, lambda ts: toy.closure(ts) | {"right": None}, TASKS)

    def test_a_model_wrapped_for_several_processes(self, tmp_path):
        toy = Toy()
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            with pytest.raises(ValueError, match=r"wrapped in DistributedDataParallel.*model\.module"):
                split_parameters(nn.parallel.DistributedDataParallel(toy), toy.closure, TASKS)
        finally:
            torch.distributed.destroy_process_group()

    def test_task_names(self):
        toy = Toy()
        with pytest.raises(TypeError, match=r"tasks is the string 'left'; expected a list of names, e.g. \['left'\]"):
            split_parameters(toy, toy.closure, "left")
        with pytest.raises(ValueError, match=r"tasks is \[\]; expected at least one name"):
            split_parameters(toy, toy.closure, [])

    def test_a_parameter_in_two_places(self):
        toy = Toy()
        trunk, head = list(toy.trunk.parameters()), list(toy.heads["left"].parameters())
        with pytest.raises(
            ValueError, match="'trunk.0.weight' is in shared and in the head 'seg'. Each parameter needs"
        ):
            TaskParameters(trunk, {"seg": trunk[:1]}, model=toy)
        with pytest.raises(ValueError, match="in the head 'a' and in the head 'b'"):
            TaskParameters(trunk, {"a": head, "b": head})

    def test_what_is_no_list_of_parameters(self):
        toy = Toy()
        with pytest.raises(TypeError, match=r"shared is a Sequential; expected a list .*parameters\(\)"):
            TaskParameters(toy.trunk, {"a": []})
        with pytest.raises(TypeError, match="shared holds a tuple.*the second of each pair"):
            TaskParameters(toy.named_parameters(), {"a": []})
        with pytest.raises(TypeError, match="holds a tensor that was computed"):
            TaskParameters([toy.trunk[0].weight * 2], {"a": []})

    def test_nothing_to_share_and_no_task(self):
        toy = Toy()
        with pytest.raises(ValueError, match="no parameter is shared"):
            TaskParameters([], {"a": toy.parameters()})
        with pytest.raises(ValueError, match="heads is empty"):
            TaskParameters(toy.parameters(), {})

    def test_complex_parameters(self):
        with pytest.raises(ValueError, match="is complex; expected real"):
            TaskParameters([nn.Parameter(torch.ones(2, dtype=torch.cfloat))], {"a": []})


def test_a_parameter_listed_twice_counts_once():
    toy = Toy()
    trunk = list(toy.trunk.parameters())
    assert TaskParameters([*trunk, *trunk], {"a": []}).shared == tuple(trunk)


def test_a_variable_that_a_function_keeps_is_no_leaf():
    toy = Toy()

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            ctx.variable = toy.heads["left"].weight
            return z * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    def closure(tasks):
        z = Keeps.apply(toy.trunk(toy.x))
        return {t: toy.heads[t](z).sum() for t in tasks}

    parameters = split_parameters(toy, closure, TASKS)
    assert "heads.left.weight" in names(toy, parameters.heads["left"])
