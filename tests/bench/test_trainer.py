import math
import random
import shutil
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.bench.small import lines, small_config, without_times

from flatmtl_bench import recipes
from flatmtl_bench.checkpoints import Checkpoints
from flatmtl_bench.randomness import RandomStreams
from flatmtl_bench.recipes.config import Method, Optimizer, Sharpness
from flatmtl_bench.runs import RunError, RunFolder
from flatmtl_bench.trainer import Trainer

RECIPES = ("multimnist_pcgrad", "multimnist_f_pcgrad", "multimnist_f_cagrad")
STATEFUL = ("multimnist_f_uw", "multimnist_famo", "multimnist_f_dwa", "multimnist_gradvac", "multimnist_f_graddrop")


def train(out, config, **options):
    """Train as the command does and return the folder."""
    trainer = Trainer(config)
    with RunFolder(out, trainer.config, **options) as folder:
        trainer.fit(folder)
    return folder


class Interrupted(Exception):
    pass


def interrupt(epoch, step):
    """Stop in the middle of an epoch of three steps."""

    def watch(done, _total, row):
        if row is None and done == 3 * (epoch - 1) + step:
            raise Interrupted

    return watch


def checkpoint(folder):
    return Checkpoints(folder.path).newest()[1]


def assert_same(one, other):
    """Equal bit for bit, however nested."""
    torch.testing.assert_close(one["model"], other["model"], rtol=0, atol=0)
    torch.testing.assert_close(one["optimizer"]["state"], other["optimizer"]["state"], rtol=0, atol=0)
    (mine,), (others,) = one["random"]["ranks"], other["random"]["ranks"]
    assert torch.equal(mine["torch"], others["torch"])
    for stream in ("python", "numpy"):
        assert mine[stream] == others[stream]
    for count in ("epochs", "steps", "rows"):
        assert one["position"][count] == other["position"][count]


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_seed_gives_one_result(tmp_path, recipe):
    one, other = (train(tmp_path / name, small_config(recipe, seed=3)) for name in "ab")
    assert without_times(one.rows()) == without_times(other.rows())
    assert_same(checkpoint(one), checkpoint(other))


def test_another_seed_gives_another(tmp_path):
    one, other = (train(tmp_path, small_config(seed=seed)) for seed in (0, 1))
    assert one.rows()[0]["train/loss/left"] != other.rows()[0]["train/loss/left"]


def test_the_live_log_shows_the_steps_and_changes_no_number(tmp_path):
    config = small_config()
    with RunFolder(tmp_path / "live", config) as folder:
        Trainer(config).fit(folder, log_every=1)
    assert without_times(folder.rows()) == without_times(train(tmp_path / "none", config).rows())
    events = EventAccumulator(str(folder.path / "logs" / "live")).Reload()
    assert {"conflict", "sharpness/left", "flat_to_loss/right", "intra_conflict/left"} <= {*events.Tags()["scalars"]}
    points = [(event.step, event.value) for event in events.Scalars("sharpness/left")]
    assert [step for step, _ in points] == [1, 2, 3, 4, 5, 6]
    for k, row in enumerate(folder.rows()):  # of three steps
        assert fmean(value for _, value in points[3 * k : 3 * k + 3]) == pytest.approx(row["train/sharpness/left"])


def test_what_ran_before_does_not_matter(tmp_path):
    one = train(tmp_path / "a", small_config())
    torch.rand(7), random.random(), np.random.rand(3)
    assert without_times(train(tmp_path / "b", small_config()).rows()) == without_times(one.rows())


@pytest.mark.parametrize("recipe", [*RECIPES, *STATEFUL])
@pytest.mark.parametrize("step", [1, 3])
def test_resume_equals_a_run_that_was_never_interrupted(tmp_path, recipe, step):
    config = small_config(recipe, epochs=3)
    whole = train(tmp_path / "whole", config)
    trainer = Trainer(config)
    with RunFolder(tmp_path / "torn", trainer.config) as folder, pytest.raises(Interrupted):
        trainer.fit(folder, interrupt(epoch=2, step=step))
    assert len(folder.rows()) == 1
    torn = train(tmp_path / "torn", config, resume=True)
    assert without_times(torn.rows()) == without_times(whole.rows())
    assert_same(checkpoint(torn), checkpoint(whole))
    ends = [{k: v for k, v in f.summary().items() if "seconds" not in k} for f in (torn, whole)]
    assert ends[0] == ends[1]


def test_resume_before_the_first_epoch_ended_starts_anew(tmp_path):
    config = small_config()
    trainer = Trainer(config)
    with RunFolder(tmp_path, trainer.config) as folder, pytest.raises(Interrupted):
        trainer.fit(folder, interrupt(epoch=1, step=2))
    assert not folder.rows()
    assert train(tmp_path, config, resume=True).finished


def test_metrics_without_a_checkpoint_are_made_again(tmp_path):
    """Killed between the two writes at the end of an epoch."""
    folder = train(tmp_path, small_config())
    rows = folder.rows()
    (folder.path / "summary.json").unlink()
    with RunFolder(tmp_path, small_config(), resume=True) as again:
        again.append({**rows[1], "epoch": 3})
    assert train(tmp_path, small_config(), resume=True).rows() == rows


def test_more_epochs_than_there_shall_be_are_the_end(tmp_path):
    trainer = Trainer(small_config())
    ended = train(tmp_path, small_config())
    trainer.position.load_state_dict(checkpoint(ended)["position"])
    trainer.position.rows.append({**trainer.position.rows[-1], "epoch": 3})
    assert trainer._is_over()


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_checkpoint(tmp_path):
    config = small_config()
    trainer = Trainer(config)

    def poison(done, _total, row):
        if row is None and done == 4:
            with torch.no_grad():
                trainer.model.get_parameter("heads.right.bias").fill_(float("nan"))

    with RunFolder(tmp_path, trainer.config) as folder:
        with pytest.raises(FloatingPointError, match=r"epoch 2, step 2: .*'right'"):
            trainer.fit(folder, poison)
        assert (len(folder.rows()), checkpoint(folder)["position"]["epochs"], folder.finished) == (1, 1, False)


@pytest.mark.parametrize("recipe", [name for name in recipes.RECIPES if name.startswith("multimnist_")])
def test_every_method_trains(tmp_path, recipe):
    config = small_config(recipe, epochs=1)
    row = train(tmp_path, replace(config, sharpness=Sharpness(samples=0))).rows()[0]
    assert all(math.isfinite(value) for value in row.values() if value is not None)
    assert (row["train/steps"], row["train/skipped"], row["train/dropped"]) == (3.0, 0.0, 0.0)
    assert ("train/loss/right" in row) == (config.task is None)


@pytest.mark.parametrize("recipe", ["multimnist_stl", "multimnist_f_stl"])
def test_a_task_can_be_trained_alone(tmp_path, recipe):
    config = replace(small_config(recipe), task="right")
    trainer = Trainer(config)
    assert trainer.tasks == ("right",)
    assert {name for name, _ in trainer.model.named_children()} == {"encoder", "heads"}
    assert list(trainer.model.heads) == ["right"]
    folder = train(tmp_path, config)
    assert set(folder.summary()["sharpness"]) == {"right"}
    assert folder.rows()[-1]["test/accuracy"] == folder.rows()[-1]["test/accuracy/right"]
    with pytest.raises(ValueError, match=r"multimnist has no task 'up'\. Its tasks: left, right\."):
        Trainer(replace(config, task="up"))


def test_what_a_weighting_trains_is_in_the_optimizer_and_does_not_decay():
    config = replace(small_config("multimnist_uw"), optimizer=Optimizer("adamw", weight_decay=0.1))
    network, weighting = Trainer(config).optimizer.param_groups
    assert (network["weight_decay"], weighting["weight_decay"]) == (0.1, 0.0)
    assert [tuple(p.shape) for p in weighting["params"]] == [(), ()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs"), small_config(epochs=3))


class TestMetrics:
    def test_there_is_one_object_an_epoch(self, folder):
        assert [row["epoch"] for row in lines(folder.path / "metrics.jsonl")] == [1, 2, 3]

    def test_averages_are_of_the_tasks(self, folder):
        for row in folder.rows():
            for split in ("validation", "test"):
                both = row[f"{split}/accuracy/left"] + row[f"{split}/accuracy/right"]
                assert row[f"{split}/accuracy"] == pytest.approx(both / 2)

    def test_training_statistics_are_of_the_steps(self, folder):
        row = folder.rows()[0]
        assert row["train/steps"] == 3
        assert 0 <= row["train/conflict"] <= 1
        assert row["train/sharpness/left"] == pytest.approx(row["train/perturbed_loss/left"] - row["train/loss/left"])

    def test_times_are_apart(self, folder):
        assert not [name for name in folder.rows()[0] if "second" in name]
        times = lines(folder.path / "times.jsonl")
        assert [set(time) for time in times] == [{"epoch", "seconds", "step_seconds"}] * 3
        assert folder.summary()["seconds"] == pytest.approx(sum(time["seconds"] for time in times))

    def test_the_summary_names_protocol_and_epoch(self, folder):
        summary, rows = folder.summary(), folder.rows()
        best = max(rows, key=lambda row: row["validation/accuracy"])
        assert (summary["protocol"], summary["epochs"]) == ("honest", [best["epoch"]])
        assert summary["test"]["accuracy"] == best["test/accuracy"]
        assert set(summary["sharpness"]) == {"left", "right"}
        assert summary["parameters"] == 31_910

    def test_the_environment_is_kept(self, folder):
        env = (folder.path / "env.json").read_text()
        assert torch.__version__.partition("+")[0] in env


def test_evaluation_leaves_the_model_alone():
    trainer = Trainer(small_config(model="resnet18"))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    assert trainer.evaluate("test") == trainer.evaluate("test")
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_accuracy_is_the_share_of_right_answers():
    trainer = Trainer(small_config())
    items = [trainer.data["test"][i] for i in range(len(trainer.data["test"]))]
    with torch.no_grad():
        answers = trainer.model(torch.stack([picture for picture, _ in items]))
    for task in trainer.tasks:
        truth = torch.tensor([targets[task] for _, targets in items])
        share = (answers[task].argmax(1) == truth).double().mean()
        assert trainer.evaluate("test")[f"accuracy/{task}"] == pytest.approx(float(share))


def test_without_a_validation_part_there_are_no_validation_metrics(tmp_path):
    config = small_config("multimnist_f_cagrad_official")
    config = replace(config, model="lenet", data=replace(config.data, validation_share=0.0), protocol="official")
    row = train(tmp_path, config).rows()[0]
    assert "test/accuracy" in row
    assert not [name for name in row if name.startswith("validation")]


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_precision_is_that_of_the_model(tmp_path, precision):
    trainer = Trainer(replace(small_config(), precision=precision))
    kind = {"64-true": torch.float64, "bf16-mixed": torch.float32}[precision]
    assert {p.dtype for p in trainer.model.parameters()} == {kind}
    outputs = []
    trainer.model.register_forward_hook(lambda _model, _inputs, out: outputs.extend(o.dtype for o in out.values()))
    with RunFolder(tmp_path, trainer.config) as folder:
        trainer.fit(folder)
    assert set(outputs) == {{"64-true": torch.float64, "bf16-mixed": torch.bfloat16}[precision]}


def test_the_source_is_named_by_what_auto_came_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Trainer(replace(small_config(), source="auto")).config.source == "mnist5k"


def test_sharpness_can_be_left_out(tmp_path):
    config = replace(small_config(), sharpness=Sharpness(samples=0))
    assert train(tmp_path, config).summary()["sharpness"] is None


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_optimizers_are_made_from_the_config(name):
    trainer = Trainer(replace(small_config(), optimizer=Optimizer(name, lr=0.25, weight_decay=0.125)))
    assert trainer.optimizer.param_groups[0]["lr"] == 0.25
    assert trainer.optimizer.param_groups[0]["weight_decay"] == 0.125


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "lenett"}, "unknown model 'lenett'. Did you mean 'lenet'"),
        ({"method": Method("mgd")}, "unknown aggregator 'mgd'. Did you mean 'mgda'"),
        ({"method": Method("cagrad", {"cc": 1.0})}, "bad --method.options .*: cagrad: .* 'cc'. Did you mean 'c'"),
        ({"device": "cuda"}, "no device 'cuda' on this machine"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_bad_value_is_named_before_anything_is_written(changes, message):
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    changes = {**changes, "rho": 0.0} if "method" in changes else changes
    with pytest.raises(ValueError, match=message):
        Trainer(replace(small_config(), **changes))


def test_random_streams_go_on_where_they_stood():
    def draw():
        return torch.rand(2).tolist(), random.random(), np.random.rand(2).tolist(), np.random.standard_normal()

    draw()  # an odd number of normals: NumPy keeps the second of a pair
    state = RandomStreams().state_dict()
    expected = draw()
    RandomStreams().load_state_dict(state)
    assert draw() == expected


class TestBrokenRuns:
    """What lies in a run folder and cannot be used is named, with what to do."""

    def test_metrics_without_a_checkpoint_are_not_trained_again(self, tmp_path):
        path = train(tmp_path, small_config()).path
        (path / "summary.json").unlink()
        shutil.rmtree(path / "checkpoints")
        with pytest.raises(
            RunError, match="metrics of 2 finished epochs but no checkpoint in checkpoints/ to go on from"
        ):
            train(tmp_path, small_config(), resume=True)

    @pytest.mark.parametrize("content", ["{", "1\n"])
    def test_broken_metrics_without_a_checkpoint_are_named(self, tmp_path, content):
        path = train(tmp_path, small_config()).path
        (path / "summary.json").unlink()
        shutil.rmtree(path / "checkpoints")
        (path / "metrics.jsonl").write_text(content)
        with pytest.raises(RunError, match=r"metrics.jsonl is broken .*Use --overwrite"):
            train(tmp_path, small_config(), resume=True)

    def test_a_run_on_other_data_is_not_gone_on_with(self, tmp_path):
        for name in "AB":
            images = np.random.RandomState(ord(name)).randint(0, 256, (200, 28, 28)).astype(np.uint8)
            (tmp_path / name).mkdir()
            np.savez(tmp_path / name / "mnist.npz", images=images, labels=np.arange(200) % 10)
        config = small_config(source="npz", root=str(tmp_path / "A"))
        path = train(tmp_path, config).path
        (path / "summary.json").unlink()
        with pytest.raises(RunError, match=f"was made with other data than those in {tmp_path / 'B'}"):
            train(tmp_path, replace(config, root=str(tmp_path / "B")), resume=True)
