"""F-CAGrad against CAGrad as `flatmtl demo` trains them, over more seeds: the README's tables and figure.

Beside them what a critical reader asks for: the plain mean of the losses, its flat form (which is SAM with a
perturbation for each task), and CAGrad with as much time as the flat form takes.
``python benchmarks/demo.py`` writes ``results/demo.json`` beside this file (about 15 minutes on 2 cores).
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from flatmtl_bench.demo import Demo, compare, demo_config, open_runs, train_side_by_side
from flatmtl_bench.files import write_whole
from flatmtl_bench.recipes import Config
from flatmtl_bench.reports.comparison import conflict, sharpness
from flatmtl_bench.reports.page import CURVES, values
from flatmtl_bench.reports.reading import Run, read
from flatmtl_bench.runs import run_name

ALSO = {
    "Mean": ("multimnist_mean", 12),
    "F-Mean": ("multimnist_f_mean", 12),
    "CAGrad, 30 epochs": ("multimnist_cagrad", 30),
}
"""Recipe and number of epochs of what is compared besides."""


@dataclass(frozen=True)
class Options:
    """Compare CAGrad and F-CAGrad over seeds, and write the result as JSON."""

    seeds: int = 5
    """Number of seeds."""
    runs: str | None = None
    """Folder of run folders, in which finished ones are not trained again; None: a temporary one."""
    out: Path = Path(__file__).parent / "results" / "demo.json"
    """The file to write."""


def main(options: Options) -> None:
    """Train what is not there yet and write the result."""
    with tempfile.TemporaryDirectory() as temporary:
        out, configs = options.runs or temporary, Demo(seeds=options.seeds).configs()
        others = {label: other_configs(*what, seeds=options.seeds) for label, what in ALSO.items()}
        everything = [*configs, *(config for group in others.values() for config in group)]
        train_side_by_side(open_runs(everything, out, overwrite=False), out)
        comparison = compare(configs, out)
        also = {label: [read(Path(out) / run_name(c)) for c in group] for label, group in others.items()}
    groups = zip(comparison.labels, (comparison.plain, comparison.flat), strict=True)
    result = {
        "finding": comparison.finding(),
        "table": comparison.table(),
        "methods": {label: method(runs) for label, runs in groups},
        "also": {label: method(runs) for label, runs in also.items()},
        "environment": comparison.plain[0].environment,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.out, json.dumps(result, indent=1) + "\n")
    print(comparison.finding())


def other_configs(recipe: str, epochs: int, *, seeds: int) -> list[Config]:
    """Return the configs of one of the other comparisons, otherwise as the demo's."""
    usual = Demo()
    return [demo_config(recipe, seed, epochs=epochs, rho=usual.rho, pairs=usual.pairs) for seed in range(seeds)]


def method(runs: Sequence[Run]) -> dict[str, Any]:
    """Return what all seeds have in common, and the result of each."""
    return {"config": config(runs[0]), "runs": [record(run) for run in runs]}


def config(run: Run) -> dict[str, Any]:
    """Return what all seeds have in common."""
    return {name: value for name, value in run.config.to_dict().items() if name != "seed"}


def record(run: Run) -> dict[str, Any]:
    """Return the result of one run, and its curves to four digits."""
    shares = run.series("train/conflict")
    return {
        "seed": run.config.seed,
        "protocol": run.summary["protocol"],
        "epochs": run.summary["epochs"],
        "test": run.summary["test"],
        "conflict_percent": {"all": conflict(run), "first_epoch": 100 * shares[0], "last_epoch": 100 * shares[-1]},
        "sharpness": {"mean": sharpness(run), **run.summary["sharpness"]},
        "step_seconds": run.summary["step_seconds"],
        "seconds": run.summary["seconds"],
        "curves": {name: [round(value, 4) for value in values(run, name, unit)] for _, unit, name in CURVES},
    }


if __name__ == "__main__":
    main(tyro.cli(Options))
