"""Sweeps: many runs, in processes of this machine or on Ray. The run folders are the record of what is done."""

import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Annotated

from joblib import cpu_count
from tyro.conf import Positional, UseAppendAction, arg

from flatmtl_bench import recipes
from flatmtl_bench.choices import whole_number
from flatmtl_bench.commands.training import Run
from flatmtl_bench.commands.words import users_mistakes
from flatmtl_bench.output import Stop, answer, say
from flatmtl_bench.reports import overview, terminal
from flatmtl_bench.reports.choice import tuned
from flatmtl_bench.reports.reading import Run as FinishedRun
from flatmtl_bench.reports.reading import read
from flatmtl_bench.reports.results import tables
from flatmtl_bench.runs import run_name
from flatmtl_bench.signals import FirstSignal
from flatmtl_bench.sweep.board import Board, shown
from flatmtl_bench.sweep.grid import axes, by_name, combinations
from flatmtl_bench.sweep.pools import LocalPool, Pool, ProcessDied, RayPool
from flatmtl_bench.sweep.work import Outcome, prepare, record_death, train


@dataclass(frozen=True)
class Sweep:
    """Train recipes with every combination of a grid and every seed, several at a time.

    Every flag of `flatmtl run` can be given too, and holds for all runs: --epochs, --batch-size, --out, --overwrite,
    --dry-run and so on. Runs that are finished are not trained again and interrupted ones go on, so the same command
    continues a sweep.
    """

    recipes: Annotated[Positional[tuple[str, ...]], arg(metavar="RECIPE ...")]
    """Recipes; `flatmtl list` shows all."""
    grid: Annotated[tuple[tuple[str, ...], ...], UseAppendAction] = ()
    """Flags of `flatmtl run` with their values, e.g. rho=0.05,0.1 method.options.c=0.2,0.4."""
    tune: bool = False
    """Vary what the source of each recipe leaves open, too: `flatmtl list RECIPE` shows the values. What --grid says of
    the same flag comes first. The results then end with the settings that validation chooses."""
    seeds: int = 1
    """Seeds of each combination: that of --seed, and those after it."""
    jobs: int | None = None
    """Runs at a time on this machine; None: one for each CPU core, or one if there is an accelerator to train on (with
    --ray one for each accelerator)."""
    threads: int | None = None
    """Threads of each run, on which the last digits of its numbers depend; None: the CPU cores divided by --jobs."""
    ray: bool = False
    """Train on Ray, in a cluster of this machine alone unless --ray-address says where one is."""
    ray_address: str | None = None
    """Address of a Ray cluster, e.g. auto; its machines must share the folders of --out and --root."""
    json: bool = False
    """Print the results as JSON: name, config and summary of each finished run."""

    def __post_init__(self) -> None:
        for name in ("seeds", "jobs", "threads"):
            if (value := getattr(self, name)) is not None:
                whole_number(f"--{name}", value, 1)
        if self.ray_address and self.jobs:
            raise ValueError(
                f"--jobs {self.jobs} counts runs on this machine, but the cluster at --ray-address decides how many go "
                "on at a time. Leave it out; --threads says how many CPUs each run takes."
            )

    @property
    def grids(self) -> dict[str, dict[str, Sequence[str]]]:
        """What is varied of each recipe, and the values as texts."""
        given: dict[str, Sequence[str]] = {**axes(chain.from_iterable(self.grid))}
        return {name: {**(recipes.find(name).grid if self.tune else {}), **given} for name in self.recipes}

    def runs(self, flags: Sequence[str]) -> dict[str, Run]:
        """Return the runs by name, of which none is trained in more than one process.

        Raises:
            ValueError: a value makes no sense.
        """
        if not self.recipes:
            raise ValueError("name recipes first: flatmtl sweep RECIPE... [OPTIONS]; `flatmtl list` shows them.")
        runs = by_name(combinations(self.grids, self.seeds, flags))
        for run in runs.values():
            if self.tune and not run.config.data.validation_share:
                raise ValueError(
                    f"--tune chooses by validation data, of which {run.config.recipe} holds none out. Tune the recipe "
                    "without _paper or _official, then train this one with what came out."
                )
            if (run.config.devices or 1) * run.config.num_nodes > 1:
                raise ValueError(
                    "a sweep trains each run in one process, but --devices or --num-nodes asks for several. "
                    "Leave them out, or train the runs one by one with `flatmtl run`."
                )
        return runs


def run_sweep(sweep: Sweep, runs: Mapping[str, Run]) -> int:
    """Train what is not finished, print the results, and return the exit code: 0 if all runs are finished.

    Raises:
        Stop: something is wrong, and no run has been trained; or a signal came.
    """
    finished, code = train_runs(sweep, runs)
    with users_mistakes():
        _print(sweep, finished)
    return code


def train_runs(where: Sweep, runs: Mapping[str, Run]) -> tuple[list[FinishedRun], int]:
    """Train what is not finished, say what has failed, and return the finished runs and the exit code.

    Args:
        where: how many at a time, and on what; the recipes and grid of this sweep do not matter.
        runs: by name.

    Raises:
        Stop: something is wrong, and no run has been trained; or a signal came.
    """
    with _pool(where, list(runs.values())) as pool:
        say(f"checking {len(runs)} runs before the first is trained")
        with users_mistakes():
            board = _checked(pool, runs)
        _train(pool, board)
    unfinished = [name for name in board.runs if not board.finished(name)]
    for name in unfinished:
        say(f"{name}: {board.outcome(name)}")
    if unfinished:
        say(
            f"{len(unfinished)} of {len(board.runs)} runs are not finished; the folder of one that failed has its "
            "error.txt. The same command goes on with them."
        )
    with users_mistakes():
        finished = [read(board.path(name)) for name in board.runs if name not in unfinished]
    return finished, 1 if unfinished else 0


@contextmanager
def _pool(sweep: Sweep, runs: Sequence[Run]) -> Iterator[Pool]:
    on_ray = sweep.ray or sweep.ray_address is not None
    jobs = at_a_time(sweep, runs)
    threads = sweep.threads or (1 if sweep.ray_address else max(1, cpu_count() // jobs))
    jobs = min(jobs, len(runs))  # after the threads, on which the numbers depend: they shall not change with the runs
    with users_mistakes():
        pool = RayPool(sweep.ray_address, jobs, threads) if on_ray else LocalPool(jobs, threads)
    try:
        yield pool
    finally:
        pool.close()


def at_a_time(sweep: Sweep, runs: Sequence[Run]) -> int:
    """Return how many runs are trained at a time on this machine."""
    on_ray = sweep.ray or sweep.ray_address is not None
    return sweep.jobs or _accelerators(runs, on_ray) or max(1, cpu_count() // (sweep.threads or 1))


def _accelerators(runs: Sequence[Run], on_ray: bool) -> int:
    """Return how many accelerators the runs can use: all with Ray, which gives each run its own, else the first."""
    if all(run.config.device == "cpu" for run in runs):
        return 0
    import torch  # noqa: PLC0415  (seconds)

    devices = torch.accelerator.device_count()
    return devices if on_ray else min(devices, 1)


def _checked(pool: Pool, runs: Mapping[str, Run]) -> Board:
    """Return how the runs stand, with the source of the data that ``auto`` has come to."""
    found: dict[str, tuple[Run, Outcome]] = {}
    for run, result in pool.map(prepare, list(runs.values())):
        if isinstance(result, ProcessDied):
            raise OSError(f"{run_name(run.config)} cannot even be made: {result}")
        found[run_name(run.config)] = result
    prepared = by_name(found[name][0] for name in runs)
    outcomes = {run_name(run.config): outcome for run, outcome in found.values() if outcome.state != "waiting"}
    return Board(prepared, outcomes)


def _train(pool: Pool, board: Board) -> None:
    """Train the runs that are waiting."""

    def stop() -> None:
        say("stopping: each run ends its step and saves; a second signal ends them at once.")
        pool.stop()

    waiting = [run for name, run in board.runs.items() if board.outcome(name).state == "waiting"]
    first_signal = FirstSignal(stop)
    with shown(board), first_signal:
        for run, result in pool.map(train, waiting):
            outcome = record_death(run, result) if isinstance(result, ProcessDied) else result
            board.record(run_name(run.config), outcome)
            if outcome.state == "stopped":
                pool.stop()  # a signal that only one process got is meant for all
    stopped = any(outcome.state == "stopped" for outcome in board.outcomes.values())
    if first_signal.number or stopped:
        done = sum(map(board.finished, board.runs))
        code = 128 + (first_signal.number or signal.SIGTERM)
        raise Stop(f"stopped with {done} of {len(board.runs)} runs finished. The same command goes on.", code=code)


def _print(sweep: Sweep, runs: Sequence[FinishedRun]) -> None:
    """Write the results to standard output."""
    if sweep.json:
        found = [{"run": run.name, "config": run.config.to_dict(), "summary": run.summary} for run in runs]
        answer(json.dumps(found, indent=2))
    elif runs:
        settings = [name for name in dict.fromkeys(chain.from_iterable(sweep.grids.values())) if name != "seed"]
        terminal.print_lines(overview.table(runs, settings), names=1 + len(settings))
    if sweep.tune:
        for line in _choices(runs):
            (say if sweep.json else answer)(line)


def _choices(runs: Sequence[FinishedRun]) -> Iterator[str]:
    """Yield what validation chooses of each recipe, as flags to type, and what could not be compared."""
    found = tables(runs)
    for table in found:
        _, sentences = tuned(table)
        yield from [table.title] if len(found) > 1 and sentences else []
        yield from (*sentences, *table.lacking)
