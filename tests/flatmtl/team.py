"""A team of processes that run functions together, each as one rank of a gloo group, and what they run."""

import datetime
import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

from flatmtl import FlatMTL, StepResult, TaskParameters

TASKS = ("left", "right", "third")
MOST = 3


class Failed(NamedTuple):
    """What a rank raised."""

    kind: str
    message: str
    trace: str


class Team:
    """Three processes; :meth:`run` lets the first ``size`` of them run a function."""

    def __init__(self, folder: Any) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(MOST)]
        self._pipes = [here for here, _ in pipes]
        self._processes = [
            context.Process(target=_work, args=(rank, there, f"file://{folder}/store"), daemon=True)
            for rank, (_, there) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what each rank returned, or :class:`Failed`; ``function(group, rank, *arguments)`` is called."""
        for pipe in self._pipes[:size]:
            pipe.send((size, function, arguments))
        found = []
        for pipe in self._pipes[:size]:
            assert pipe.poll(60), "a rank hangs"
            found.append(pipe.recv())
        return found

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _work(rank: int, pipe: Any, store: str) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=40)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=MOST, timeout=timeout)
    groups = {size: distributed.new_group(list(range(size)), timeout=timeout) for size in (1, 2, MOST)}
    while True:
        size, function, arguments = pipe.recv()
        try:
            answer = function(groups[size], rank, *arguments)
        except BaseException as error:
            answer = Failed(type(error).__name__, str(error), traceback.format_exc())
        pipe.send(answer)


class Net(nn.Module):
    """A trunk with three heads, called as a whole as a wrapper wants it."""

    def __init__(self, norm: type[nn.Module] | None = None, dropout: float = 0.0, dtype: torch.dtype = torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        middle = [] if norm is None else [norm(6)]
        self.trunk = nn.Sequential(nn.Linear(4, 6), *middle, nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Dropout(dropout))
        self.heads = nn.ModuleDict({task: nn.Linear(5, 2) for task in TASKS})
        self.to(dtype)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)

    def forward(self, x: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        z = self.trunk(x)
        return {task: self.heads[task](z) for task in tasks}


class Batch(NamedTuple):
    """A micro-batch: from which sample to which, and the tasks that have labels in it."""

    first: int
    last: int
    tasks: tuple[str, ...] = TASKS


def closure_of(model: nn.Module, batch: Batch, number: int = 0) -> Callable[[Sequence[str]], dict[str, Tensor | None]]:
    """Return the closure of a micro-batch of step ``number``."""
    generator = torch.Generator().manual_seed(2 + number)
    dtype = next(model.parameters()).dtype
    x = torch.randn(24, 4, generator=generator, dtype=torch.float64).to(dtype)[batch.first : batch.last]
    y = {task: torch.randn(24, 2, generator=generator, dtype=torch.float64).to(dtype) for task in TASKS}

    def closure(tasks: Sequence[str]) -> dict[str, Tensor | None]:
        outputs = model(x, tasks)
        return {
            task: F.mse_loss(outputs[task], y[task][batch.first : batch.last]) if task in batch.tasks else None
            for task in tasks
        }

    return closure


class SyncedNorm(nn.SyncBatchNorm):
    """Batch normalization over all ranks on the CPU, which PyTorch's refuses."""

    def forward(self, x: Tensor) -> Tensor:
        sums = torch.cat([x.sum(0), x.square().sum(0), x.new_full((1,), len(x))])
        if self.process_group is not None:
            sums = all_reduce(sums, group=self.process_group)
        mean, square = sums[:-1].view(2, -1) / sums[-1]
        variance = square - mean**2
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


class Plan(NamedTuple):
    """What to do: ``make()`` returns the multi-task step of a group, ``batches`` are those of each rank.

    With ``wrapper`` options the model is wrapped in DistributedDataParallel; else the group is given.
    """

    make: Callable[[Any], FlatMTL]
    batches: Sequence[Sequence[Batch]]
    steps: int = 1
    wrapper: dict[str, Any] | None = None
    norm: type[nn.Module] | None = None
    dtype: torch.dtype = torch.float64


def train(group: Any, rank: int, plan: Plan) -> dict[str, Any]:
    """Train, and return the last gradients and results, weights and buffers."""
    torch.manual_seed(100 + rank)
    model = Net(plan.norm, dtype=plan.dtype)
    for module in model.modules():
        if isinstance(module, SyncedNorm):
            module.process_group = group
    closed: nn.Module = model
    if plan.wrapper is not None and group is not None:
        closed = DistributedDataParallel(model, process_group=group, **plan.wrapper)
    mtl = plan.make(None if closed is not model else group)
    parameters = TaskParameters(model.trunk.parameters(), {t: model.heads[t].parameters() for t in TASKS}, closed)
    optimizer = torch.optim.AdamW([*model.parameters(), *mtl.parameters()], lr=0.05, weight_decay=0.1)
    result, weights = None, []
    for number in range(plan.steps):
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
        closures = [closure_of(closed, batch, number) for batch in plan.batches[rank]]
        optimizer.zero_grad()
        result = mtl.backward(closures, parameters)
        if number < plan.steps - 1:
            optimizer.step()
            mtl.after_step(closures)
    assert result is not None
    return {
        "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "own": [None if p.grad is None else p.grad.clone() for p in mtl.parameters()],
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "weights": weights,
        **by_products(result),
    }


def by_products(result: StepResult) -> dict[str, Any]:
    """Return what a step found out beside its gradients."""
    names = (
        "losses",
        "perturbed_losses",
        "gramian_loss",
        "gramian_flat",
        "weights_loss",
        "intra",
        "inter",
        "skipped",
        "dropped",
    )
    return {name: getattr(result, name) for name in names}


def mean_of(results: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the mean over several results of each gradient."""
    return {
        name: torch.stack([found["gradients"][name] for found in results]).mean(dim=0)
        for name in results[0]["gradients"]
    }
