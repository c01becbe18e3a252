"""Runs on pictures with a target for each pixel, which are cropped and flipped at random in training."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.bench.test_benchmarks_written import train
from tests.bench.written_data import write_nyuv2
from torch import nn

from flatmtl_bench import cli, recipes
from flatmtl_bench.analysis.trained import trained
from flatmtl_bench.metrics import Meter
from flatmtl_bench.recipes.config import Data, Sharpness
from flatmtl_bench.runs import RunError, RunFolder, run_name
from flatmtl_bench.trainer import Stopped, Trainer

ROOMS = Data("scenes", size=[32, 32], train_samples=9, validation_samples=4, test_samples=4)
TASKS = ("segmentation", "depth", "normals")


def config(recipe="scenes_f_imtl_g", data=ROOMS, **changes):
    """Return a recipe of eight small rooms, three steps an epoch."""
    small = {
        "model": "tests.bench.tiny:Tiny",
        "width": 1.0,
        "epochs": 2,
        "batch_size": 3,
        "device": "cpu",
        "loggers": [],
    }
    return replace(recipes.build(recipe), data=data, sharpness=Sharpness(samples=4), **{**small, **changes})


def rows(chosen, out):
    return (out / run_name(chosen) / "metrics.jsonl").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that was never interrupted."""
    out = tmp_path_factory.mktemp("whole")
    train(config(), out)
    return out


class TestPictures:
    @pytest.mark.parametrize("workers", [1, 2])
    def test_any_number_of_workers_gives_the_same_numbers(self, whole, tmp_path, workers):
        train(config(workers=workers), tmp_path)
        assert rows(config(), tmp_path) == rows(config(), whole)

    @pytest.mark.parametrize("steps", [1, 4])
    def test_an_interrupted_run_goes_on_with_the_same_ones(self, whole, tmp_path, steps):
        trainer = Trainer(config())
        with RunFolder(tmp_path, config()) as folder, pytest.raises(Stopped):
            trainer.fit(folder, lambda done, _total, _row: trainer.stop() if done == steps else None)
        with RunFolder(tmp_path, config(), resume=True) as folder:
            Trainer(config()).fit(folder)
        assert rows(config(), tmp_path) == rows(config(), whole)

    def test_they_differ_from_epoch_to_epoch_and_seed_to_seed(self):
        data = Trainer(config()).data["train"]
        seen = []
        for epoch in (1, 2):
            data.start_epoch(epoch)
            seen.append(torch.stack([data[i][0] for i in range(len(data))]))
        other = Trainer(config(seed=1)).data["train"]
        other.start_epoch(1)
        assert not torch.equal(*seen)
        assert not torch.equal(seen[0], torch.stack([other[i][0] for i in range(len(other))]))

    def test_without_augmentation_they_are_the_same_in_every_epoch(self):
        still = config(data=replace(ROOMS, augment=False))
        data = Trainer(still).data["train"]
        first = data[0][0]
        data.start_epoch(2)
        assert torch.equal(data[0][0], first)

    def test_sharpness_is_measured_on_them_as_they_are(self):
        trainer = Trainer(config())
        (closure,) = trainer._sample(3)
        before = closure(TASKS)["depth"]
        trainer.data["train"].start_epoch(7)
        assert torch.equal(trainer._sample(3)[0](TASKS)["depth"], before)


DARK = Data("nyuv2", unchecked=True, validation_share=0.25)
"""Files that may lack what they should have."""


class TestMissingLabels:
    def test_a_batch_without_labels_of_a_task_trains_the_others(self, tmp_path):
        root = write_nyuv2(tmp_path / "nyuv2")
        for path in (root / "train" / "depth").iterdir():
            np.save(path, np.zeros_like(np.load(path)))
        chosen = config("nyuv2_f_imtl_g", data=DARK, root=str(root), shared="all")
        trainer = Trainer(chosen)
        before = [p.clone() for p in trainer.model.heads["depth"].parameters()]
        for _ in trainer._steps():
            pass
        assert all(map(torch.equal, trainer.model.heads["depth"].parameters(), before))
        assert not torch.equal(trainer.model.heads["normals"].bias, before[1].new_zeros(3))
        assert trainer.evaluate("validation")["valid/depth"] == 0

    def test_what_was_not_valid_is_no_number_in_the_files(self, tmp_path):
        root = write_nyuv2(tmp_path / "nyuv2")
        for path in (root / "val" / "depth").iterdir():
            np.save(path, np.zeros_like(np.load(path)))
        summary = train(config("nyuv2_mgda", data=DARK, root=str(root)), tmp_path / "runs")
        assert "abs_err/depth" not in summary["test"]
        assert summary["test"]["loss/depth"] is None
        assert summary["test"]["valid/depth"] == 0
        assert "NaN" not in json.dumps(summary)


class TestShared:
    def test_what_two_tasks_reach_is_shared_else_all_outside_the_heads(self):
        narrow = {"model": "segnet_mtan", "width": 1 / 64}
        reached, every = (Trainer(config(shared=shared, **narrow)).parameters for shared in ("reached", "all"))
        size = [sum(p.numel() for p in parameters.shared) for parameters in (reached, every)]
        own = sum(p.numel() for head in every.heads.values() for p in head)
        model = Trainer(config(**narrow)).model
        assert size[0] < size[1] == sum(p.numel() for p in model.parameters()) - own

    def test_a_model_that_does_not_tell_its_heads_is_refused(self):
        with pytest.raises(ValueError, match="--shared all needs a model with an nn.ModuleDict `heads`"):
            Trainer(config(shared="all", model="tests.bench.test_trainer_scenes:Silent"))

    def test_a_model_that_returns_no_outputs_by_task_is_refused(self):
        with pytest.raises(
            ValueError, match="returned Tensor; expected {task: output} for the tasks it was called with"
        ):
            Trainer(config(model="tests.bench.test_trainer_scenes:Wrong"))


class Silent(nn.Module):
    """A model whose heads have names of their own."""

    def __init__(self, heads, in_channels):
        super().__init__()
        self.trunk = nn.Conv2d(in_channels, 2, 1)
        self.ends = nn.ModuleDict({task: nn.Conv2d(2, outputs, 1) for task, outputs in heads.items()})

    def forward(self, x, tasks=None):
        z = self.trunk(x)
        return {task: self.ends[task](z) for task in (self.ends if tasks is None else tasks)}


class Wrong(Silent):
    """A model that returns a tensor."""

    def forward(self, x, tasks=None):
        return self.trunk(x)


class TestTrained:
    @pytest.mark.parametrize("recipe", ["scenes_f_imtl_g", "scenes_stl"])
    def test_the_model_of_a_run_has_the_metrics_of_its_summary(self, tmp_path, recipe):
        summary = train(config(recipe), tmp_path)
        model = trained(tmp_path / run_name(config(recipe)))
        meters = {task: Meter(model.dataset.objectives[task], "pooled") for task in model.tasks}
        for index, outputs in model.outputs(range(len(model.dataset))).items():
            for task, meter in meters.items():
                meter.update(outputs[task].unsqueeze(0), model.dataset[index][1][task].unsqueeze(0))
        for task, meter in meters.items():
            better, values = model.dataset.objectives[task].better, meter.compute()
            found = {f"{name}/{task}": values[name] for name in better}
            assert found == pytest.approx({name: summary["test"][name] for name in found}, rel=1e-4)

    def test_a_run_without_its_checkpoint_is_refused(self, tmp_path):
        train(config(), tmp_path)
        path = tmp_path / run_name(config())
        for checkpoint in (path / "checkpoints").iterdir():
            checkpoint.unlink()
        with pytest.raises(RunError, match="has no checkpoint of epoch"):
            trained(path)


class Mute(Silent):
    """A model that says nothing once it is trained."""

    def forward(self, x, tasks=None):
        outputs = super().forward(x, tasks)
        return outputs if self.training else {task: output * float("nan") for task, output in outputs.items()}


class Normed(Silent):
    """A model that cannot be trained on one picture."""

    def __init__(self, heads, in_channels):
        super().__init__(heads, in_channels)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(2))

    def forward(self, x, tasks=None):
        z = self.trunk(x)
        z = z + self.pool(z)
        return {task: self.ends[task](z) for task in (self.ends if tasks is None else tasks)}


class TestHostileModels:
    HERE = "tests.bench.test_trainer_scenes"

    @pytest.mark.parametrize("recipe", ["scenes_mgda", "faces40_ls"])
    def test_outputs_that_are_no_numbers_have_no_metrics(self, recipe):
        name = recipe.partition("_")[0]
        model = f"{self.HERE}:{'Mute' if name == 'scenes' else 'MuteFaces'}"
        trainer = Trainer(config(recipe, replace(ROOMS, name=name), model=model))
        values = trainer.evaluate("validation")
        assert all(np.isnan(value) for name, value in values.items() if not name.startswith("valid"))

    def test_a_last_batch_of_one_picture_is_refused_before_the_first(self):
        rooms = replace(ROOMS, train_samples=7)
        with pytest.raises(ValueError, match="the last batch of an epoch is one item of 7, which .*:Normed cannot be"):
            Trainer(config(data=rooms, model=f"{self.HERE}:Normed"))
        assert Trainer(config(data=replace(rooms, train_samples=8), model=f"{self.HERE}:Normed")).tasks == TASKS


class MuteFaces(nn.Module):
    """A model of faces that says nothing once it is trained."""

    def __init__(self, heads, in_channels):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(in_channels, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.ends = nn.ModuleDict({task: nn.Linear(2, outputs) for task, outputs in heads.items()})

    def forward(self, x, tasks=None):
        z = self.trunk(x) * (1.0 if self.training else float("nan"))
        return {task: self.ends[task](z) for task in (self.ends if tasks is None else tasks)}


class TestData:
    def test_a_root_without_the_data_is_refused(self, tmp_path):
        for name in ("nyuv2", "cityscapes", "celeba", "multimnist"):
            chosen = replace(recipes.build(f"{name}_ls"), root=str(tmp_path), device="cpu")
            with pytest.raises(FileNotFoundError, match=f"in {tmp_path}.*`flatmtl data where"):
                Trainer(chosen)

    @pytest.mark.parametrize("workers", ["0", "1"])
    def test_a_file_that_breaks_while_a_run_trains_is_one_message(self, tmp_path, monkeypatch, capsys, workers):
        root = write_nyuv2(tmp_path / "nyuv2")
        path = root / "val" / "depth" / "1.npy"
        epoch = Trainer._epoch

        def breaks(trainer, *given):
            path.write_bytes(b"")
            return epoch(trainer, *given)

        monkeypatch.setattr(Trainer, "_epoch", breaks)
        tiny = ("--model", "tests.bench.tiny:Tiny", "--width", "1", "--epochs", "1", "--device", "cpu", "--loggers")
        words = ["run", "nyuv2_ls", "--root", str(root), *tiny, "--workers", workers, "--out", str(tmp_path / "runs")]
        assert cli.main(words) == 1
        said = capsys.readouterr().err
        assert f"flatmtl: {path}: cannot be read" in said
        assert "Traceback" not in said
        assert "The same command with --resume goes on." in said

    def test_a_run_goes_on_with_the_same_data_only(self, tmp_path):
        root = write_nyuv2(tmp_path / "nyuv2")
        chosen = config("nyuv2_ls", data=Data("nyuv2", validation_share=0.25), root=str(root))
        train(chosen, tmp_path / "runs")
        for path in (root / "train" / "label").iterdir():
            np.save(path, np.zeros_like(np.load(path)))
        changed = Trainer(chosen)
        with RunFolder(tmp_path / "runs", chosen, resume=True) as folder, pytest.raises(RunError, match="other data"):
            changed.provenance.check_result(folder)
