"""A run that is killed and resumed ends as if it had never been killed, whenever that happens."""

import json
import multiprocessing
import os
import random
import signal
import sys

import pytest
import torch
from tests.bench import killed
from tests.bench.small import FLAGS, lines

from flatmtl_bench.checkpoints import Checkpoints

RUN = ("run", "multimnist_f_pcgrad", *FLAGS, "--loggers", "--checkpoint-every", "2", "--keep-every", "1")
KILLS = 10
WRITING = ("half of", "before fsync", "before replace", "after replace", "before unlink")


@pytest.fixture(scope="module")
def start():
    """Start the command in a process forked from one that has loaded everything; return the process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.setenv("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([killed.__name__])

        def start(*arguments):
            process = context.Process(target=killed.run, args=arguments)
            process.start()
            return process

        yield start


def ended(process):
    process.join()
    return process.exitcode


def result(folder):
    """Return everything that a run came to but its times."""
    (path,) = (folder / "runs").iterdir()
    summary = json.loads((path / "summary.json").read_text())
    return {
        "files": sorted(str(f.relative_to(path)) for f in path.rglob("*") if "checkpoints" not in f.parts),
        "metrics": (path / "metrics.jsonl").read_bytes(),
        "timed": [time["epoch"] for time in lines(path / "times.jsonl")],
        "snapshots": {file.name: file.read_bytes() for file in (path / "snapshots").iterdir()},
        "summary": {name: value for name, value in summary.items() if "seconds" not in name},
        "checkpoints": sorted(file.name.rpartition("-")[0] for file in (path / "checkpoints").iterdir())[-2:],
    }


def weights(folder):
    (path,) = (folder / "runs").iterdir()
    return Checkpoints(path).newest()[1]["model"]


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """The folder of a run that was never killed, and its moments."""
    folder = tmp_path_factory.mktemp("whole")
    assert ended(start(RUN, folder)) == 0
    return folder, (folder / "moments").read_text().splitlines()


@pytest.fixture(scope="module")
def fatal(whole):
    """Numbers of random moments: one of each kind in the writing of a checkpoint, the others anywhere."""
    moments, draw = list(enumerate(whole[1])), random.Random(5)
    chosen = [draw.choice([i for i, what in moments if what.startswith(kind) and "-step-" in what]) for kind in WRITING]
    return chosen + draw.sample([i for i, _ in moments if i not in chosen], KILLS - len(chosen))


def assert_same_as_whole(folder, whole):
    assert result(folder) == result(whole[0])
    torch.testing.assert_close(weights(folder), weights(whole[0]), rtol=0, atol=0)


def test_there_are_moments_of_every_kind(whole):
    kinds = {" ".join(what.split()[:2]) for what in whole[1]}
    assert kinds == {
        *(f"{when} {what}" for when in ("before", "after") for what in ("a", "fsync", "replace", "unlink")),
        "half of",
    }
    assert sum("half of .epoch-" in what for what in whole[1]) >= 4


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_at_a_random_moment_and_resumed_it_ends_the_same(start, whole, fatal, tmp_path, number):
    assert ended(start(RUN, tmp_path, fatal[number])) == -signal.SIGKILL
    assert (tmp_path / "moments").read_text().splitlines() == whole[1][: fatal[number]]
    assert not list((tmp_path / "runs").glob("*/summary.json"))
    assert ended(start((*RUN, "--resume"), tmp_path)) == 0
    assert_same_as_whole(tmp_path, whole)


def test_killed_by_the_clock_again_and_again_it_ends_the_same(start, whole, tmp_path):
    draw, kills = random.Random(0), 0
    while kills < KILLS:
        process = start((*RUN, "--resume"), tmp_path)
        process.join(draw.uniform(0.05, 0.3))
        process.kill()
        if ended(process) == 0:
            break
        kills += 1
    assert kills
    assert ended(start((*RUN, "--resume"), tmp_path)) == 0
    assert_same_as_whole(tmp_path, whole)
