"""Compiled models give the numbers of uncompiled ones, whatever was compiled before and whatever else they hold."""

import weakref
from functools import partial

import pytest
import torch
from tests.flatmtl.toys import TASKS, Toy, aggregator
from torch import Tensor, nn
from torch._dynamo.utils import counters

from flatmtl import SAM, FlatMTL, TaskParameters, passes
from flatmtl.gradients import GraphNotKept, gradient

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not:UserWarning")  # by Dynamo

PERTURBATIONS = {
    "plain": None,
    "own": SAM(0.3),
    "half": SAM(0.3, local=0.5),
    "common": SAM(0.3, local=0.0),
}


@pytest.fixture(autouse=True)
def fresh():
    """Every test compiles anew."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Trunk(nn.Sequential):
    """PyTorch 2.6 compiles modules of its own only as parts of others."""

    def forward(self, x):
        return super().forward(x)


class Head(nn.Linear):
    def forward(self, z):
        return super().forward(z)


class Model(Toy):
    """A toy whose trunk normalises, with a forward pass that can be compiled as a whole."""

    def __init__(self, *layers: nn.Module, head: type[nn.Module] = Head) -> None:
        super().__init__(Trunk(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), *layers, nn.Linear(6, 5)), head)
        self.run = self.forward

    def forward(self, x: Tensor, tasks: list[str]) -> dict[str, Tensor]:
        z = self.trunk(x)
        return {t: self.heads[t](z) for t in tasks}

    def closure(self, tasks, rows=slice(None)):
        self.asked.append(list(tasks))
        return {t: (y - self.y[t][rows]).square().mean() for t, y in self.run(self.x[rows], tasks).items()}


class RandomHead(nn.Linear):
    def forward(self, z):
        return super().forward(nn.functional.dropout(z, 0.5))


class NormalisingHead(nn.Linear):
    def __init__(self, *shape: int) -> None:
        super().__init__(*shape)
        self.norm = nn.BatchNorm1d(shape[-1])

    def forward(self, z):
        return self.norm(super().forward(z))


def compile_trunk(model: Model, **options) -> None:
    parts = torch.compile(model.trunk, **options)
    model.run = lambda x, tasks: {t: model.heads[t](z) for z in [parts(x)] for t in tasks}


def compile_trunk_in_place(model: Model, **options) -> None:
    model.trunk.compile(**options)


def compile_whole(model: Model, **options) -> None:
    model.run = torch.compile(model.forward, **options)


def compile_heads(model: Model, **options) -> None:
    for head in model.heads.values():
        head.compile(**options)


WAYS = [compile_trunk, compile_trunk_in_place, compile_whole, compile_heads]


def steps(model: Model, mtl: FlatMTL, closures=None, count: int = 2) -> dict:
    """Take steps that add up in ``.grad``; return what they leave."""
    torch.manual_seed(0)
    parameters = model.split()
    model.asked.clear()
    results = [mtl.backward(closures or model.closure, parameters) for _ in range(count)]
    return {
        **{f"{name}.grad": p.grad for name, p in model.named_parameters()},
        **model.contents(),
        "losses": torch.stack([result.losses for result in results]),
        "random": torch.rand(2),
    }


def assert_close(actual: dict, expected: dict) -> None:
    """Equal up to rounding."""
    assert list(actual) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-9, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


CASES = [
    *((compile_trunk, how, name) for how, name in [("plain", "cagrad"), ("own", "cagrad"), ("own", "uw")]),
    *((way, "own", "cagrad") for way in WAYS[1:]),
]


class TestNumbers:
    @pytest.mark.parametrize(("way", "how", "name"), CASES, ids=lambda v: v if isinstance(v, str) else v.__name__)
    def test_they_are_those_without_compilation(self, way, how, name):
        model, plain = Model(), Model()
        way(model, backend="aot_eager", fullgraph=True)
        mtl, other = (FlatMTL(aggregator(name), PERTURBATIONS[how]) for _ in range(2))
        assert_close(steps(model, mtl), steps(plain, other))
        assert counters["stats"]["unique_graphs"] > 0

    def test_they_are_those_without_compilation_by_inductor(self):
        """Also where one task came first, after which functions donate buffers unless they were told not to."""
        model, plain = Model(), Model()
        compile_trunk(model, fullgraph=True)
        for each in (model, plain):
            one_task(each)
        mtl, other = (FlatMTL(aggregator("cagrad"), SAM(0.3)) for _ in range(2))
        assert_close(steps(model, mtl), steps(plain, other))

    def test_nothing_is_compiled_again_but_for_another_size_of_the_batch(self):
        model = Model()
        compile_trunk(model, backend="aot_eager")
        mtl, graphs = FlatMTL(aggregator("cagrad"), SAM(0.3)), []
        for rows in (slice(8), slice(8), slice(5), slice(5), slice(3), slice(8)):
            steps(model, mtl, partial(model.closure, rows=rows), count=1)
            graphs.append(counters["stats"]["unique_graphs"])
        assert graphs == [1, 1, 2, 2, 2, 2]
        assert not counters["graph_break"]

    def test_compiled_dropout_drops_the_same_in_both_passes(self):
        """Inductor draws its masks in its own way, from a seed that it takes from PyTorch's stream."""
        model = Model(nn.Dropout(0.5))
        compile_trunk(model)
        mtl = FlatMTL(aggregator("cagrad"), SAM(1e-6))
        results = [mtl.backward(model.closure, model.split()) for _ in range(2)]
        assert not torch.equal(results[0].losses, results[1].losses)
        for result in results:
            assert (result.norms_flat < 1e-4 * result.norms).all()

    def test_one_that_runs_uncompiled_first_to_be_split_stays_compiled(self):
        model = Model()
        compile_trunk(model, backend="aot_eager")
        model.split()
        assert counters["stats"]["unique_graphs"] == 0
        steps(model, FlatMTL(aggregator("cagrad")))
        assert counters["stats"]["unique_graphs"] == 1


class TestWithoutAModel:
    """Buffers are put back although nobody named the modules that hold them, which compilation hides."""

    @staticmethod
    def steps(model: Model, count: int = 2) -> dict:
        heads = {t: model.heads[t].parameters() for t in TASKS}
        parameters, mtl = TaskParameters(model.trunk.parameters(), heads), FlatMTL(aggregator("cagrad"), SAM(0.3))
        for _ in range(count):
            mtl.backward(model.closure, parameters)
        return {**{f"{name}.grad": p.grad for name, p in model.named_parameters()}, **model.contents()}

    @pytest.mark.parametrize("way", WAYS[:2], ids=lambda way: way.__name__)
    @pytest.mark.parametrize("fullgraph", [False, True])
    def test_the_numbers_are_those_without_compilation(self, way, fullgraph):
        model, plain = Model(), Model()
        way(model, backend="aot_eager", fullgraph=fullgraph)
        assert_close(self.steps(model), self.steps(plain))
        assert model.trunk[1].num_batches_tracked == 2
        assert counters["stats"]["unique_graphs"] == 1

    def test_it_takes_one_more_pass_before_the_first_step(self):
        model = Model()
        compile_trunk(model, backend="aot_eager")
        self.steps(model)
        each = [list(TASKS), *([t] for t in TASKS)]
        assert model.asked == [list(TASKS), *each, *each]


def ordinary(model: Model) -> None:
    """Take an ordinary backward pass, whose functions donate their buffers."""
    sum(model.closure(TASKS).values()).backward()
    model.zero_grad()


def one_task(model: Model) -> None:
    """Take a step in which one task has labels."""
    FlatMTL(aggregator("mgda")).backward(
        lambda tasks: {t: loss if t == "left" else None for t, loss in model.closure(tasks).items()}, model.split()
    )
    model.zero_grad()


def weighted(model: Model) -> None:
    """Take a step of a loss weighting, which is one backward pass."""
    FlatMTL(aggregator("ls")).backward(model.closure, model.split())
    model.zero_grad()


class TestDonatedBuffers:
    """A function whose first backward pass was the only one of its graph refuses a second one, and it is not asked."""

    @pytest.mark.parametrize("first", [one_task, weighted], ids=lambda first: first.__name__)
    def test_what_a_step_compiles_serves_every_later_step(self, first):
        model, plain = Model(), Model()
        compile_trunk(model, backend="aot_eager")
        for each in (model, plain):
            first(each)
        mtl, other = (FlatMTL(aggregator("cagrad"), SAM(0.3)) for _ in range(2))
        assert_close(steps(model, mtl), steps(plain, other))
        assert model.asked == [list(TASKS), *([t] for t in TASKS)] * 2

    @pytest.mark.parametrize("how", ["own", "common"])
    @pytest.mark.filterwarnings("ignore:a function that was compiled before this call:UserWarning")
    def test_what_was_compiled_before_gives_the_same_numbers(self, how):
        model, plain = Model(), Model()
        compile_trunk(model, backend="aot_eager")
        for each in (model, plain):
            ordinary(each)
        mtl, other = (FlatMTL(aggregator("cagrad"), PERTURBATIONS[how]) for _ in range(2))
        assert_close(steps(model, mtl), steps(plain, other))

    def test_what_was_compiled_before_by_inductor_gives_the_same_numbers(self):
        """There the buffers are overwritten in earnest."""
        model, plain = Model(), Model()
        compile_trunk(model)
        for each in (model, plain):
            ordinary(each)
        mtl, other = (FlatMTL(aggregator("cagrad"), SAM(0.3)) for _ in range(2))
        with pytest.warns(UserWarning, match=r"3 tasks gets a forward pass of its own.*donated_buffer = False"):
            assert_close(steps(model, mtl), steps(plain, other))

    def test_it_is_told_once_and_remembered(self):
        model, mtl = Model(), FlatMTL(aggregator("cagrad"))
        compile_trunk(model, backend="aot_eager")
        ordinary(model)
        with pytest.warns(UserWarning, match="forward pass of its own"):
            steps(model, mtl, count=1)
        steps(model, mtl, count=1)  # where a warning is an error
        assert model.asked == [list(TASKS), *([t] for t in TASKS[1:])]

    def test_the_switch_is_left_as_it_was(self):
        model = Model()
        compile_trunk(model, backend="aot_eager")
        steps(model, FlatMTL(aggregator("cagrad"), SAM(0.3)))
        assert torch._functorch.config.donated_buffer

    def test_with_the_switch_off_one_forward_pass_is_shared(self):
        model = Model()
        compile_trunk(model, backend="aot_eager")
        with torch._functorch.config.patch(donated_buffer=False):
            ordinary(model)
            steps(model, FlatMTL(aggregator("cagrad")), count=1)
        assert model.asked == [list(TASKS)]


@pytest.fixture
def refusing(monkeypatch):
    """Graphs that refuse to be kept, as those of functions that donate their buffers do."""

    def refuse(layout, loss, parameters, *, keep_graph, early=None):
        if keep_graph:
            raise GraphNotKept
        return gradient(layout, loss, parameters, keep_graph=False, early=early)

    monkeypatch.setattr(passes, "gradient", refuse)


@pytest.mark.usefixtures("refusing")
@pytest.mark.filterwarnings("ignore:a function that was compiled before this call:UserWarning")
class TestAForwardPassForEachTask:
    """The numbers are those of one forward pass for all, and so is what it leaves."""

    @pytest.mark.parametrize("how", PERTURBATIONS)
    @pytest.mark.parametrize("layers", [[], [nn.Dropout(0.5)]], ids=["", "dropout"])
    @pytest.mark.parametrize("head", [Head, RandomHead])
    def test_a_step_is_the_same(self, monkeypatch, head, layers, how):
        self.compare(monkeypatch, Model(*layers, head=head), Model(*layers, head=head), how)

    @pytest.mark.parametrize("how", ["plain", "own", "common"])
    @pytest.mark.parametrize("head", [RandomHead, NormalisingHead])
    def test_a_step_of_micro_batches_is_the_same(self, monkeypatch, head, how):
        """Normalisation hands its statistics from one to the next; not every task has labels in each."""

        def closures(model):
            def without_left(tasks):
                return {t: None if t == "left" else loss for t, loss in model.closure(tasks, slice(4)).items()}

            return [without_left, partial(model.closure, rows=slice(4, 8)), partial(model.closure, rows=slice(2))]

        self.compare(monkeypatch, Model(head=head), Model(head=head), how, closures)

    @staticmethod
    def compare(monkeypatch, model, plain, how, closures=lambda model: model.closure):
        mtl, other = (FlatMTL(aggregator("cagrad"), PERTURBATIONS[how]) for _ in range(2))
        actual = steps(model, mtl, closures(model))
        monkeypatch.undo()
        assert_close(actual, steps(plain, other, closures(plain)))

    @pytest.mark.parametrize("how", ["own", "common"])
    def test_the_first_task_takes_the_pass_of_all_and_each_other_one_of_its_own(self, how):
        toy = Toy()
        parameters, mtl = toy.split(), FlatMTL(aggregator("mgda"), PERTURBATIONS[how])
        toy.asked.clear()
        mtl.backward(toy.closure, parameters)
        each = [[t] for t in TASKS]
        assert toy.asked == [list(TASKS), *each[1:], *each]

    def test_a_task_that_is_there_at_first_must_stay(self):
        toy = Toy()
        calls = iter(range(9))

        def closure(tasks):
            first = next(calls) == 0
            return {t: loss if first or t != "right" else None for t, loss in toy.closure(tasks).items()}

        with pytest.raises(ValueError, match="of task 'right' in the clean pass and None when it was called again"):
            FlatMTL(aggregator("mgda")).backward(closure, toy.split())

    @pytest.mark.parametrize("how", ["own", "common"])
    def test_no_graph_outlives_its_task(self, how):
        toy, alive = Toy(), weakref.WeakSet()

        def closure(tasks):
            assert not alive
            losses = toy.closure(tasks)
            for loss in losses.values():
                alive.add(hook := lambda g: None)
                loss.register_hook(hook)
            return losses

        FlatMTL(aggregator("mgda"), PERTURBATIONS[how]).backward(closure, toy.split())
        assert not alive
