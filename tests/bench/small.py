"""Runs that take a second, and run folders that took none."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np

from flatmtl_bench import recipes
from flatmtl_bench.protocols import outcome
from flatmtl_bench.recipes.config import Data, Sharpness
from flatmtl_bench.runs import RunFolder
from flatmtl_bench.trainer import Trainer

TIMES = ("seconds", "step_seconds")
COMMAND = [sys.executable, "-W", "error", "-m", "flatmtl_bench"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
SMALL = Data(train_samples=96, validation_samples=64, test_samples=64)
FLAGS = [
    *("--model", "lenet", "--source", "mnist5k", "--epochs", "2", "--batch-size", "32", "--sharpness.samples", "32"),
    *("--data.train-samples", "96", "--data.validation-samples", "64", "--data.test-samples", "64"),
]


def small_config(recipe="multimnist_f_cagrad", **changes):
    """Return a recipe with three steps an epoch."""
    small = {"model": "lenet", "source": "mnist5k", "epochs": 2, "batch_size": 32, "device": "cpu"}
    config = replace(recipes.build(recipe), data=SMALL, sharpness=Sharpness(samples=32))
    return replace(config, **{**small, **changes})


def fit(out, config, **saving):
    """Train as the command does; return the folder of the run."""
    with RunFolder(out, config) as folder:
        Trainer(config).fit(folder, **saving)
    return folder.path


def flatmtl(*words, cwd, **environment):
    """Run the command as a user does, in a folder of its own."""
    variables = {**ENVIRONMENT, **environment}
    return subprocess.run([*COMMAND, *words], cwd=cwd, env=variables, capture_output=True, text=True, check=False)


def stop_flatmtl(*words, cwd, at, by):
    """Run the command, send it a signal once a line with ``at`` appears; return its exit code and what it said then."""
    streams = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([*COMMAND, *words], cwd=cwd, env=ENVIRONMENT, **streams) as process:
        before = list(until(at, process.stderr))
        process.send_signal(by)
        said = process.stderr.read()  # ends when all processes have ended that it started
    assert at in before[-1], f"it ended without a word of {at!r}:\n{''.join(before)}"
    return process.returncode, said


def until(text, lines):
    """Yield lines to the first with a text."""
    for line in lines:
        yield line
        if text in line:
            return


def without_times(rows):
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def made_run(out, config, accuracies, *, conflict=0.5, sharpness=0.25, step_seconds=0.1):
    """Write a finished run whose test accuracy is the validation accuracy minus 0.1, and return its folder."""
    rows = [
        {
            "epoch": epoch,
            "train/loss/left": 1.0 / epoch,
            "train/loss/right": 2.0 / epoch,
            "train/conflict": conflict,
            "validation/accuracy": accuracy,
            "validation/accuracy/left": accuracy,
            "validation/accuracy/right": accuracy,
            "test/accuracy": accuracy - 0.1,
            "test/accuracy/left": accuracy,
            "test/accuracy/right": accuracy - 0.2,
            "test/loss/left": 1.0 / epoch,
            "test/loss/right": 2.0 / epoch,
            "seconds": 60.0,
            "step_seconds": step_seconds,
        }
        for epoch, accuracy in enumerate(accuracies, start=1)
    ]
    best = max(rows, key=lambda row: row["validation/accuracy"])
    with RunFolder(out, config) as folder:
        folder.write_environment({"python": "3.11.0", "packages": {"torch": "2.14.1"}, "accelerator": None})
        for row in rows:
            folder.append(row)
        folder.finish(
            {
                "protocol": "honest",
                "epochs": [best["epoch"]],
                "better": {"accuracy/left": "higher", "accuracy/right": "higher"},
                "test": {name.removeprefix("test/"): v for name, v in best.items() if name.startswith("test/")},
                "sharpness": {"left": sharpness, "right": sharpness},
                "data": {"train": "digits <train>", "test": "digits <test>"},
                "seconds": 60.0 * len(rows),
                "step_seconds": step_seconds,
                "stopped_early": len(rows) < config.epochs,
            }
        )
    return folder.path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def made_result(out, config, test, better, *, score=0.5, fingerprint="made"):
    """Write a finished run of one epoch with these test metrics, and return its folder.

    ``better`` is the direction of each metric of a result table; a score of None: nothing was held out for validation.
    """
    tasks = list(dict.fromkeys(name.partition("/")[2] for name in better))
    losses = {f"loss/{task}": 1.0 for task in tasks}
    results = {"test": {**losses, **test}, "validation": {} if score is None else {**losses, "score": score}}
    with RunFolder(out, config) as folder:
        folder.write_environment({"python": "3.11.0", "packages": {"torch": "2.14.1"}, "accelerator": None})
        rows = {f"{split}/{name}": value for split, values in results.items() for name, value in values.items()}
        folder.append({"epoch": 1, **{f"train/{name}": value for name, value in losses.items()}, **rows})
        folder.finish(
            {
                "protocol": config.protocol,
                "epochs": [1],
                "fingerprints": {"test": fingerprint},
                "better": better,
                **results,
                "sharpness": None,
                "data": {"test": "made"},
                "seconds": 60.0,
                "step_seconds": 0.1,
                "stopped_early": config.epochs > 1,
            }
        )
    return folder.path


def drawn_run(out, config, better, *, epochs=15, failed=None, **summary):
    """Write a finished run whose metrics are random numbers, and return its folder.

    ``failed`` is a metric, as ``accuracy/left``, that was not finite in any epoch.
    """
    drawn = np.random.default_rng([config.seed, int(1000 * config.rho), *config.recipe.encode()])
    splits = ("validation", "test") if config.data.validation_share else ("test",)
    names = [f"{split}/{name}" for split in splits for name in ("score", *better)]
    rows = [
        {
            "epoch": epoch,
            **({} if config.task else {"train/conflict": drawn.uniform()}),
            **{name: None if name.endswith(f"/{failed}") else drawn.uniform(0.2, 0.9) for name in names},
        }
        for epoch in range(1, epochs + 1)
    ]
    machine = {"processor": "P", "cpu_count": 2, "threads": 1, "accelerator": None}
    with RunFolder(out, config) as folder:
        folder.write_environment({"python": "3.11.0", "packages": {"torch": "2.14.1"}, **machine})
        folder.write_rows(rows)
        times = {"seconds": 60.0, "step_seconds": drawn.uniform(0.1, 0.2), "step_bytes": int(drawn.uniform(1e7, 2e7))}
        about = {"fingerprints": {"test": "made"}, "better": better, "sharpness": None, "data": {"test": "made"}}
        about["stopped_early"] = epochs < config.epochs
        folder.finish({**about, **outcome(rows, config.protocol), **times, **summary})
    return folder.path
