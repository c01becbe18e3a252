"""Parameters as they are listed, split and checked; what networks make of it is in ``test_ownership.py``."""

import copy
import pickle

import pytest
import torch
from functorch.compile import aot_module, nop
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
        with pytest.warns(UserWarning, match="'heads.left.weight'"):
            parameters = split_parameters(toy, toy.closure, ["right"])
        assert parameters.heads == {"right": ()}
        assert names(toy, parameters.shared) == {
            n for n, _ in toy.named_parameters() if n.startswith(("trunk", "heads.right"))
        }

    def test_frozen_and_unreached_parameters_are_left_alone(self):
        toy = Toy()
        toy.trunk[0].weight.requires_grad_(False)
        toy.unused = nn.Linear(2, 2)
        with pytest.warns(UserWarning, match="no loss reaches 'unused.weight', 'unused.bias', so they are left alone"):
            parameters = toy.split()
        assert "trunk.0.weight" not in names(toy, parameters.everything)
        FlatMTL(Sum(), SAM(0.1)).backward(toy.closure, parameters)
        assert toy.unused.weight.grad is None
        assert toy.trunk[0].weight.grad is None

    def test_of_many_parameters_that_no_loss_reaches_five_are_named(self):
        toy = Toy()
        toy.unused = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))
        with pytest.warns(UserWarning, match="'unused.0.weight', .*, 'unused.2.weight' and 3 more"):
            toy.split()

    def test_buffers_random_streams_and_gradients_are_left_as_they_were(self):
        toy = Toy(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)))
        toy.trunk[0].weight.grad = torch.ones_like(toy.trunk[0].weight)
        before = toy.contents(), toy.gradients(), torch.get_rng_state()
        toy.split()
        assert_same((toy.contents(), toy.gradients(), torch.get_rng_state()), before)


class Whole(nn.Module):
    """A model whose forward pass computes all tasks, as it is compiled, scripted or wrapped."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
        self.left, self.right = nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x):
        z = self.trunk(x)
        return self.left(z), self.right(z)


def closure_of(run):
    def closure(tasks):
        outputs = dict(zip(("left", "right"), run(torch.ones(3, 4)), strict=True))
        return {t: outputs[t].square().mean() for t in tasks}

    return closure


def through(parts, run=None):
    """Return the outputs of parts called one after another."""
    return lambda x: (parts.left(z := parts.trunk(x)), parts.right(z))


def given_and_run(how: str):
    """Return a model compiled in some way, and what a closure calls."""
    model = Whole()
    if how == "in place":
        model.compile(backend="aot_eager")
    elif how == "its trunk":
        model.trunk = torch.compile(model.trunk, backend="aot_eager")
    elif how == "its heads":
        model.left, model.right = (torch.compile(h, backend="aot_eager") for h in (model.left, model.right))
    elif how == "its forward":
        model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    else:
        compiled = torch.compile(model, backend="aot_eager")
        return {"as a wrapper": (compiled, compiled), "the bare one given": (model, compiled)}[how]
    return model, model


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
class TestCompiled:
    @pytest.mark.parametrize(
        "how", ["as a wrapper", "the bare one given", "in place", "its forward", "its trunk", "its heads"]
    )
    def test_a_compiled_model_is_split_like_the_model_itself(self, how):
        given, run = given_and_run(how)
        closure = closure_of(run)
        sum(closure(["left", "right"]).values()).backward()  # compiled by now
        parameters = split_parameters(given, closure, ["left", "right"])
        expected = split_parameters(bare := Whole(), closure_of(bare), ["left", "right"])
        assert repr(parameters) == repr(expected) == "TaskParameters(25 shared; left: 12, right: 12)"

    def test_a_compiled_closure_is_run_as_it_was_written(self):
        model = Whole()
        closure = torch.compile(closure_of(model), backend="aot_eager")
        assert repr(split_parameters(model, closure, ["left", "right"])).endswith("(25 shared; left: 12, right: 12)")

    def test_messages_name_parameters_as_in_the_uncompiled_model(self):
        model = Whole()
        compiled = torch.compile(model, backend="aot_eager")
        parameters = split_parameters(compiled, closure_of(model), ["left", "right"])
        model.trunk[0].weight.requires_grad_(False)
        with pytest.raises(ValueError, match="parameter 'trunk.0.weight' no longer"):
            FlatMTL(Mean()).backward(closure_of(model), parameters)


def scripted(function):
    """Return a scripted module after the passes in which it is optimized."""
    made = torch.jit.script(function)
    for _ in range(3):
        out = made(torch.ones(3, 5 if isinstance(function, nn.Linear) else 4))
        (sum(map(torch.sum, out)) if isinstance(out, tuple) else out.sum()).backward()
    return made


def hiding(name: str):
    """Return a function whose outputs come out of one node of that name, stand-in for what needs an accelerator."""

    def run(ctx, *tensors):
        return tuple(t.clone() for t in tensors)

    node = type(name, (torch.autograd.Function,), {"forward": run, "backward": lambda ctx, *g: g})
    return lambda model: lambda x: through(model)(x) and node.apply(*through(model)(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
class TestHiddenGraphs:
    """What no stance of the compiler takes apart."""

    @pytest.mark.parametrize(
        ("wrap", "what"),
        [
            (scripted, r"a scripted function \(torch.jit\)"),
            (lambda model: aot_module(model, nop), "an ahead-of-time compiled function"),
            (hiding("Graphed"), "a CUDA graph"),
            (hiding("Broadcast"), "DataParallel"),
        ],
        ids=["scripted", "ahead of time", "CUDA graph", "DataParallel"],
    )
    def test_a_graph_that_shows_every_parameter_to_every_task_is_refused(self, wrap, what):
        model = Whole()
        with pytest.raises(ValueError, match=f"'left' and 'right' come out of {what}.*TaskParameters\\(shared"):
            split_parameters(model, closure_of(wrap(model)), ["left", "right"])

    def test_a_trunk_from_whose_one_output_all_tasks_come_is_shared(self):
        model = Whole()
        model.trunk = scripted(model.trunk)
        parameters = split_parameters(model, closure_of(through(model)), ["left", "right"])
        assert repr(parameters) == "TaskParameters(25 shared; left: 12, right: 12)"


def renew_head(toy: Toy):
    toy.heads["left"] = nn.Linear(5, 2).double()


def assign_tensors(toy: Toy):
    toy.load_state_dict(toy.contents(), assign=True)


def overwrite_on_conversion(toy: Toy):
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        toy.float().double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def swap_on_conversion(toy: Toy):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        toy.float().double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def unfreeze(toy: Toy):
    toy.trunk[0].requires_grad_(True)


def freeze(toy: Toy):
    toy.heads["left"].requires_grad_(False)


def remove(toy: Toy):
    toy.heads["left"] = nn.Identity()


def add(toy: Toy):
    toy.extra = nn.Linear(1, 1)


def add_frozen(toy: Toy):
    toy.extra = nn.Linear(1, 1).requires_grad_(False)


class TestSeveralClosures:
    """Every task needs labels in one of them."""

    def test_what_they_reach_is_united(self):
        toy = Toy()
        closures = [lambda tasks, left=left: toy.closure(tasks) | dict.fromkeys(set(TASKS) - {left}) for left in TASKS]
        found, expected = split_parameters(toy, closures, TASKS), toy.split()
        assert found.shared == expected.shared
        assert found.heads == expected.heads

    def test_a_task_that_is_in_none_is_named(self):
        toy = Toy()
        with pytest.raises(ValueError, match=r"returned None for \['third'\]"):
            split_parameters(toy, [lambda tasks: toy.closure(tasks) | {"third": None}] * 2, TASKS)


class TestLaterChanges:
    """The split must fit the model at every step."""

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (unfreeze, "'trunk.0.weight' requires a gradient, but did not when .* Split them again: .*; or freeze"),
            (freeze, "'heads.left.weight' no longer requires a gradient, but did when .* Split them again"),
            (renew_head, "'heads.left.weight' came into the model after .*was replaced.* Split them again"),
            (
                assign_tensors,
                r"'trunk.0.bias' came .* load_state_dict\(assign=True\) .*give the optimizer the new",
            ),
            (overwrite_on_conversion, "'trunk.0.bias' came into the model after"),
            (add, "'extra.weight' came into the model after the parameters were split, so nobody owns it"),
            (remove, "'heads.left.weight' has left the model since the parameters were split. Split them again"),
        ],
    )
    def test_what_no_longer_fits_is_named_before_anything_is_done(self, change, message):
        toy = Toy()
        toy.trunk[0].weight.requires_grad_(False)
        parameters = toy.split()
        change(toy)
        toy.asked.clear()
        with pytest.raises(ValueError, match=message):
            FlatMTL(Mean(), SAM(0.1)).backward(toy.closure, parameters)
        assert toy.asked == []

    @pytest.mark.parametrize("change", [swap_on_conversion, add_frozen, Toy.float, Toy.eval, Toy.share_memory])
    def test_what_changes_no_owner_is_fine(self, change):
        toy = Toy()
        parameters = toy.split()
        change(toy)
        FlatMTL(Mean(), SAM(0.1)).backward(toy.closure, parameters)
        assert all(p.grad is not None for p in parameters.everything)

    def test_what_is_left_alone_may_be_frozen_and_thawed(self):
        toy = Toy()
        parameters = TaskParameters(toy.trunk.parameters(), {"left": toy.heads["left"].parameters()}, model=toy)
        for trainable in (False, True):
            toy.heads["right"].requires_grad_(trainable)
            FlatMTL(Mean()).backward(toy.closure, parameters)
        assert toy.heads["right"].weight.grad is None

    def test_parameters_outside_the_model_are_no_fault_of_the_model(self):
        toy = Toy()
        parameters = TaskParameters(
            toy.trunk.parameters(), {t: toy.heads[t].parameters() for t in TASKS}, model=toy.trunk
        )
        FlatMTL(Mean()).backward(toy.closure, parameters)
        assert toy.heads["left"].weight.grad.norm() > 0

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
    def test_a_copy_of_model_and_parameters_is_a_pair_again(self, copied):
        toy = Toy()
        toy, parameters = copied((toy, toy.split()))
        FlatMTL(Mean(), SAM(0.1)).backward(toy.closure, parameters)
        assert set(parameters.everything) == set(toy.parameters())
        toy.trunk[0].weight.requires_grad_(False)
        with pytest.raises(ValueError, match="'trunk.0.weight' no longer"):
            FlatMTL(Mean()).backward(toy.closure, parameters)


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

    def test_a_model_wrapped_for_several_processes_is_split_as_it_is_itself(self, tmp_path):
        toy = Toy()
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            wrapped = nn.parallel.DistributedDataParallel(toy)
            assert split_parameters(wrapped, toy.closure, TASKS).shared == toy.split().shared
        finally:
            torch.distributed.destroy_process_group()

    def test_a_model_wrapped_for_several_devices(self):
        toy = Toy()
        wrapped = nn.DataParallel(toy)
        wrapped.device_ids = [0, 1]
        with pytest.raises(ValueError, match=r"wrapped in DataParallel, over 2 devices.*DistributedDataParallel"):
            split_parameters(wrapped, toy.closure, TASKS)
        parameters = TaskParameters(
            toy.trunk.parameters(), {t: toy.heads[t].parameters() for t in TASKS}, model=wrapped
        )
        with pytest.raises(ValueError, match="wrapped in DataParallel"):
            FlatMTL(Mean()).backward(toy.closure, parameters)

    def test_what_is_no_model_and_what_are_no_heads(self):
        toy = Toy()
        with pytest.raises(TypeError, match=r"model is a list; expected a module.*nn\.ModuleList\("):
            split_parameters([toy.trunk, toy.heads], toy.closure, TASKS)
        with pytest.raises(TypeError, match=r"model is a generator; expected a module"):
            TaskParameters(toy.trunk.parameters(), {"a": []}, model=toy.parameters())
        with pytest.raises(TypeError, match=r"heads is a list; expected a mapping from task name"):
            TaskParameters(toy.trunk.parameters(), [toy.heads["left"].parameters()])

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
        with pytest.raises(TypeError, match=r"shared is a int; expected a list of parameters"):
            TaskParameters(3, {"a": []})
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

    def test_two_parameters_on_one_memory(self):
        """As when weights are tied by mistake with ``nn.Parameter(other)``, which makes a second parameter."""
        toy = Toy()
        toy.trunk[2].weight = nn.Parameter(toy.trunk[0].weight)
        with pytest.raises(ValueError, match="'trunk.0.weight' and parameter 'trunk.2.weight' are two .* one memory"):
            TaskParameters(toy.trunk.parameters(), {"a": []}, model=toy)

    def test_parts_of_one_memory_are_no_two_parameters_on_it(self):
        memory = torch.zeros(4, 2)
        parts = [nn.Parameter(memory[:2]), nn.Parameter(memory[2:]), *(nn.Parameter(torch.empty(0)) for _ in range(2))]
        assert TaskParameters(parts, {"a": []}).shared == tuple(parts)

    def test_complex_parameters(self):
        weight = nn.Parameter(torch.ones(2, dtype=torch.cfloat))
        with pytest.raises(ValueError, match=r"'shared \[0\]' in shared is complex; expected real"):
            TaskParameters([weight], {"a": []})
        toy = Toy()
        toy.trunk[0].phase = weight
        with pytest.raises(ValueError, match="'trunk.0.phase' in shared is complex; expected real parameters"):
            split_parameters(toy, lambda ts: {t: v * weight.real.sum() for t, v in toy.closure(ts).items()}, TASKS)

    def test_complex_parameters_that_are_frozen_are_left_out_like_others(self):
        toy = Toy()
        phase = nn.Parameter(torch.ones(2, dtype=torch.cfloat), requires_grad=False)
        assert phase not in set(TaskParameters([*toy.trunk.parameters(), phase], {"a": []}).everything)


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
