"""What ranks of a team run in tests of ranks, beside training."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.flatmtl.team import TASKS, Batch, Net, closure_of
from tests.flatmtl.toys import SpoilGradient
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from flatmtl import SAM, FlatMTL, TaskParameters, split_parameters
from flatmtl.aggregators import GramianAggregator, LossWeighting
from flatmtl.ranks import Ranks

Closure = Callable[[Sequence[str]], Any]


def halves(rank: int) -> Batch:
    return Batch(12 * rank, 12 * rank + 12)


def split(model: Net) -> TaskParameters:
    return TaskParameters(model.trunk.parameters(), {t: model.heads[t].parameters() for t in TASKS}, model)


def make_random(group: Any) -> FlatMTL:
    """An aggregator that draws from the global stream, of which each rank has its own."""
    return FlatMTL(lambda J: torch.rand(len(J), dtype=J.dtype) @ J, SAM(0.1), process_group=group)


def spoil(closure: Closure, rank: int, *, calls: Sequence[int] = (1,), gradient: bool = False) -> Closure:
    """On the second rank the loss of one task, or its gradient, is not finite in some calls that ask for it."""
    count = [0]

    def spoilt(tasks: Sequence[str]) -> Any:
        losses = closure(tasks)
        if rank == 1 and "right" in losses:
            count[0] += 1
            if count[0] in calls:
                loss = losses["right"]
                losses["right"] = loss + (SpoilGradient.apply(loss) if gradient else loss * float("nan"))
        return losses

    return spoilt


def spoil_alone(closure: Closure, rank: int, *, calls: Sequence[int]) -> Closure:
    """The second rank has the task that is not finite, and no other."""
    spoilt = spoil(closure, rank, calls=calls)

    def only(tasks: Sequence[str]) -> Any:
        return {task: loss if rank == 0 or task == "right" else None for task, loss in spoilt(tasks).items()}

    return only


def fail(closure: Closure, rank: int) -> Closure:
    """On the second rank the closure raises."""

    def failing(tasks: Sequence[str]) -> Any:
        if rank == 1:
            raise KeyError("the second rank has no such file")
        return closure(tasks)

    return failing


def step_with(group: Any, rank: int, change: Callable[..., Closure], make: Any, name: str, perturbation: Any) -> Any:
    """Do one step with a changed closure."""
    model = Net()
    before = [p.detach().clone() for p in model.parameters()]
    try:
        closure = change(closure_of(model, halves(rank)), rank)
        result = make(name, perturbation, group).backward(closure, split(model))
    finally:
        assert all(map(torch.equal, before, model.parameters()))
    return {
        "dropped": result.dropped,
        "skipped": result.skipped,
        "gradient of right": model.heads["right"].weight.grad,
    }


def overflow(group: Any, rank: int, make: Any) -> Any:
    """A gradient overflows on one rank, with a gradient scaler."""
    model = Net(dtype=torch.float32)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    closure = spoil(closure_of(model, halves(rank)), rank, gradient=True)
    result = make("cagrad", "sam", group).backward(closure, split(model), scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    same = all(map(torch.equal, before, model.parameters()))
    return {"skipped": result.skipped, "same weights": same, "scale": scaler.get_scale()}


def split_otherwise(group: Any, rank: int, make: Any) -> Any:
    """One rank's trunk has a layer more in the head."""
    model = Net()
    layers = list(model.trunk)
    shared, rest = (layers[0], layers[1:]) if rank else (model.trunk, [])
    heads = {t: [*model.heads[t].parameters()] for t in TASKS}
    heads["left"] += [p for layer in rest for p in layer.parameters()]
    make("cagrad", "sam", group).backward(closure_of(model, halves(rank)), TaskParameters(shared.parameters(), heads))


def outside(group: Any, rank: int, make: Any) -> Any:
    """The group has the first two ranks only."""
    two = torch.distributed.new_group([0, 1])
    if rank == 2:
        make("cagrad", "sam", two)


def take_turns_with_backward(group: Any, rank: int, flags: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Return gradients of ordinary backward passes between steps, with those where there are no such steps."""
    found = []
    for mixed in (True, False):
        model = Net()
        wrapped = DistributedDataParallel(model, process_group=group, **flags)
        parameters = split_parameters(wrapped, closure_of(wrapped, halves(rank)), TASKS)
        mtl = FlatMTL(lambda J: J.sum(dim=0), SAM(0.1))
        gradients = []
        for number in range(3):
            closure = closure_of(wrapped, halves(rank), number)
            if mixed:
                mtl.backward(closure, parameters)
                model.zero_grad()
            sum(closure(TASKS).values()).backward()
            gradients.append(model.trunk[0].weight.grad.clone())
            wrapped.zero_grad()
        found.append(torch.stack(gradients))
    return [(found[0], found[1])]


def record(group: Any, rank: int, make: Any, name: str, perturbation: Any) -> list[tuple[str, Any]]:
    """Return what happens in a step: forward passes, rows that are sent, and rows that arrive."""
    events: list[tuple[str, Any]] = []
    model = Net()
    inner, parameters = closure_of(model, halves(rank)), split(model)
    n = sum(p.numel() for p in parameters.shared)

    class Watched:
        def __init__(self, work: Any, number: int) -> None:
            self.work, self.number = work, number

        def wait(self) -> None:
            events.append(("arrive", self.number))
            self.work.wait()

    def closure(tasks: Sequence[str]) -> Any:
        events.append(("forward", tuple(tasks)))
        return inner(tasks)

    def start(self: Ranks, tensor: Tensor) -> Any:
        work = plain(self, tensor)
        if tensor.numel() != n:
            return work
        events.append(("send", sum(kind == "send" for kind, _ in events) % len(TASKS)))
        return Watched(work, events[-1][1])

    plain = Ranks.start
    Ranks.start = start  # in this process, which is the test's own
    try:
        make(name, perturbation, group).backward(closure, parameters)
    finally:
        Ranks.start = plain
    return events


def with_scales(group: Any, rank: int, make: Any, name: str) -> list[list[Tensor]]:
    """Return the unscaled gradients of a step without a scaler, and with scalers of several scales."""
    found = []
    for scale in (None, 1.0, 4096.0):
        model = Net(dtype=torch.float32)
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        make(name, "sam", group).backward(closure_of(model, halves(rank)), split(model), scaler=scaler)
        found.append([p.grad / (scale or 1.0) for p in model.parameters()])
    return found


def with_mixed_precision(group: Any, rank: int) -> None:
    """A wrapper that casts."""
    wrapped = DistributedDataParallel(Net(dtype=torch.float32), process_group=group)
    wrapped.mixed_precision = object()  # the wrapper itself takes it on accelerators only
    split_parameters(wrapped, closure_of(wrapped, halves(rank)), TASKS)


def step_within_a_step(group: Any, rank: int, make: Any) -> list[bool]:
    """Return whether the wrapper is left alone until the end of a step whose closure does another step."""
    wrapped = DistributedDataParallel(Net(), process_group=group)
    plain = closure_of(wrapped, halves(rank))
    parameters = split_parameters(wrapped, plain, TASKS)
    asides = []

    def closure(tasks: Sequence[str]) -> Any:
        make("mean", "plain", group).backward(plain, parameters)
        asides.append("forward" in vars(wrapped))  # the inner step leaves it to the outer one
        return plain(tasks)

    make("mean", "plain", group).backward(closure, parameters)
    return [*asides, "forward" not in vars(wrapped)]


class Draws(GramianAggregator):
    """Weights drawn from the global stream."""

    def weights(self, G: Tensor) -> Tensor:
        return torch.rand(len(G), dtype=torch.float64)


class DrawsForLosses(LossWeighting):
    """Weights drawn from the global stream."""

    def weights(self, losses: Tensor, context: Any = None) -> Tensor:
        return torch.rand(len(losses), dtype=torch.float64)


def make_drawing(kind: type, group: Any) -> FlatMTL:
    return FlatMTL(kind(), SAM(0.1), process_group=group)


def differ(group: Any, rank: int, options: Sequence[dict[str, Any]], aggregators: Sequence[Any]) -> None:
    """The ranks do different things."""
    model = Net()
    mtl = FlatMTL(aggregators[rank], process_group=group, **options[rank])
    mtl.backward(closure_of(model, halves(rank)), split(model))


def begin_apart(group: Any, rank: int, make: Any) -> None:
    """The ranks begin with other weights."""
    model = Net()
    with torch.no_grad():
        model.heads["left"].weight.mul_(1.0 + 0.01 * rank)
    make("cagrad", "sam", group).backward(closure_of(model, halves(rank)), split(model))


def freeze_another(group: Any, rank: int, make: Any) -> None:
    """Each rank freezes another layer of one shape."""
    model = Net()
    layers = torch.nn.ModuleList([torch.nn.Linear(5, 5, dtype=torch.float64) for _ in range(2)])
    layers[rank].requires_grad_(False)
    shared = [*model.trunk.parameters(), *layers.parameters()]
    whole = torch.nn.ModuleDict({"net": model, "layers": layers})
    heads = {t: model.heads[t].parameters() for t in TASKS}
    make("cagrad", "sam", group).backward(closure_of(model, halves(rank)), TaskParameters(shared, heads, whole))
