"""Time and memory of a whole step, against its floor: the bare forward and backward passes of the same model.

Every step is run beside its floor in the same process, in pairs whose order is swapped from one to the next; what
counts is the median of the pairs' ratios. A process has one contender alone, as a training has, and ours get two:
how memory falls out differs from process to process. ``python benchmarks/step.py`` writes ``results/step.json`` beside
this file (15 to 20 minutes on 2 cores that do nothing else); ``--cases lenet --rounds 3`` is a glance,
``--profile lenet`` prints what a step allocates.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

import torch
import torchjd.aggregation
import torchjd.autojac
import tyro
from torch import Tensor, autograd, nn
from torch.nn import functional as F

from flatmtl import ASAM, SAM, FlatMTL, TaskParameters
from flatmtl.aggregators import MGDA
from flatmtl_bench.choices import one_of
from flatmtl_bench.environment import environment
from flatmtl_bench.files import write_whole
from flatmtl_bench.memory import allocations, recorded
from flatmtl_bench.models import MultiHead, build

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
MEMORY_GOAL = {"shared_parameters": 2.0, "tolerance": 1.05}
"""How many copies of the shared parameters a flat step may hold beyond the plain one's peak, and a factor on it all."""


@dataclass(frozen=True)
class Options:
    """Measure the step against its floor and its peers, and write the result as JSON."""

    cases: tuple[str, ...] = ()
    """Names of cases; none: all of them."""
    processes: int = 2
    """Each contender has at most so many, one after the other."""
    rounds: int = 15
    """In each process a step is run so many times beside its floor."""
    least_rounds: int = 5
    """No process has fewer rounds, unless ``rounds`` is less."""
    seconds: float = 10.0
    """After so much time in a process no further round begins."""
    memory_steps: int = 20
    """The memory of so many steps is measured."""
    memory_seconds: float = 5.0
    """After so much time no further one of these begins, once there are 3."""
    threads: int = 2
    """Threads of PyTorch."""
    clock: Literal["wall", "cpu"] = "wall"
    """cpu: the time of this process, for a machine that has other things to do, with one thread."""
    device: str = "cpu"
    """Where to run: cpu or cuda."""
    profile: str | None = None
    """Print the large allocations of each of our steps in this case, and measure nothing."""
    out: Path = Path(__file__).parent / "results" / "step.json"
    """The file to write."""


CLASSES = 10


class Transformer(nn.Sequential):
    """A small encoder of sequences of symbols, averaged over the sequence: 3 layers of width 128, with dropout."""

    symbols, width = 1000, 128

    def __init__(self) -> None:
        layer = nn.TransformerEncoderLayer(self.width, nhead=4, dim_feedforward=512, batch_first=True)
        encoder = nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False)
        super().__init__(nn.Embedding(self.symbols, self.width), encoder)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Return the mean representation of each sequence."""
        return super().forward(input).mean(dim=1)


class Problem:
    """A model with a batch, drawn at random.

    Attributes:
        model: encoder and heads.
        x: inputs.
        y: class labels of each task.
        parameters: who owns which parameter.
    """

    def __init__(self, model: MultiHead, x: Tensor) -> None:
        self.model = model
        self.x = x
        self.y = {task: torch.randint(CLASSES, (len(x),), device=x.device) for task in model.heads}
        self.parameters = TaskParameters(
            model.encoder.parameters(), {task: head.parameters() for task, head in model.heads.items()}, model=model
        )

    @property
    def tasks(self) -> list[str]:
        """The names of the tasks."""
        return list(self.y)

    @property
    def shared_bytes(self) -> int:
        """The size of the shared parameters."""
        return sum(p.nbytes for p in self.parameters.shared)

    def owned(self, task: str) -> list[nn.Parameter]:
        """Return the shared parameters and the task's own."""
        return [*self.parameters.shared, *self.parameters.heads[task]]

    def closure(self, tasks: Sequence[str]) -> dict[str, Tensor]:
        """Return the losses of ``tasks``."""
        return {task: F.cross_entropy(output, self.y[task]) for task, output in self.model(self.x, tasks).items()}


@dataclass(frozen=True)
class Case:
    """One model and batch.

    Attributes:
        label: what the docs call it.
        tasks: number of tasks.
        batch: batch size.
        make: from the number of tasks and the batch size to model and inputs.
        goal: the most that a flat step should take, over its floor; None if there is no goal.
    """

    label: str
    tasks: int
    batch: int
    make: Callable[[int, int], tuple[MultiHead, Tensor]]
    goal: float | None = None

    def problem(self, device: str) -> Problem:
        """Return model and batch, the same in each call."""
        torch.manual_seed(0)
        model, x = self.make(self.tasks, self.batch)
        return Problem(model.to(device), x.to(device))


def with_heads(encoder: nn.Module, width: int, tasks: int) -> MultiHead:
    """Return an encoder with linear heads."""
    return MultiHead(encoder, {f"task{i}": nn.Linear(width, CLASSES) for i in range(tasks)})


def pictures(name: str, tasks: int, batch: int) -> tuple[MultiHead, Tensor]:
    """Return a model of the harness and a batch of 36 x 36 pictures."""
    return build(name, {f"task{i}": CLASSES for i in range(tasks)}), torch.randn(batch, 1, 36, 36)


def sequences(tasks: int, batch: int) -> tuple[MultiHead, Tensor]:
    """Return a small transformer and a batch of sequences."""
    return with_heads(Transformer(), Transformer.width, tasks), torch.randint(Transformer.symbols, (batch, 32))


def vectors(tasks: int, batch: int) -> tuple[MultiHead, Tensor]:
    """Return a small multilayer perceptron and a batch of vectors."""
    encoder = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    return with_heads(encoder, 256, tasks), torch.randn(batch, 256)


CASES: dict[str, Case] = {
    "lenet": Case("LeNet", 2, 256, partial(pictures, "lenet"), goal=1.3),
    "resnet18_256": Case("ResNet-18", 2, 256, partial(pictures, "resnet18"), goal=1.05),
    "resnet18_64": Case("ResNet-18", 2, 64, partial(pictures, "resnet18"), goal=1.08),
    "resnet18_64_m10": Case("ResNet-18", 10, 64, partial(pictures, "resnet18"), goal=1.15),
    "transformer": Case("transformer", 3, 32, sequences),
    **{f"mlp_m{m}": Case("MLP", m, 256, vectors) for m in (2, 3, 10, 40)},
}


def clean_passes(problem: Problem) -> None:
    """Do the bare passes of a plain step: one forward pass, and each task's backward pass."""
    losses = problem.closure(problem.tasks)
    for task, loss in losses.items():
        autograd.grad(loss, problem.owned(task), retain_graph=task != problem.tasks[-1])


def clean_and_perturbed_passes(problem: Problem) -> None:
    """Do the bare passes of a flat step: those of a plain one, then both of trunk and head for each task."""
    clean_passes(problem)
    for task in problem.tasks:
        autograd.grad(problem.closure([task])[task], problem.owned(task))


def flatmtl_step(mtl: FlatMTL, problem: Problem) -> None:
    """Do our step."""
    mtl.backward(problem.closure, problem.parameters)


def torchjd_step(aggregator: torchjd.aggregation.Aggregator, chunk: int | None, problem: Problem) -> None:
    """Do TorchJD's step, with a backward pass for each ``chunk`` of the tasks (None: for all at once)."""
    features = problem.model.encoder(problem.x)
    losses = [F.cross_entropy(head(features), problem.y[task]) for task, head in problem.model.heads.items()]
    torchjd.autojac.mtl_backward(losses, features, parallel_chunk_size=chunk)
    torchjd.autojac.jac_to_grad(problem.parameters.shared, aggregator)


def step_by_hand(aggregate: Callable[[Tensor], Tensor], rho: float, problem: Problem) -> None:
    """Do a flat step as one writes it down from the paper, with SAM; nothing is known of dropout and BatchNorm."""
    shared = problem.parameters.shared
    losses = problem.closure(problem.tasks)
    clean = {task: gradients(loss, task, problem) for task, loss in losses.items()}
    flat = []
    for task, (g, h) in clean.items():
        own = problem.parameters.heads[task]
        saved = [p.detach().clone() for p in problem.owned(task)]
        with torch.no_grad():
            move(shared, rho * g / g.norm())
            move(own, rho * h / h.norm())
        g_sam, h_sam = gradients(problem.closure([task])[task], task, problem)
        with torch.no_grad():
            for p, old in zip(problem.owned(task), saved, strict=True):
                p.copy_(old)
        flat.append(g_sam - g)
        set_grad(own, h_sam)
    set_grad(shared, aggregate(torch.stack([g for g, _ in clean.values()])) + aggregate(torch.stack(flat)))


def gradients(loss: Tensor, task: str, problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the gradient of a task's loss on the shared parameters and on its head, each as one vector."""
    found = autograd.grad(loss, problem.owned(task), retain_graph=True)
    k = len(problem.parameters.shared)
    return torch.cat([g.flatten() for g in found[:k]]), torch.cat([h.flatten() for h in found[k:]])


def parts(parameters: Sequence[Tensor], vector: Tensor) -> list[Tensor]:
    """Return the parts of a vector in the shapes of the parameters."""
    pieces = vector.split([p.numel() for p in parameters])
    return [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]


def move(parameters: Sequence[Tensor], vector: Tensor) -> None:
    """Add a vector to parameters."""
    for p, part in zip(parameters, parts(parameters, vector), strict=True):
        p.add_(part)


def set_grad(parameters: Sequence[Tensor], vector: Tensor) -> None:
    """Let a vector be the gradient of parameters."""
    for p, part in zip(parameters, parts(parameters, vector), strict=True):
        p.grad = part


Step = Callable[[Problem], None]
FLOORS: dict[str, Step] = {"plain": clean_passes, "flat": clean_and_perturbed_passes}


@dataclass(frozen=True)
class Contender:
    """Somebody's step.

    Attributes:
        by: whose.
        kind: plain or flat.
        make: return a new one.
        processes: that time it, one after the other.
    """

    by: str
    kind: str
    make: Callable[[], Step]
    processes: int = 1


CONTENDERS = (
    Contender("flatmtl", "plain", lambda: partial(flatmtl_step, FlatMTL(MGDA())), 2),
    Contender("flatmtl, SAM", "flat", lambda: partial(flatmtl_step, FlatMTL(MGDA(), SAM(0.05))), 2),
    Contender("flatmtl, ASAM", "flat", lambda: partial(flatmtl_step, FlatMTL(MGDA(), ASAM(0.5))), 2),
    Contender("TorchJD", "plain", lambda: partial(torchjd_step, torchjd.aggregation.MGDA(), None)),
    Contender("TorchJD, one by one", "plain", lambda: partial(torchjd_step, torchjd.aggregation.MGDA(), 1)),
    Contender("by hand, SAM", "flat", lambda: partial(step_by_hand, MGDA(), 0.05)),
)


def main(options: Options) -> None:
    """Run everything, write the result and print a small table."""
    for name in [*options.cases, *([] if options.profile is None else [options.profile])]:
        one_of("case", name, CASES)
    torch.set_num_threads(options.threads)
    if options.profile is not None:
        print("\n".join(profiled(options.profile, options)))
        return
    result = run(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.out, json.dumps(result, indent=1) + "\n")


def run(options: Options) -> dict[str, Any]:
    """Return the result: for each case what it is, the times of every step, and the memory of every step and floor."""
    made_with = environment()
    return {
        "options": {name: getattr(options, name) for name in ("rounds", "threads", "clock", "device")},
        "memory_goal": MEMORY_GOAL,
        "cases": [measure(name, options) for name in options.cases or CASES],
        "environment": {**made_with, "packages": {**made_with["packages"], "torchjd": version("torchjd")}},
    }


def measure(name: str, options: Options) -> dict[str, Any]:
    """Return what one case came to, and print it."""
    case = CASES[name]
    problem = case.problem(options.device)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what vmap says of operators that it knows no batching rule for
        times = times_of_all(name, options)
        print("\n".join(time_lines(name, times)), flush=True)
        memory = memory_of_all(case, options)
        print("\n".join(memory_lines(name, memory, problem.shared_bytes)), flush=True)
    print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return {
        "name": name,
        "label": case.label,
        "tasks": case.tasks,
        "batch": case.batch,
        "goal": case.goal,
        "shared_bytes": problem.shared_bytes,
        "times": times,
        "memory": memory,
    }


def times_of_all(name: str, options: Options) -> list[dict[str, Any]]:
    """Return a record for each contender: the seconds of its floor and of its step, pair by pair, and their ratio."""
    records = []
    for number, contender in enumerate(CONTENDERS):
        found: list[list[float]] = []
        for _ in range(min(contender.processes, options.processes)):
            with ProcessPoolExecutor(1, get_context("spawn")) as alone:
                found += alone.submit(timed_pairs, name, number, options).result()
        records.append({"by": contender.by, "kind": contender.kind, **summary(found), "pairs": found})
    return records


def timed_pairs(name: str, number: int, options: Options) -> list[list[float]]:
    """Return the seconds of the floor and of the step of a contender, pair by pair.

    The first pair sets things up and does not count.
    """
    warnings.simplefilter("ignore")  # what vmap says of operators that it knows no batching rule for
    torch.set_num_threads(options.threads)
    contender, problem = CONTENDERS[number], CASES[name].problem(options.device)
    floor, step = FLOORS[contender.kind], contender.make()
    found, start = [], time.perf_counter()
    while len(found) <= options.rounds:
        if len(found) > options.least_rounds and time.perf_counter() - start > options.seconds:
            break
        found.append(timed_pair(floor, step, problem, options, swapped=len(found) % 2 == 1))
    return found[1:]


def summary(pairs: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the median and the lower and upper quartile of the pairs' ratios."""
    ratios = [own / bare for bare, own in pairs]
    low, middle, high = quantiles(ratios * 2 if len(ratios) == 1 else ratios, n=4, method="inclusive")
    return {"ratio": middle, "quartiles": [low, high]}


def timed_pair(floor: Step, step: Step, problem: Problem, options: Options, *, swapped: bool) -> list[float]:
    """Return the seconds of a floor and of a step, the step being first if ``swapped``."""
    both = [step, floor] if swapped else [floor, step]
    seconds = [timed(one, problem, options) for one in both]
    return seconds[::-1] if swapped else seconds


def timed(step: Step, problem: Problem, options: Options) -> float:
    """Return the seconds of one step that begins without gradients."""
    clock = CLOCKS[options.clock]
    problem.model.zero_grad()
    synchronise(problem)
    start = clock()
    step(problem)
    synchronise(problem)
    return round(clock() - start, 7)


def synchronise(problem: Problem) -> None:
    """Wait for the device."""
    if problem.x.is_cuda:
        torch.cuda.synchronize(problem.x.device)


def memory_of_all(case: Case, options: Options) -> list[dict[str, Any]]:
    """Return a record for each floor and each contender: its peaks, step by step, in bytes beyond model and batch."""
    floors = [("floor", kind, floor) for kind, floor in FLOORS.items()]
    steps = [*floors, *((contender.by, contender.kind, contender.make()) for contender in CONTENDERS)]
    return [
        {"by": by, "kind": kind, "peaks": peaks(step, case.problem(options.device), options)}
        for by, kind, step in steps
    ]


def peaks(step: Step, problem: Problem, options: Options) -> list[int]:
    """Return for each of some steps the most bytes that were alive at once, beyond those before the first step."""
    found: list[int] = []
    memory_of = cuda_memory if problem.x.is_cuda else cpu_memory
    before, start = 0, time.perf_counter()
    for number in range(options.memory_steps):
        if number >= 3 and time.perf_counter() - start > options.memory_seconds:
            break
        peak, change = memory_of(step, problem)
        found.append(before + peak)
        before += change
    return found


def cuda_memory(step: Step, problem: Problem) -> tuple[int, int]:
    """Return by how much memory rises at most during a step, and by how much it has risen after it."""
    device = problem.x.device
    before = torch.cuda.memory_allocated(device)
    problem.model.zero_grad()
    torch.cuda.reset_peak_memory_stats(device)
    step(problem)
    return torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before


def cpu_memory(step: Step, problem: Problem) -> tuple[int, int]:
    """Return by how much memory rises at most during a step, and by how much it has risen after it."""
    running = list(accumulate(size for _, size in allocations(recorded(partial(anew, step, problem)))))
    return max(running), running[-1]


def anew(step: Step, problem: Problem) -> None:
    """Do a step that has no gradients of the one before."""
    problem.model.zero_grad()
    step(problem)


def profiled(name: str, options: Options) -> list[str]:
    """Return the large allocations within our steps when everything is set up, and which functions made them.

    Those of the forward and backward passes themselves are left out.
    """
    problem = CASES[name].problem(options.device)
    lines = []
    for contender in CONTENDERS:
        if contender.by.startswith("flatmtl"):
            step = contender.make()
            for _ in range(2):
                anew(step, problem)
            events = recorded(partial(anew, step, problem), with_stack=True)
            found = [(size / problem.shared_bytes, callers(events, at)) for at, size in allocations(events) if size > 0]
            own = [(n, names) for n, names in found if not any(name.endswith(PASSES) for name in names)]
            large = [(n, names) for n, names in own if n >= 0.1]
            lines.append(
                f"{contender.by} {contender.kind}: {sum(n for n, _ in own):.2f} n allocated beyond the passes, "
                f"{len(large)} times 0.1 n or more"
            )
            lines += [f"  {n:6.2f} n  {' < '.join(names)}" for n, names in large]
    return lines


PASSES = (": evaluate", ": gradient")
"""The functions of flatmtl in which the model runs forward and backward."""


def callers(events: Sequence[Any], at: int) -> list[str]:
    """Return the operator and the functions of flatmtl that were running, the innermost first."""
    running = [event for event in events if event.start_ns() <= at < event.start_ns() + event.duration_ns()]
    names = [event.name() for event in sorted(running, key=lambda event: event.duration_ns())]
    return [name for name in names if name.startswith("aten::")][:1] + [name for name in names if "flatmtl/" in name]


def time_lines(case: str, times: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a small table of times."""
    lines = []
    for record in times:
        low, high = record["quartiles"]
        bare, own = (1000 * median(pair[i] for pair in record["pairs"]) for i in (0, 1))
        lines.append(
            f"{case:<16} {record['kind']:<6}{record['by']:<20} {own:9.1f} ms over {bare:9.1f} ms: "
            f"{record['ratio']:6.3f} ({low:.3f} to {high:.3f}, {len(record['pairs'])} pairs)"
        )
    return lines


def memory_lines(case: str, memory: Sequence[Mapping[str, Any]], n: int) -> list[str]:
    """Return a small table of peaks, in units of the shared parameters."""
    return [
        f"{case:<16} {record['kind']:<6}{record['by']:<20} peak {record['peaks'][0] / n:.2f} n first, "
        f"{max(record['peaks'][1:]) / n:.2f} n in {len(record['peaks']) - 1} more steps"
        for record in memory
    ]


if __name__ == "__main__":
    main(tyro.cli(Options))
