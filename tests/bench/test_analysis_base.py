"""What all analyses build on: models left alone, batches that are loaded when asked for, runs that are read."""

import math
import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.bench.small import fit, small_config
from tests.bench.state import state
from torch import nn

from flatmtl_bench import cli
from flatmtl_bench.analysis.batches import Batches, closures
from flatmtl_bench.analysis.trained import epochs_kept, trained
from flatmtl_bench.analysis.untouched import untouched
from flatmtl_bench.figures import FIGURES
from flatmtl_bench.metrics import Classification
from flatmtl_bench.reports.reading import find, read
from flatmtl_bench.reports.results import tables
from flatmtl_bench.runs import RunError


class Counting(torch.utils.data.Dataset):
    """Numbers; it knows which of them were loaded."""

    def __init__(self, size):
        self.size, self.loaded = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.loaded.append(index)
        return torch.tensor([float(index)]), {"even": torch.tensor(1 - index % 2)}


class TestUntouched:
    def model(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
        model[1].eval()
        model[3].weight.requires_grad_(False)
        model[0].weight.grad = torch.ones(4, 3)
        return model

    @pytest.mark.parametrize("training", [False, True])
    def test_everything_comes_back_whatever_is_done_and_even_after_an_error(self, training):
        model = self.model()
        before, objects = state(model), list(model.parameters())
        with suppress(KeyError), untouched(model, training=training):
            assert {module.training for module in model.modules()} == {training}
            assert all(p.grad is None for p in model.parameters())
            model.train()
            model(torch.randn(8, 3)).sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(torch.randn_like(p)).requires_grad_(False)
            random.random()
            np.random.rand()
            raise KeyError
        assert state(model) == before
        assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))

    def test_a_tensor_that_was_put_in_the_place_of_another_goes(self):
        model = self.model()
        mean, weight = model[1].running_mean, model[0].weight
        with untouched(model):
            model[1].running_mean = mean + 1.0
            model[0].weight = nn.Parameter(torch.zeros(4, 3))
        assert model[1].running_mean is mean
        assert model[0].weight is weight
        assert not mean.any()


class TestBatches:
    @given(size=st.integers(1, 60), batch_size=st.integers(1, 70), samples=st.none() | st.integers(1, 70))
    def test_parts_differ_by_one_item_at_most_and_hold_each_item_once(self, size, batch_size, samples):
        parts = [inputs.flatten().tolist() for inputs, _ in Batches(Counting(size), batch_size, samples)]
        items = [item for part in parts for item in part]
        assert items == sorted(set(items))
        assert len(items) == min(size, samples or size)
        assert max(map(len, parts)) <= batch_size
        assert max(map(len, parts)) - min(map(len, parts)) <= 1

    def test_nothing_is_loaded_before_it_is_asked_for_and_nothing_is_kept(self):
        data = Counting(6)
        parts = Batches(data, 2)
        assert data.loaded == []
        for _ in range(2):
            data.loaded.clear()
            assert parts[1][0].flatten().tolist() == [2.0, 3.0]
            assert data.loaded == [2, 3]

    def test_a_closure_loads_its_batch_each_time(self):
        data, model = Counting(4), lambda inputs, tasks: dict.fromkeys(tasks, inputs)
        first, second = closures(model, Batches(data, 2), {"even": lambda output, target: output.sum()})
        assert data.loaded == []
        assert (float(first(["even"])["even"]), float(second(["even"])["even"])) == (1.0, 5.0)
        assert float(second(["even"])["even"]) == 5.0
        assert data.loaded == [0, 1, 2, 3, 2, 3]

    @pytest.mark.parametrize(("size", "batch_size", "samples"), [(0, 2, None), (3, 0, None), (3, 2, 0)])
    def test_nothing_to_load_is_an_error(self, size, batch_size, samples):
        with pytest.raises(ValueError, match="expected at least one"):
            Batches(Counting(size), batch_size, samples)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("runs"), small_config(epochs=2), keep_every=1)


class TestTrained:
    def test_its_test_metrics_are_those_of_the_run_at_every_epoch(self, run):
        rows = read(run).rows
        for epoch in (1, 2):
            found = trained(run, "test", epoch).evaluate()
            for name, value in found.items():
                assert value == pytest.approx(rows[epoch - 1][f"test/{name}"], rel=1e-6), name

    def test_without_an_epoch_it_is_the_one_that_counts(self, run):
        model = trained(run)
        assert model.epoch == read(run).summary["epochs"][-1]
        assert model.evaluate()["score"] == pytest.approx(read(run).summary["test"]["score"], rel=1e-6)

    def test_heads_belong_to_their_tasks(self, run):
        model = trained(run)
        heads = {task: list(head.parameters()) for task, head in model.model.heads.items()}
        found = model.parameters.heads
        assert {task: list(map(id, own)) for task, own in found.items()} == {
            task: list(map(id, own)) for task, own in heads.items()
        }

    def test_losses_are_those_of_the_objectives(self, run):
        model = trained(run)
        (closure,) = model.closures(16, batch_size=16)
        inputs, targets = model.batches(16, batch_size=16)[0]
        outputs = model.model(inputs, model.tasks)
        expected = {t: Classification(tuple("0123456789")).loss(outputs[t], targets[t]) for t in model.tasks}
        assert {t: x.item() for t, x in closure(model.tasks).items()} == {t: x.item() for t, x in expected.items()}

    def test_epochs_that_were_not_kept_are_an_error_that_names_those_that_were(self, run):
        assert epochs_kept(read(run)) == [1, 2]
        with pytest.raises(RunError, match="no snapshot of epoch 7. It has: 1, 2."):
            trained(run, epoch=7)

    def test_a_damaged_snapshot_is_an_error(self, run, tmp_path):
        copy = tmp_path / run.name
        copy.mkdir()
        for path in run.rglob("*"):
            if path.is_file():
                (copy / path.relative_to(run)).parent.mkdir(exist_ok=True, parents=True)
                (copy / path.relative_to(run)).write_bytes(path.read_bytes())
        (snapshot,) = (copy / "snapshots").glob("epoch-0001-*.pt")
        content = bytearray(snapshot.read_bytes())
        content[len(content) // 2] ^= 1
        snapshot.write_bytes(content)
        with pytest.raises(RunError, match="damaged"):
            trained(copy, epoch=1)

    def test_other_data_than_those_of_the_run_are_an_error(self, run, monkeypatch):
        monkeypatch.setattr("flatmtl_bench.data.multimnist.MultiMNIST.fingerprint", "others")
        with pytest.raises(RunError, match="made with other test data"):
            trained(run)

    def test_a_run_without_snapshots_says_how_to_keep_them(self, tmp_path):
        folder = fit(tmp_path, small_config("multimnist_cagrad", epochs=1))
        with pytest.raises(RunError, match="--keep-every"):
            epochs_kept(read(folder))


class TestCommand:
    @pytest.fixture
    def flatmtl(self, tmp_path, monkeypatch, capsys):
        """Run the command in a folder of its own; return its exit code and what it said."""
        monkeypatch.chdir(tmp_path)

        def call(*words):
            code = cli.main(words)
            return code, *capsys.readouterr()

        return call

    def test_data_and_pictures_are_written_and_not_replaced_unless_asked(self, run, tmp_path, flatmtl):
        words = ("figure", "sharpness", str(run), "--rho", "0.05", "--samples", "32", "--out", "figures")
        code, printed, _ = flatmtl(*words)
        assert code == 0
        paths = [tmp_path / line for line in printed.splitlines()]
        assert [path.name for path in paths] == ["sharpness.json", "sharpness.png", "sharpness.pdf"]
        assert [path.read_bytes()[:4] for path in paths[1:]] == [b"\x89PNG", b"%PDF"]
        code, _, said = flatmtl(*words)
        assert code == 2
        assert "exists. Use --overwrite" in said
        assert flatmtl(*words, "--overwrite")[0] == 0

    @pytest.mark.parametrize("words", [("figure",), ("figure", "--help")])
    def test_the_figures_are_listed(self, flatmtl, words):
        code, printed, _ = flatmtl(*words)
        assert code == 0
        assert all(name in printed for name in FIGURES)

    @pytest.mark.parametrize("device", ["meta", "nowhere"])
    def test_a_device_that_cannot_be_used_is_a_mistake(self, run, tmp_path, flatmtl, device):
        code, _, said = flatmtl("figure", "sharpness", str(run), "--device", device)
        assert code == 2
        assert f"--device {device} cannot be used here" in said

    def test_a_folder_that_cannot_be_made_is_found_before_anything_is_measured(self, run, tmp_path, flatmtl):
        (tmp_path / "figures").write_text("mine")
        code, _, said = flatmtl("figure", "sharpness", str(run), "--out", "figures/more")
        assert code == 2
        assert "figures is no folder that can be written to" in said
        assert (tmp_path / "figures").read_text() == "mine"
        assert "seed 0" not in said

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (("figure", "sharpnes", "runs"), "Did you mean 'sharpness'?"),
            (("figure", "sharpness", "nowhere"), "nowhere is no folder"),
            (("figure", "sharpness", "."), "no finished run in ."),
        ],
    )
    def test_mistakes_are_one_message(self, tmp_path, flatmtl, words, expected):
        code, printed, said = flatmtl(*words)
        assert (code, printed) == (2, "")
        assert expected in said
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bins", [0, 1_000_000])
def test_more_bins_than_anyone_can_see_are_refused(bins):
    with pytest.raises(ValueError, match="--bins must be a whole number from 1 to 1000"):
        FIGURES["calibration"](bins=bins)


def test_every_run_is_measured_by_itself_and_named(run):
    figure = FIGURES["sharpness"]((str(run),), rho=(0.05, 0.5), samples=32)
    records = figure.records(tables(find(figure.runs).runs))
    assert len(records) == 2 * 2 * 2  # epochs, radii, tasks
    assert {(r["data"], r["method"], r["flat"], r["seed"]) for r in records} == {("multimnist", "F-CAGrad", True, 0)}
    assert all(math.isfinite(record["sharpness"]) for record in records)
