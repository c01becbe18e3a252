"""Memory of a step, counted in bytes of live tensors, and what a step makes the host wait for."""

import gc
import math
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import pytest
import torch
from tests.flatmtl.toys import EVERY, TASKS, Toy, aggregator, assert_same
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from flatmtl import ASAM, SAM, FlatMTL, Monitor, TaskParameters
from flatmtl._linalg import BLOCK_IN_CACHE
from flatmtl.aggregators import AGGREGATORS, MGDA, CAGrad, GramianAggregator, LossWeighting

GRAMIAN = [name for name, kind in AGGREGATORS.items() if issubclass(kind, GramianAggregator)]
WEIGHTINGS = [name for name, kind in AGGREGATORS.items() if issubclass(kind, LossWeighting)]
BLOCK = 8 * BLOCK_IN_CACHE
"""Bytes of a block in which a row is widened to float64, whatever its length; an inner product needs two."""


class Memory(TorchDispatchMode):
    """Follows the storage of every tensor that is made within this context.

    Attributes:
        peak: most bytes that were alive at once.
        sizes: bytes of each storage that was made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.sizes: list[int] = []
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        storages = {storage._cdata: storage for storage in (t.untyped_storage() for t in tensors_in(out))}
        if not self._made.keys() >= storages.keys():
            before = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}
            for key in storages.keys() - before - self._made.keys():
                self._made[key] = StorageWeakRef(storages[key]), storages[key].nbytes()
                self.sizes.append(storages[key].nbytes())
                self.peak = max(self.peak, sum(self.alive()))
        return out

    def alive(self) -> list[int]:
        """Return the bytes of each storage that is alive."""
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return [size for _, size in self._made.values()]


def tensors_in(tree: object) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [t for item in items for t in tensors_in(item)]


class Wide(nn.Module):
    """A trunk of one large weight, next to which activations and heads are small."""

    def __init__(self, tasks: int, trunk: nn.Module | None = None) -> None:
        super().__init__()
        self.trunk = nn.Linear(1000, 1000, bias=False) if trunk is None else trunk
        self.x = torch.randn(2, 1000) if trunk is None else torch.randn(8, 3, 16, 16)
        self.heads = nn.ModuleList(nn.Linear(self.trunk(self.x).shape[1], 1) for _ in range(tasks))
        self.parameters_of = TaskParameters(
            self.trunk.parameters(), {str(i): head.parameters() for i, head in enumerate(self.heads)}, model=self
        )
        self.n = sum(p.numel() * p.element_size() for p in self.trunk.parameters())

    def closure(self, tasks: Sequence[str]) -> dict[str, Tensor]:
        z = self.trunk(self.x).tanh()
        return {t: self.heads[int(t)](z).square().mean() for t in tasks}

    def step(self, mtl: FlatMTL) -> Memory:
        self.zero_grad()
        with Memory() as memory:
            mtl.backward(self.closure, self.parameters_of)
        return memory

    def ordinary_step(self) -> Memory:
        self.zero_grad()
        with Memory() as memory:
            sum(self.closure([str(i) for i in range(len(self.heads))]).values()).backward()
        return memory


def small_cnn() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 64))


every_perturbation = pytest.mark.parametrize("perturbation", [SAM(0.1), ASAM(0.5), SAM(0.1, norm="joint")], ids=repr)


class TestPeak:
    @pytest.mark.parametrize("tasks", [1, 5])
    def test_a_plain_step_holds_a_row_for_each_task_and_one_vector_more_than_plain_training(self, tasks):
        model = Wide(tasks)
        ordinary = model.ordinary_step().peak
        assert model.step(FlatMTL(CAGrad())).peak <= ordinary + (tasks + 1) * model.n + 2.1 * BLOCK

    @every_perturbation
    @pytest.mark.parametrize("tasks", [1, 5])
    def test_a_flat_step_holds_a_row_for_each_task_and_two_vectors_more_than_plain_training(self, tasks, perturbation):
        model = Wide(tasks)
        ordinary = model.ordinary_step().peak
        assert ordinary == pytest.approx(model.n, rel=0.05)
        assert model.step(FlatMTL(CAGrad(), perturbation)).peak <= ordinary + (tasks + 2) * model.n + 2.1 * BLOCK

    @every_perturbation
    @pytest.mark.parametrize("method", [MGDA(), lambda J: J.mean(0)], ids=["weights", "function"])
    def test_a_flat_step_holds_two_vectors_more_than_the_plain_one(self, method, perturbation):
        model = Wide(3)
        plain = model.step(FlatMTL(method)).peak
        assert model.step(FlatMTL(method, perturbation)).peak <= 1.05 * (plain + 2 * model.n)

    def test_fifteen_tasks_on_a_small_network(self):
        model = Wide(15, trunk=small_cnn())
        ordinary = model.ordinary_step().peak
        assert model.step(FlatMTL(CAGrad(), ASAM(0.5))).peak <= ordinary + (15 + 2) * model.n + 2.1 * BLOCK


class TestRows:
    """The task gradients are in one place, and nobody copies them."""

    @pytest.mark.parametrize("perturbation", [None, SAM(0.1)], ids=repr)
    def test_a_step_allocates_no_more_vectors_for_more_tasks_than_autograd_does(self, perturbation):
        passes = 1 if perturbation is None else 2
        beyond_autograd = []
        for tasks in (2, 7):
            model, mtl = Wide(tasks), FlatMTL(CAGrad(), perturbation)
            model.step(mtl)
            large = [size for size in model.step(mtl).sizes if size > 0.9 * model.n]
            beyond_autograd.append(len(large) - passes * tasks)
        assert beyond_autograd[0] == beyond_autograd[1] <= 1 + passes  # a direction for each branch, and .grad

    def test_every_step_uses_the_same_buffer_also_when_tasks_come_and_go(self):
        toy, places = Toy(), set()
        mtl, parameters = FlatMTL(lambda J: places.add(J.data_ptr()) or J.mean(0), SAM(0.1)), toy.split()
        for labelled in (TASKS, TASKS[1:], TASKS[:1], TASKS):
            mtl.backward(
                lambda tasks, some=labelled: {t: v if t in some else None for t, v in toy.closure(tasks).items()},
                parameters,
            )
        assert len(places) == 1

    @pytest.mark.parametrize("name", GRAMIAN)
    def test_what_needs_inner_products_only_sees_no_rows(self, name, monkeypatch):
        toy, method = Toy(), aggregator(name)
        monkeypatch.setattr(type(method), "__call__", None)
        FlatMTL(method, SAM(0.1)).backward(toy.closure, toy.split())
        assert toy.trunk[0].weight.grad.norm() > 0


class TestGraph:
    """Activations live no longer than they are needed, and no graph outlives a step."""

    @pytest.mark.parametrize("micro_batches", [1, 2])
    @pytest.mark.parametrize("method", ["mgda", "graddrop", "uw"])
    @pytest.mark.parametrize("perturbation", [None, SAM(0.1), SAM(0.1, local=0.0)], ids=repr)
    def test_activations_of_a_pass_are_gone_before_the_next(self, perturbation, method, micro_batches):
        toy, seen = Toy(), []

        def closure(tasks):
            assert all(storage.expired() for storage in seen)
            z = toy.trunk(toy.x)
            seen.append(StorageWeakRef(z.untyped_storage()))
            return {t: toy.heads[t](z).square().mean() for t in tasks}

        parameters = toy.split()
        FlatMTL(aggregator(method), perturbation).backward([closure] * micro_batches, parameters)
        assert len(seen) >= micro_batches
        assert all(storage.expired() for storage in seen)

    @pytest.mark.parametrize("perturbation", [None, SAM(0.1), SAM(0.1, local=0.0)], ids=repr)
    def test_the_graph_of_the_trunk_is_gone_with_the_last_task_although_the_user_keeps_the_losses(self, perturbation):
        toy, hidden, losses = Toy(), [], []

        def closure(tasks):
            assert all(storage.expired() for storage in hidden)
            first = toy.trunk[:2](toy.x)
            hidden.append(StorageWeakRef(first.untyped_storage()))
            z = toy.trunk[2:](first)
            losses.append({t: toy.heads[t](z).square().mean() for t in tasks})
            return losses[-1]

        parameters = toy.split()
        losses.clear()
        FlatMTL(MGDA(), perturbation).backward(closure, parameters)
        assert all(storage.expired() for storage in hidden)

    @pytest.mark.parametrize("name", ["nash_mtl", "famo"])
    def test_thirty_steps_hold_no_more_than_three(self, name):
        toy, monitor = Toy(), Monitor()
        mtl, parameters, alive = FlatMTL(aggregator(name), SAM(0.1)), toy.split(), []
        with Memory() as memory:
            for count in (3, 27):
                for _ in range(count):
                    toy.zero_grad()
                    monitor.update(mtl.backward(toy.closure, parameters))
                    mtl.after_step(toy.closure)
                alive.append(sorted(memory.alive()))
        assert alive[0] == alive[1]

    @pytest.mark.parametrize("name", EVERY)
    def test_what_stays_after_a_step_has_no_graph(self, name):
        toy, monitor = Toy(), Monitor()
        mtl, parameters = FlatMTL(aggregator(name), SAM(0.1)), toy.split()
        results = [mtl.backward(toy.closure, parameters) for _ in range(2)]
        monitor.update(results[-1])
        found = list(tensors_within([mtl, results, monitor]))
        assert any(t is results[0].losses for t in found)
        assert [t for t in found if t.grad_fn is not None] == []


def tensors_within(root: object) -> Iterator[Tensor]:
    """Yield every tensor that can be reached from an object, but not through code."""
    code = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
    seen, stack = set(), [root]
    while stack:
        item = stack.pop()
        if id(item) not in seen and not isinstance(item, code):
            seen.add(id(item))
            stack.extend(gc.get_referents(item))
            if isinstance(item, Tensor):
                yield item


class Elsewhere(Tensor):
    """A tensor that says it is on a device of its own; its values are on the CPU."""

    @staticmethod
    def __new__(cls, values: Tensor) -> "Elsewhere":
        layout = {"strides": values.stride(), "storage_offset": values.storage_offset()}
        out = Tensor._make_wrapper_subclass(cls, values.size(), dtype=values.dtype, device="meta", **layout)
        out.values_on_cpu = values
        return out

    def tolist(self) -> list:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} outside of Device()")


class Device(TorchDispatchMode):
    """Runs what happens on the device of :class:`Elsewhere`, and notes what would make the host wait for it.

    Like a real device it refuses to mix its tensors with the host's, numbers apart.

    Attributes:
        log: each transfer to the host by its number of entries, "upload" for one to the device that waits for all that
            is enqueued there, and what else was appended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[int | str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        target = kwargs.get("device")
        there = [t for t in tensors_in((args, kwargs)) if isinstance(t, Elsewhere)]
        here = [t for t in tensors_in((args, kwargs)) if not isinstance(t, Elsewhere)]
        copies = function is torch.ops.aten.copy_.default
        if there and not copies and any(t.ndim for t in here):
            raise RuntimeError(f"{function} mixes two devices")
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        out = function(*tree_map(values, args), **tree_map(values, kwargs))
        arrives = function is torch.ops.aten._local_scalar_dense.default or (copies and args[0] in here)
        if there and (arrives or (target is not None and torch.device(target).type == "cpu")):
            self.log.append(out.numel() if isinstance(out, Tensor) else 1)
            return out
        leaves = any(t.ndim for t in here) and (
            isinstance(args[0], Elsewhere) if copies else target is not None and torch.device(target).type != "cpu"
        )
        if leaves and not (kwargs.get("non_blocking") or (copies and len(args) > 2 and args[2])):
            self.log.append("upload")
        if not there and (target is None or torch.device(target).type == "cpu"):
            return out
        given = {id(t.values_on_cpu): t for t in there}  # what works in place returns what it was given
        return tree_map(lambda t: given.get(id(t), Elsewhere(t)) if isinstance(t, Tensor) else t, out)


def values(item: object) -> object:
    return item.values_on_cpu if isinstance(item, Elsewhere) else item


class TestLateNews:
    """A device is given task 1's perturbed pass before the host knows what came out of the clean one."""

    @pytest.mark.parametrize("call", [1, 2, 4], ids=["clean pass", "first perturbed pass", "last perturbed pass"])
    @pytest.mark.parametrize("mode", ["raise", "drop_task", "skip_step"])
    @pytest.mark.parametrize("bad", TASKS)
    def test_what_is_not_finite_is_acted_upon_and_no_closure_runs_at_it(self, bad, mode, call):
        toy, seen = Toy().float(), []
        toy.x, toy.y = toy.x.float(), {t: y.float() for t, y in toy.y.items()}

        def closure(tasks):
            seen.append(all(bool(values(p.detach()).isfinite().all()) for p in toy.parameters()))
            losses = toy.closure(tasks)
            return {t: loss * math.nan if t == bad and len(seen) == call else loss for t, loss in losses.items()}

        with Device():
            move(toy)
            parameters, mtl = toy.split(), FlatMTL(CAGrad(), SAM(0.1), on_nonfinite=mode)
            before = [values(p.detach()).clone() for p in toy.parameters()]
            happens = call == 1 or TASKS.index(bad) == call - 2
            if mode == "raise" and happens:
                with pytest.raises(FloatingPointError, match=f"task '{bad}' is nan"):
                    mtl.backward(closure, parameters)
            else:
                result = mtl.backward(closure, parameters)
                assert result.dropped == ((bad,) if happens else ())
                assert result.skipped == (happens and mode == "skip_step")
            after = [values(p.detach()) for p in toy.parameters()]
        assert all(seen)
        assert_same(after, before)


@pytest.mark.filterwarnings("ignore:the parameters of .* still hold the gradient")
@pytest.mark.parametrize("name", EVERY)
def test_a_model_may_move_to_another_device_between_steps(name):
    """The state of an aggregator, and weights of losses that are trained, go on there."""
    found = []
    for moves in (False, True):
        toy, mtl = Toy().float(), FlatMTL(aggregator(name), SAM(0.1))
        toy.x, toy.y = toy.x.float(), {t: y.float() for t, y in toy.y.items()}
        mtl.backward(toy.closure, toy.split())
        toy.zero_grad()
        with Device() if moves else nullcontext():
            if moves:
                move(toy)
            mtl.start_epoch(2)
            mtl.backward(toy.closure, toy.split())
        found.append(([values(p.grad) for p in toy.parameters()], mtl.state_dict()))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def move(toy: Toy) -> None:
    for module in list(toy.modules()):
        for name, p in module._parameters.items():
            module._parameters[name] = nn.Parameter(Elsewhere(p.detach().float()))
    toy.x, toy.y = Elsewhere(toy.x), {t: Elsewhere(y) for t, y in toy.y.items()}


class TestTransfers:
    """A step makes the host wait for one transfer for each branch, and not before there is work to wait beside."""

    def step(self, method: str | Callable[[Tensor], Tensor], perturbation: SAM | None) -> list[int | str]:
        """Return what a second step, in float32 on a device of its own, appends to the log."""
        toy = Toy()
        with Device() as device:
            move(toy)
            mtl, parameters = (
                FlatMTL(aggregator(method) if isinstance(method, str) else method, perturbation),
                toy.split(),
            )
            mtl.backward(toy.closure, parameters)
            device.log.clear()
            toy.trunk[0].weight.register_hook(lambda g: device.log.append("backward"))
            mtl.backward(toy.closure, parameters)
        return device.log

    @pytest.mark.parametrize("name", GRAMIAN)
    def test_there_is_one_for_each_branch(self, name):
        assert self.step(name, None) == [*["backward"] * 3, 9 + 3 + 3]  # Gramian, losses, heads
        log = self.step(name, SAM(0.1))
        assert [entry for entry in log if entry != "backward"] == [9 + 3 + 3, 9 + 3 + 3 + 3 + 3]  # and <g, f>, <d, f>

    @pytest.mark.parametrize("perturbation", [SAM(0.1), ASAM(0.5), ASAM(0.5, norm="joint")], ids=repr)
    def test_the_first_perturbed_pass_is_begun_before_the_first_is_waited_for(self, perturbation):
        log = self.step("cagrad", perturbation)
        assert [entry == "backward" for entry in log] == [True] * 4 + [False] + [True] * 2 + [False]

    @pytest.mark.parametrize("name", WEIGHTINGS)
    def test_a_loss_weighting_needs_the_losses_first(self, name):
        assert self.step(name, None) == [3, "backward", 1]
        log = self.step(name, SAM(0.1))
        assert log[:2] == [3, "backward"]
        assert sum(entry != "backward" for entry in log) <= 3

    def test_the_direction_of_a_function_is_looked_at_for_each_branch(self):
        log = self.step(lambda J: J.mean(0), SAM(0.1))
        assert [entry for entry in log if entry != "backward"] == [15, 1, 21, 1]
