"""What the ranks of a team run on models under fully_shard."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from tests.flatmtl.team import TASKS, Batch, Net, by_products, closure_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor

from flatmtl import FlatMTL, TaskParameters, split_parameters


class Sharding(NamedTuple):
    """How a model is sharded: as a whole, or each block of it apart too."""

    blocks: bool = False
    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True


class Plan(NamedTuple):
    """What to do: ``make()`` returns the multi-task step, ``batches`` are those of each rank."""

    make: Callable[[], FlatMTL]
    batches: Sequence[Sequence[Batch]]
    steps: int = 1
    norm: type[nn.Module] | None = None
    dropout: float = 0.0
    dtype: torch.dtype = torch.float64


def mesh_of(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


def sharded(model: nn.Module, group: Any, sharding: Sharding) -> Any:
    options: dict[str, Any] = {"mesh": mesh_of(group)}
    if sharding.reshard_after_forward is not None:
        options["reshard_after_forward"] = sharding.reshard_after_forward
    for block in [*model.trunk, *model.heads.values()] if sharding.blocks else []:
        if any(True for _ in block.parameters()):
            fully_shard(block, **options)
    wrapped: Any = fully_shard(model, **options)
    wrapped.set_reshard_after_backward(sharding.reshard_after_backward)
    return wrapped


def whole(tensor: Any) -> Any:
    """Return a copy of all of a tensor that may be sharded, or None."""
    return None if tensor is None else getattr(tensor.detach(), "full_tensor", tensor.detach().clone)()


def own(tensor: Any) -> Tensor:
    """Return a copy of what this rank holds of a tensor that may be sharded."""
    return getattr(tensor.detach(), "to_local", tensor.detach().clone)().clone()


def owners(model: Any) -> TaskParameters:
    return TaskParameters(model.trunk.parameters(), {t: model.heads[t].parameters() for t in TASKS}, model)


def contents(model: nn.Module) -> dict[str, Any]:
    """Return what a step may touch, of this rank; state_dict() would drop gathered parameters on the way."""
    return {
        "kinds": {name: type(p).__name__ for name, p in model.named_parameters()},
        "weights": {name: own(p) for name, p in model.named_parameters()},
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "gradients": {name: None if p.grad is None else own(p.grad) for name, p in model.named_parameters()},
    }


def train(group: Any, rank: int, plan: Plan, sharding: Sharding | None = None) -> dict[str, Any]:
    """Train with a look at a validation batch before each update, and return what came of it, gathered."""
    torch.manual_seed(100 + rank)
    model: Any = Net(plan.norm, plan.dropout, plan.dtype)
    mtl = plan.make()
    if sharding is not None:
        sharded(model, group, sharding)
    elif group is not None:
        mtl.process_group = group
    parameters = owners(model)
    optimizer = torch.optim.AdamW([*model.parameters(), *mtl.parameters()], lr=0.05, weight_decay=0.1)
    result, seen = None, []
    kinds = {type(p) for p in model.parameters()}
    for number in range(plan.steps):
        closures = [closure_of(model, batch, number) for batch in plan.batches[rank]]
        optimizer.zero_grad()
        result = mtl.backward(closures, parameters)
        assert {type(p) for p in model.parameters()} == kinds
        with torch.no_grad():
            model.eval()
            seen.append(closure_of(model, Batch(0, 4), 99)(TASKS))
            model.train()
        if number < plan.steps - 1:
            optimizer.step()
            mtl.after_step(closures)
            if getattr(mtl.aggregator, "learns_from_step", False):
                assert {type(p) for p in model.parameters()} == kinds
    assert result is not None
    everything = dict(zip(parameters.everything, range(100), strict=False))
    return {
        "gradients": {i: whole(p.grad) for p, i in everything.items()},
        "weights": {i: whole(p) for p, i in everything.items()},
        "buffers": [b.clone() for b in model.buffers()],
        "own": [whole(p.grad) for p in mtl.parameters()],
        "seen": seen,
        **by_products(result),
    }


def small(group: Any, rank: int, make: Callable[[], FlatMTL], sharding: Sharding | None, scale: float) -> list[Tensor]:
    """Return the gradients of losses times a factor, over it, where only the first rank holds a shared parameter."""
    model: Any = Net()
    model.gain = nn.Parameter(torch.ones(1, dtype=torch.float64))
    model.trunk.register_forward_hook(lambda _module, _arguments, output: output * model.gain)
    if sharding is not None:
        sharded(model, group, sharding)
    parameters = TaskParameters([model.gain], {t: model.heads[t].parameters() for t in TASKS}, model)
    closure = closure_of(model, Batch(0, 24))

    def scaled(tasks: Sequence[str]) -> dict[str, Tensor | None]:
        return {task: loss * scale for task, loss in closure(tasks).items() if loss is not None}

    make().backward(scaled, parameters)
    return [whole(p.grad) / scale for p in parameters.everything]


def adds(group: Any, rank: int, make: Callable[[], FlatMTL]) -> dict[str, Any]:
    """Return what a step adds to gradients that are there, how often hooks run, and what it leaves of a stranger."""
    model = sharded(Net(), group, Sharding(blocks=True))
    parameters, closure, factor = owners(model), closure_of(model, Batch(12 * rank, 12 * rank + 12)), torch.ones(())
    factor.requires_grad_()
    factor.grad = torch.full((), 5.0)
    ran: list[str] = []
    factor.register_post_accumulate_grad_hook(lambda _: ran.append("factor"))
    parameters.shared[0].register_post_accumulate_grad_hook(lambda _: ran.append("trunk"))
    fresh = [whole(g) for g in _step(make, closure, parameters)]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    held = [p.grad for p in parameters.everything]
    before = contents(model)
    before.pop("gradients")
    ran.clear()
    added = _step(
        make, lambda tasks: {t: loss * factor for t, loss in closure(tasks).items() if loss is not None}, parameters
    )
    return {
        "same": all(a is b for a, b in zip(added, held, strict=True)),
        "difference": [whole(g) - 1.0 for g in added],
        "fresh": fresh,
        "ran": ran,
        "stranger": float(factor.grad),
        "before": before,
        "after": {key: value for key, value in contents(model).items() if key != "gradients"},
    }


def _step(make: Callable[[], FlatMTL], closure: Any, parameters: TaskParameters) -> list[Any]:
    make().backward(closure, parameters)
    return [p.grad for p in parameters.everything]


def memory(group: Any, rank: int, make: Callable[[], FlatMTL]) -> tuple[int, int, int]:
    """Return how many entries rows and places have, this rank's shards, and the shared parameters."""
    mtl, parameters = make(), owners(model := sharded(Net(), group, Sharding()))
    mtl.backward(closure_of(model, Batch(0, 12)), parameters)
    rows = mtl._rows
    assert rows is not None
    extra = rows.direction.numel() + sum(place.numel() for place in rows.places)
    shards, wholes = (sum(f(p).numel() for p in parameters.shared) for f in (own, whole))
    return rows.matrix.numel() + extra, shards, wholes


def copies(group: Any, rank: int, make: Callable[[], FlatMTL]) -> list[Any]:
    """Return the gradients of a step by a copy of what did one before."""
    mtl, parameters = make(), owners(model := sharded(Net(), group, Sharding()))
    closure = closure_of(model, Batch(12 * rank, 12 * rank + 12))
    mtl.backward(closure, parameters)
    for p in model.parameters():
        p.grad = None
    return [whole(g) for g in _step(lambda: copy.deepcopy(mtl), closure, parameters)]


class Spoilt(torch.autograd.Function):
    """The identity, whose backward pass raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise KeyError("spoilt")


@contextmanager
def spoiling(module: nn.Module, where: str, call: int) -> Iterator[None]:
    """Let one pass fail in the middle of a module, forwards or backwards."""
    calls = [0]

    def spoil(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] < call:
            return output
        if where == "forward":
            raise KeyError("spoilt")
        return Spoilt.apply(output)

    handle = module.register_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


def raising(tasks: Sequence[str]) -> dict[str, Tensor | None]:
    """A closure that fails before it runs the model."""
    raise KeyError("spoilt")


def fails(
    group: Any, rank: int, make: Callable[[], FlatMTL], sharding: Sharding, where: str, call: int
) -> dict[str, Any]:
    """Return what is there before and after a step that fails, and the gradients of a step after it."""
    model = sharded(Net(nn.BatchNorm1d), group, sharding)
    parameters, closure, mtl = owners(model), closure_of(model, Batch(12 * rank, 12 * rank + 12)), make()
    for p in parameters.shared:
        p.grad = torch.ones_like(p)
    before = contents(model)
    try:
        with spoiling(model.trunk, where, call):
            mtl.backward(raising if where == "closure" else closure, parameters)
        error = ""
    except KeyError as caught:
        error = str(caught)
    after = contents(model)
    for p in model.parameters():
        p.grad = None
    mtl.backward(closure, parameters)
    return {"error": error, "before": before, "after": after, "next": [whole(p.grad) for p in parameters.everything]}


def fails_without_reset(group: Any, rank: int, make: Callable[[], FlatMTL]) -> None:
    """Go on after a failed backward pass where PyTorch cannot begin anew."""
    kind = next(kind for kind in type(sharded(Net(), group, Sharding())).__mro__ if kind.__name__ == "FSDPModule")
    reset = kind.reset_iter_state
    del kind.reset_iter_state
    try:
        fails(group, rank, make, Sharding(), "backward", 1)
    finally:
        kind.reset_iter_state = reset


def draws(group: Any, rank: int, make: Callable[[], FlatMTL]) -> list[Any]:
    """Return gradients of a step in whose perturbed passes one rank draws more random numbers than in the clean one."""
    model = sharded(Net(), group, Sharding())
    parameters, closure = owners(model), closure_of(model, Batch(12 * rank, 12 * rank + 12))

    def drawing(tasks: Sequence[str]) -> dict[str, Tensor | None]:
        if rank == 1 and len(tasks) < len(TASKS):
            torch.rand(1)
        return closure(tasks)

    return [whole(g) for g in _step(make, drawing, parameters)]


def split(group: Any, rank: int, sharding: Sharding | None) -> dict[str, list[str]]:
    """Return the names of the parameters that each task owns."""
    model: Any = Net() if sharding is None else sharded(Net(), group, sharding)
    names = {p: name for name, p in model.named_parameters()}
    closure_of(model, Batch(0, 4))(TASKS)  # after it the model lists gathered parameters
    parameters = split_parameters(model, closure_of(model, Batch(0, 12)), TASKS)
    assert all(p.grad is None for p in model.parameters())
    return {owner: [names[p] for p in own] for owner, own in {"shared": parameters.shared, **parameters.heads}.items()}


def refused(group: Any, rank: int, make: Callable[[], FlatMTL], what: str) -> None:
    """Do something that is refused."""
    model: Any = Net()
    if what == "another kind":
        distribute_module(model, mesh_of(group), lambda name, module, mesh: _distribute(module, mesh))
    elif what == "two axes":
        fully_shard(model, mesh=DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replicate", "shard")))
    elif what == "two meshes":
        fully_shard(model.heads["left"], mesh=DeviceMesh("cpu", [0, 1], mesh_dim_names=("other",)))
        fully_shard(model, mesh=mesh_of(group))
    elif what == "a part":
        fully_shard(model.trunk, mesh=mesh_of(group))
    else:
        sharded(model, group, Sharding())
    if what == "gathered":
        closure_of(model, Batch(0, 4))(TASKS)
    if what == "no model":
        TaskParameters(model.trunk.parameters(), {t: model.heads[t].parameters() for t in TASKS})
    trunk = [*model.trunk.parameters()]
    parameters = TaskParameters(trunk, {t: model.heads[t].parameters() for t in TASKS}, model)
    if what == "divide factor":
        model.set_gradient_divide_factor(1.0)
    if what == "no sync":
        model.set_requires_gradient_sync(False)
    mtl = make()
    if what == "another group":
        mtl.process_group = torch.distributed.new_group([rank], use_local_synchronization=True)
    mtl.backward(closure_of(model, Batch(0, 12)), parameters)


def _distribute(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, p in list(module._parameters.items()):
        if p is not None:
            module.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate()])))


def overflows(group: Any, rank: int, make: Callable[[], FlatMTL]) -> list[Tensor]:
    """Return this rank's gradients after the loss of the last rank was not finite under a gradient scaler."""
    model = sharded(Net(), group, Sharding())
    parameters, closure = owners(model), closure_of(model, Batch(12 * rank, 12 * rank + 12))
    last = rank == torch.distributed.get_world_size(group) - 1

    def spoilt(tasks: Sequence[str]) -> dict[str, Tensor | None]:
        return {t: loss * (1e300 if last else 1.0) for t, loss in closure(tasks).items() if loss is not None}

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    make().backward(spoilt, parameters, scaler=scaler)
    return [own(p.grad) for p in parameters.everything]


def drops(group: Any, rank: int, make: Callable[[], FlatMTL]) -> tuple[str, ...]:
    """Return the tasks that are dropped as one rank's loss of one is not a number."""
    model = sharded(Net(), group, Sharding())
    closure = closure_of(model, Batch(12 * rank, 12 * rank + 12))

    def spoilt(tasks: Sequence[str]) -> dict[str, Tensor | None]:
        losses = closure(tasks)
        return {t: loss * (float("nan") if rank == 1 and t == "right" else 1.0) for t, loss in losses.items()}

    return make().backward(spoilt, owners(model)).dropped
