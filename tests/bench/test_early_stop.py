"""Runs that end before their last epoch, and what a run with a schedule and loggers goes on with."""

import csv
import json
from dataclasses import replace

import pytest
from tests.bench.small import lines, small_config

from flatmtl_bench.protocols import epochs_without_improvement
from flatmtl_bench.recipes.config import EarlyStop, Schedule, Sharpness
from flatmtl_bench.runs import RunFolder
from flatmtl_bench.trainer import Stopped, Trainer

SCORES = [0.5, 0.75, 0.75, 0.6, 0.8, 0.7, 0.7, 0.7]
"""Accuracy of each epoch: the second is not improved by the two after it."""


@pytest.fixture(autouse=True)
def scores(monkeypatch):
    """Let the score of each epoch be the one above, on validation and test."""

    def evaluate(trainer, _split):
        return {"score": SCORES[trainer.position.epochs]}

    monkeypatch.setattr(Trainer, "evaluate", evaluate)


def stopping(patience, **changes):
    config = small_config(epochs=len(SCORES), early_stop=EarlyStop(patience), **changes)
    return replace(config, sharpness=Sharpness(samples=0))


def train(out, config, *, stop_after=None):
    """Train as the command does, until a signal if there is one, and return the folder."""
    trainer = Trainer(config)

    def watch(_done, _total, row):
        if row is not None and row["epoch"] == stop_after:
            trainer.stop()

    with RunFolder(out, trainer.config, resume=True) as folder:
        try:
            trainer.fit(folder, watch)
        except Stopped:
            assert stop_after is not None
    return folder


@pytest.mark.parametrize(("patience", "last"), [(1, 3), (2, 4), (3, 8), (8, 8), (None, 8)])
def test_a_run_stops_after_so_many_epochs_without_a_better_score(tmp_path, patience, last):
    folder = train(tmp_path, stopping(patience))
    assert [row["epoch"] for row in folder.rows()] == list(range(1, last + 1))
    assert folder.summary()["stopped_early"] == (last < len(SCORES))
    assert folder.summary()["epochs"] == [SCORES.index(max(SCORES[:last])) + 1]


@pytest.mark.parametrize("stop_after", [1, 3, 4])
def test_a_run_that_was_interrupted_stops_at_the_same_epoch(tmp_path, stop_after):
    whole = train(tmp_path / "whole", stopping(2))
    train(tmp_path / "torn", stopping(2), stop_after=stop_after)
    torn = train(tmp_path / "torn", stopping(2))
    assert (torn.path / "metrics.jsonl").read_bytes() == (whole.path / "metrics.jsonl").read_bytes()
    assert torn.summary()["stopped_early"]


def test_the_score_is_the_one_that_the_protocol_chooses_by(tmp_path):
    rows = [{"epoch": e, "validation/score": 1 / e, "test/score": 1 - 1 / e} for e in range(1, 4)]
    assert epochs_without_improvement(rows, "honest") == 2
    assert epochs_without_improvement(rows, "official") == 0
    assert epochs_without_improvement([], "honest") == 0


def test_without_such_a_score_or_a_time_to_wait_it_is_refused():
    with pytest.raises(ValueError, match="the protocol paper chooses no epoch by a score"):
        stopping(2, protocol="paper")
    with pytest.raises(ValueError, match="patience must be at least 1, got 0"):
        EarlyStop(0)


@pytest.mark.parametrize("name", ["cosine", "linear", "step", "constant"])
def test_an_interrupted_run_goes_on_with_its_learning_rate_and_its_logs(tmp_path, name):
    config = small_config(epochs=3, schedule=Schedule(name, warmup_steps=4, every=1), loggers=["csv"])
    config = replace(config, sharpness=Sharpness(samples=0))
    whole = train(tmp_path / "whole", config)
    train(tmp_path / "torn", config, stop_after=1)
    torn = train(tmp_path / "torn", config)
    assert (torn.path / "metrics.jsonl").read_bytes() == (whole.path / "metrics.jsonl").read_bytes()
    rates = [row["learning_rate"] for row in whole.rows()]
    assert rates[0] == pytest.approx(0.001 * 4 / 5)
    assert rates[2] == pytest.approx({"cosine": 0.0, "linear": 0.0, "step": 0.0005, "constant": 0.001}[name], abs=1e-12)
    with open(torn.path / "logs" / "csv" / "metrics.csv", newline="") as file:
        logged = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    known = [
        {"step" if key == "epoch" else key: value for key, value in row.items()}
        for row in lines(torn.path / "metrics.jsonl")
    ]
    assert logged == [{key: value for key, value in row.items() if value is not None} for row in known]
    assert json.loads((torn.path / "config.json").read_text())["loggers"] == ["csv"]
