"""`flatmtl evaluate`: what a finished run recorded is measured again; and what is no finished run is refused."""

import json
import shutil

import pytest
import torch
from tests.bench.small import fit, lines, small_config
from tests.bench.test_trainer_scenes import TASKS
from tests.bench.test_trainer_scenes import config as rooms
from tests.bench.written_data import write_nyuv2

from flatmtl_bench import cli
from flatmtl_bench.deploy.evaluate import agreement
from flatmtl_bench.recipes.config import Data


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of finished runs, made when they are asked for: protocol -> folder."""
    out, made = tmp_path_factory.mktemp("runs"), {}

    def of(protocol):
        if protocol not in made:
            made[protocol] = fit(out, small_config(protocol=protocol, epochs=3), keep_every=1)
        return made[protocol]

    return of


@pytest.fixture
def evaluate(capsys):
    """Return what the command prints as JSON holds it; `evaluate.err` is what it says."""

    def run(*words, code=0):
        assert cli.main(["evaluate", *map(str, words), "--json"]) == code
        said = capsys.readouterr()
        run.err = said.err
        return json.loads(said.out) if code == 0 else said.out

    return run


def summary(path):
    return json.loads((path / "summary.json").read_text())


def recorded(path, epoch, split="test"):
    (row,) = [row for row in lines(path / "metrics.jsonl") if row["epoch"] == epoch]
    return {name.removeprefix(f"{split}/"): value for name, value in row.items() if name.startswith(f"{split}/")}


def close(values):
    return pytest.approx(values, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("protocol", ["honest", "official"])
@pytest.mark.parametrize("split", ["test", "validation"])
def test_the_metrics_are_those_of_the_summary(runs, evaluate, protocol, split):
    path = runs(protocol)
    found = evaluate(path, "--split", split)
    assert found["metrics"] == close(summary(path)[split])
    assert found["epoch"] == summary(path)["epochs"][0]
    assert (found["recorded"], found["note"]) == (recorded(path, found["epoch"], split), None)


def test_of_a_mean_over_epochs_it_is_the_last_alone_and_says_so(runs, evaluate):
    path = runs("paper")
    found = evaluate(path)
    assert found["metrics"] == close(recorded(path, 3))
    assert found["metrics"]["loss"] != close(summary(path)["test"]["loss"])
    assert found["note"] == "The protocol paper counts the mean of the epochs 1 to 3; this is epoch 3 alone."


def test_of_any_epoch_that_has_a_snapshot(runs, evaluate):
    for epoch in (1, 2, 3):
        assert evaluate(runs("paper"), "--epoch", epoch)["metrics"] == close(recorded(runs("paper"), epoch))
    evaluate(runs("paper"), "--epoch", 4, code=2)
    assert "has no snapshot of epoch 4. It has: 1, 2, 3." in evaluate.err


def test_training_data_are_measured_without_a_record_to_compare_with(runs, evaluate):
    found = evaluate(runs("honest"), "--split", "train")
    assert found["recorded"] is None
    assert found["metrics"]["loss"] > 0
    assert "multimnist train" in found["data"]


def test_the_table_has_a_row_for_each_task_and_says_that_the_record_is_the_same(runs, capsys):
    path = runs("honest")
    assert cli.main(["evaluate", str(path)]) == 0
    head, headings, *rows, last = capsys.readouterr().out.splitlines()
    test = summary(path)["test"]
    assert head.startswith(f"{path.name}, epoch {summary(path)['epochs'][0]} (honest): multimnist test: 64 pairs")
    assert headings.split() == ["loss", "accuracy,", "%", "score"]
    assert [row.split()[0] for row in rows] == ["left", "right", "mean"]
    assert [row.split()[2] for row in rows] == [
        f"{100 * test[name]:.2f}" for name in ("accuracy/left", "accuracy/right", "accuracy")
    ]
    assert last.startswith("The run recorded the same numbers")


def test_tasks_with_other_metrics_have_tables_of_their_own(tmp_path, capsys):
    path = fit(tmp_path, rooms(epochs=1))
    assert cli.main(["evaluate", str(path)]) == 0
    said = capsys.readouterr().out
    rows = [line.split()[0] for line in said.splitlines() if line.startswith((*TASKS, "mean "))]
    assert rows == [*TASKS, "mean"]
    assert f"{summary(path)['test']['abs_err/depth']:.4f}" in said
    assert "The run recorded the same numbers" in said


def test_data_that_have_moved_are_found_with_root(tmp_path, evaluate):
    root = write_nyuv2(tmp_path / "before", size=(32, 32))
    path = fit(tmp_path / "runs", rooms("nyuv2_ls", Data("nyuv2"), root=str(root), epochs=1))
    shutil.move(root, tmp_path / "now")
    evaluate(path, code=2)
    assert f"root {root} does not exist" in evaluate.err
    assert evaluate(path, "--root", tmp_path / "now")["metrics"] == close(summary(path)["test"])
    other = write_nyuv2(tmp_path / "other", size=(32, 32), seed=1)
    evaluate(path, "--root", other, code=2)
    assert "was made with other test data" in evaluate.err


@pytest.mark.parametrize(
    ("then", "words"),
    [
        ({"loss": 0.5}, "The run recorded the same numbers."),
        ({"loss": 0.5 + 1e-7}, "to rounding (relative difference of loss: 2e-07)"),
        ({"loss": 0.25}, "other numbers: loss was 0.25 and is 0.5"),
        ({"loss": None}, "other numbers: loss was nan and is 0.5"),
    ],
)
def test_how_far_the_record_is_off_is_said(then, words):
    assert words in agreement({"loss": 0.5}, then)


def unfinished(path):
    (path / "summary.json").unlink()


def failed(path):
    (path / "summary.json").unlink()
    (path / "error.txt").write_text("no")


def foreign(path):
    (path / "config.json").unlink()


def half_written(path):
    text = (path / "summary.json").read_text()
    (path / "summary.json").write_text(text[: len(text) // 2])


def without_epochs(path):
    (path / "summary.json").write_text(json.dumps(summary(path) | {"epochs": []}))


def without_checkpoint(path):
    shutil.rmtree(path / "checkpoints")


def damaged(path):
    for file in (path / "checkpoints").iterdir():
        file.write_bytes(file.read_bytes()[:-1] + b"?")


def of_another_model(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model": "resnet18"}))


def emptied(path):
    shutil.rmtree(path)
    path.mkdir()


REFUSED = {
    unfinished: "is not finished",
    failed: "has failed; see its error.txt",
    foreign: "is no run",
    half_written: "summary.json is broken",
    without_epochs: "'epochs' is [], not the epochs that count",
    without_checkpoint: "has no checkpoint of epoch",
    damaged: "is damaged: its content is not what its name says",
    of_another_model: "are not those of the model resnet18",
    emptied: "holds no run",
    shutil.rmtree: "is no folder",
}


@pytest.mark.parametrize("spoil", REFUSED, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("command", ["evaluate", "predict", "export"])
def test_what_is_no_whole_finished_run_is_refused_in_a_sentence(runs, tmp_path, capsys, monkeypatch, spoil, command):
    path = shutil.copytree(runs("honest"), tmp_path / "runs" / "run")
    spoil(path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.png").touch()
    assert cli.main([command, str(path), *["some.png"] * (command == "predict")]) == 2
    said = capsys.readouterr()
    assert REFUSED[spoil] in said.err
    assert said.err.startswith("flatmtl: ")
    assert (said.err.count("\n"), said.out) == (1, "")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["runs", "some.png"]


@pytest.mark.parametrize("command", ["evaluate", "predict", "export"])
def test_a_folder_of_several_runs_is_not_one(runs, capsys, command):
    out = runs("honest").parent
    assert runs("paper").parent == out
    assert cli.main([command, str(out), *["some.png"] * (command == "predict")]) == 2
    assert "Name one of them" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.parametrize("words", [["evaluate"], ["predict", "some.png"]])
def test_a_device_that_is_not_there_is_refused(runs, capsys, words):
    command, *rest = words
    assert cli.main([command, str(runs("honest")), *rest, "--device", "cuda"]) == 2
    assert "--device cuda cannot be used here" in capsys.readouterr().err
