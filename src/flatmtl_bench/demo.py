"""The demonstration: CAGrad against F-CAGrad on real handwritten digits, from equal seeds."""

import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.context import SpawnProcess
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING

from rich.console import Console

from flatmtl_bench import recipes
from flatmtl_bench.files import write_whole
from flatmtl_bench.output import Stop, answer, say
from flatmtl_bench.progress import epoch_line, state, training_bars
from flatmtl_bench.protocols import Row
from flatmtl_bench.recipes import Config
from flatmtl_bench.reports import page, terminal
from flatmtl_bench.reports.comparison import Comparison
from flatmtl_bench.reports.reading import read
from flatmtl_bench.reports.results import tables
from flatmtl_bench.reports.section import Section
from flatmtl_bench.runs import RunFolder, run_name

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

Message = tuple[str, int, int, Row | None]
"""Name of a run, its steps done and all, and the metrics of an epoch that has just ended."""

PLAIN, FLAT = "multimnist_cagrad", "multimnist_f_cagrad"


@dataclass(frozen=True)
class Demo:
    """Train CAGrad and F-CAGrad on pairs of real handwritten digits, print what came out and write a page.

    Runs that are there are not trained again, and interrupted ones go on.
    """

    seeds: int = 2
    """Number of seeds; both methods start from the same ones."""
    epochs: int = 12
    """Passes over the training pairs."""
    rho: float = 1.0
    """Radius of F-CAGrad's adaptive perturbation (ASAM)."""
    pairs: int = 8000
    """Pairs of digits to train on."""
    out: str = "runs"
    """Folder of run folders."""
    report: str = "report.html"
    """The page to write."""
    overwrite: bool = False
    """Train again what is there."""

    def configs(self) -> list[Config]:
        """Return the configs of the runs: all plain ones, then all flat ones."""
        return [
            demo_config(name, seed, epochs=self.epochs, rho=self.rho, pairs=self.pairs)
            for name in (PLAIN, FLAT)
            for seed in range(self.seeds)
        ]


def demo_config(name: str, seed: int, *, epochs: int, rho: float, pairs: int) -> Config:
    """Return a recipe at the size of the demonstration: the embedded digits, a LeNet, one CPU core."""
    config = recipes.build(name)
    return replace(
        config,
        seed=seed,
        epochs=epochs,
        batch_size=64,
        model="lenet",
        source="mnist5k",
        rho=rho if config.rho else 0.0,
        device="cpu",
        data=replace(config.data, train_samples=pairs),
    )


def prepare(demo: Demo) -> list[Config]:
    """Return the configs of runs that must be trained, after checking that everything can be written.

    Raises:
        ValueError, OSError: it cannot, or a value makes no sense.
    """
    if demo.seeds < 1:
        raise ValueError(f"the number of seeds must be at least 1, got {demo.seeds}.")
    report = Path(demo.report)
    if report.exists() and not page.is_ours(report):
        raise FileExistsError(f"{report} exists and is no page of flatmtl. Choose another --report.")
    report.parent.mkdir(parents=True, exist_ok=True)
    configs = demo.configs()
    left = open_runs(configs, demo.out, overwrite=demo.overwrite)
    if done := len(configs) - len(left):
        say(f"{done} of {len(configs)} runs in {demo.out} are finished; --overwrite trains them again.")
    return left


def show(demo: Demo) -> None:
    """Print table and finding of the finished runs, and write the page."""
    comparison = compare(demo.configs(), demo.out)
    report = Path(demo.report)
    write_whole(report, _page(comparison))
    console = Console()
    console.print(terminal.results(comparison.table()))
    console.print(comparison.finding(), highlight=False)
    answer(f"page: {report.resolve().as_uri()}")


def _page(comparison: Comparison) -> str:
    sections = [
        Section(table, reason="the demonstration trains no task alone.")
        for table in tables([*comparison.plain, *comparison.flat])
    ]
    plain, flat = comparison.labels
    return page.render(
        sections, title=f"{flat} against {plain}", finding=[comparison.finding(), f"{comparison.setting}."]
    )


def open_runs(configs: Sequence[Config], out: str, *, overwrite: bool) -> list[Config]:
    """Return the configs of runs that are not finished; every folder can be written to, or there is an error."""
    left = []
    for config in configs:
        with RunFolder(out, config, resume=not overwrite, overwrite=overwrite) as folder:
            if not folder.finished:
                left.append(config)
    return left


def compare(configs: Sequence[Config], out: str) -> Comparison:
    """Return the comparison of finished runs, the plain ones first among the configs."""
    runs = [read(Path(out) / run_name(config)) for config in configs]
    half = len(runs) // 2
    return Comparison(runs[:half], runs[half:])


def train_side_by_side(configs: Sequence[Config], out: str) -> None:
    """Train runs in as many processes as there are cores, each on one thread, with a bar for each run.

    Raises:
        Stop: if it was interrupted, or a process ended with an error, which it has printed.
    """
    if not configs:
        return
    count = min(_cores(), len(configs))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [
        context.Process(target=_work, args=(configs[k::count], out, queue, os.getpid()), daemon=True)
        for k in range(count)
    ]
    try:
        _start(workers)
        _watch(workers, configs, queue)
    except KeyboardInterrupt:
        raise Stop("interrupted. The same command without --overwrite goes on where it stopped.", code=130) from None
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
    if any(worker.exitcode for worker in workers):
        raise Stop("a training process ended with an error, see above. The same command goes on.", code=1)


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(workers: Sequence[SpawnProcess]) -> None:
    """Start processes that leave Ctrl-C to this one, which then ends them."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for worker in workers:
            worker.start()
    finally:
        signal.signal(signal.SIGINT, handler)


def _watch(workers: Sequence[SpawnProcess], configs: Sequence[Config], queue: "Queue[Message]") -> None:
    """Show what the processes report until all have ended."""
    titles = {run_name(c): f"{c.label}, seed {c.seed}" for c in configs}
    with training_bars() as bars:
        tasks = {name: bars.add_task(title, total=None, start=False, state="") for name, title in titles.items()}
        while any(worker.is_alive() for worker in workers) or not queue.empty():
            try:
                name, done, total, row = queue.get(timeout=0.2)
            except Empty:
                continue
            bars.start_task(tasks[name])
            bars.update(tasks[name], completed=done, total=total)
            if row is not None:
                bars.update(tasks[name], state=state(row))
                if not bars.console.is_terminal:
                    say(f"{titles[name]}: {epoch_line(row)}")
    for worker in workers:
        worker.join()


def _work(configs: Sequence[Config], out: str, queue: "Queue[Message]", parent: int) -> None:
    """Train runs one after the other, in a process of its own that ends with its parent."""
    import torch  # noqa: PLC0415  (seconds, which the parent does not need)

    from flatmtl_bench.trainer import Trainer  # noqa: PLC0415

    torch.set_num_threads(1)

    def report(config: Config, done: int, total: int, row: Row | None) -> None:
        if os.getppid() != parent:
            raise SystemExit(1)
        queue.put((run_name(config), done, total, row))

    for config in configs:
        with RunFolder(out, config, resume=True) as folder:
            Trainer(config).fit(folder, partial(report, config), keep_every=1, log_every=20)
