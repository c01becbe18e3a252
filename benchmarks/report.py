"""How long `flatmtl report` takes for many long runs, and how much memory.

``python benchmarks/report.py`` writes ``results/report.json`` beside this file (a minute on 2 cores). The run folders
are made up: five hundred runs of two hundred epochs on Multi-MNIST, whose numbers are random.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import tyro

from flatmtl_bench import recipes
from flatmtl_bench.files import write_whole
from flatmtl_bench.protocols import outcome
from flatmtl_bench.recipes.config import Config
from flatmtl_bench.runs import run_name

METHODS = ("mgda", "pcgrad", "cagrad", "imtl_g", "nash_mtl", "fairgrad", "aligned_mtl", "graddrop", "gradvac", "config")
RADII = (0.05, 0.1, 0.5, 1.0)
TASKS = ("left", "right")
BETTER = {f"accuracy/{task}": "higher" for task in TASKS}
FORMATS = {"terminal": (), "json": ("--json",), "html": ("--out", "report.html", "--overwrite")}
GOAL = {"seconds": 10.0, "mebibytes": 1024.0}
ENVIRONMENT = {
    "python": "3.11.7",
    "packages": {"torch": "2.14.1"},
    "processor": "made up",
    "cpu_count": 2,
    "threads": 1,
}


@dataclass(frozen=True)
class Options:
    """Make run folders, time the report, and write the result as JSON."""

    seeds: int = 10
    """Runs of each of ten methods, plain and with four radii: five hundred with ten seeds."""
    epochs: int = 200
    """Epochs of each run."""
    rounds: int = 3
    """How often each format is timed."""
    out: Path = Path(__file__).parent / "results" / "report.json"
    """The file to write."""


def main(options: Options) -> None:
    """Measure, and write what was found."""
    found = result(options)
    from flatmtl_bench.environment import environment  # noqa: PLC0415  (after the measurements; see `timed`)

    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.out, json.dumps({**found, "environment": environment()}, indent=1) + "\n")


def result(options: Options) -> dict[str, Any]:
    """Return what each format takes, and of how many bytes of metrics."""
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        count = sum(write_run(runs, config) is not None for config in configs(options))
        size = sum(path.stat().st_size for path in runs.glob("*/metrics.jsonl"))
        records = [record(name, words, Path(folder), options.rounds) for name, words in FORMATS.items()]
    return {"runs": count, "epochs": options.epochs, "bytes": size, "goal": GOAL, "records": records}


def configs(options: Options) -> Iterator[Config]:
    """Yield the config of each run."""
    common = {"epochs": options.epochs, "source": "mnist5k", "model": "lenet", "device": "cpu"}
    for method in METHODS:
        plain, flat = (recipes.build(f"multimnist_{form}{method}") for form in ("", "f_"))
        for config in (plain, *(replace(flat, rho=rho) for rho in RADII)):
            yield from (replace(config, seed=seed, **common) for seed in range(options.seeds))


def write_run(out: Path, config: Config) -> Path:
    """Write the folder of a finished run with random numbers, and return it."""
    drawn = np.random.default_rng([config.seed, int(1000 * config.rho), METHODS.index(config.method.aggregator)])
    rows = [row(epoch, drawn, flat=config.rho > 0) for epoch in range(1, config.epochs + 1)]
    summary = {
        "recipe": config.recipe,
        "seed": config.seed,
        "data": {split: f"made up {split} data" for split in ("train", "validation", "test")},
        "fingerprints": {"test": "made"},
        "better": BETTER,
        **outcome(rows, config.protocol),
        "sharpness": dict.fromkeys(TASKS, 0.25),
        "seconds": 60.0 * config.epochs,
        "step_seconds": drawn.uniform(0.1, 0.2),
        "step_bytes": 12_345_678,
    }
    path = out / run_name(config)
    path.mkdir(parents=True)
    for name, value in (("config", config.to_dict()), ("env", ENVIRONMENT), ("summary", summary)):
        (path / f"{name}.json").write_text(json.dumps(value, indent=2))
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def row(epoch: int, drawn: np.random.Generator, *, flat: bool) -> dict[str, float]:
    """Return the metrics of an epoch, by the names that a run has."""
    each = ["norm", "weight_loss", *(["weight_flat", "sharpness", "flat_to_loss", "intra_conflict"] if flat else [])]
    both = ["conflict", "cosine", *(["conflict_flat", "cosine_flat", "inter_conflict"] if flat else [])]
    names = [
        *(f"train/{name}/{task}" for name in ("loss", *each) for task in TASKS),
        *(f"train/{name}" for name in (*both, "steps", "skipped", "dropped")),
        *(
            f"{split}/{name}{task}"
            for split in ("validation", "test")
            for task in ("", *(f"/{task}" for task in TASKS))
            for name in ("loss", "accuracy", "score")
        ),
    ]
    return {"epoch": epoch, "learning_rate": 1e-3, **dict(zip(names, drawn.random(len(names)).tolist(), strict=True))}


def record(name: str, words: tuple[str, ...], folder: Path, rounds: int) -> dict[str, Any]:
    """Return what one format takes."""
    times, computed, peaks = zip(*(timed(words, folder) for _ in range(rounds)), strict=True)
    own = {"times": times, "cpu_times": computed}
    return {"format": name, "seconds": median(times), "cpu_seconds": median(computed), "mebibytes": max(peaks), **own}


def timed(words: tuple[str, ...], folder: Path) -> tuple[float, float, float]:
    """Return seconds by the clock and of the CPU, and MiB, of the command in a process of its own, its start included.

    What a process is given as its peak is never below that of the one it was started from, so this one stays small: it
    does not load PyTorch before all is measured.
    """
    started = perf_counter()
    command = [sys.executable, "-m", "flatmtl_bench", "report", "runs", *words]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = perf_counter() - started
    if process.returncode:
        raise SystemExit(f"flatmtl report {' '.join(words)} has failed.")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


if __name__ == "__main__":
    main(tyro.cli(Options))
