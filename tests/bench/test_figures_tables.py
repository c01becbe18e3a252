"""The figures `calibration`, `curves` and `rho`: what they say of runs whose numbers are known in another way."""

import json
from dataclasses import replace
from statistics import fmean, stdev

import numpy as np
import pytest
import torch
from tests.bench.small import fit, made_result, small_config
from tests.bench.test_trainer_scenes import config as scenes_config

from flatmtl_bench import cli
from flatmtl_bench.analysis.calibration import entropy_auroc
from flatmtl_bench.analysis.trained import trained
from flatmtl_bench.figures.calibration import AVERAGE, POOLED, CalibrationFigure
from flatmtl_bench.figures.curves import STEPS, CurvesFigure
from flatmtl_bench.figures.rho import RhoFigure
from flatmtl_bench.figures.style import style, where
from flatmtl_bench.recipes.config import Method
from flatmtl_bench.reports.reading import find, read
from flatmtl_bench.reports.results import tables
from flatmtl_bench.trainer import Trainer

PAIRS = {"accuracy/left": "higher", "accuracy/right": "higher"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two epochs of CAGrad without snapshots, and of its flat form with them."""
    out = tmp_path_factory.mktemp("runs")
    fit(out, small_config("multimnist_cagrad"))
    fit(out, small_config(), keep_every=1)
    return out


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """A run without a task that names a class, with a snapshot of its second epoch."""
    return fit(tmp_path_factory.mktemp("scenes"), scenes_config(), keep_every=2)


@pytest.fixture(scope="module")
def garments(tmp_path_factory):
    """A folder with 200 pictures of noise for MultiFashion."""
    root, generator = tmp_path_factory.mktemp("garments"), np.random.default_rng(0)
    images, labels = generator.integers(0, 256, (200, 28, 28), np.uint8), np.arange(200) % 10
    np.savez(root / "fashion200.npz", images=images, labels=labels)
    return root


def records_of(figure):
    """Return the records as the file of the figure has them."""
    return json.loads(json.dumps(figure.records(tables(find(figure.runs).runs)), allow_nan=False))


def drawing_of(figure, records):
    """Return the drawing, once it was rendered."""
    with style():
        drawing = figure.draw(records)
        drawing.canvas.draw()
    return drawing


def visible(drawing):
    return [axis for axis in drawing.axes if axis.get_visible()]


@pytest.fixture(scope="module")
def reliability(runs, garments):
    """The calibration figure of the runs."""
    others = {"out_of_domain_source": "npz", "out_of_domain_root": str(garments)}
    return CalibrationFigure((str(runs),), bins=5, out_of_domain=("multimnist", "multifashion"), **others)


@pytest.fixture(scope="module")
def calibrated(reliability):
    """Its records."""
    return records_of(reliability)


@pytest.fixture(scope="module")
def curved(runs):
    """The records of the curves of all splits."""
    return records_of(CurvesFigure((str(runs),), splits=("train", "validation", "test")))


class TestCalibration:
    def test_accuracy_over_all_bins_is_that_of_the_run(self, calibrated, runs):
        for run in find([runs]).runs:
            for task in ("left", "right"):
                (found,) = where(calibrated, method=run.config.label, kind="reliability", task=task)
                right = sum(n * a for n, a in zip(found["count"], found["accuracy"], strict=True) if n)
                assert right / sum(found["count"]) == pytest.approx(run.result(f"accuracy/{task}"), abs=1e-6)
                assert sum(found["count"]) == 64

    def test_tasks_are_pooled_and_averaged(self, calibrated):
        some = where(calibrated, method="CAGrad", kind="reliability")
        tasks = [where(some, task=task)[0] for task in ("left", "right")]
        (whole,), (average,) = where(some, task=POOLED), where(some, task=AVERAGE)
        assert whole["count"] == [sum(counts) for counts in zip(*(task["count"] for task in tasks), strict=True)]
        assert average["ece"] == pytest.approx(fmean(task["ece"] for task in tasks))
        assert average["brier"] == pytest.approx(fmean(task["brier"] for task in tasks))
        assert whole["brier"] == pytest.approx(average["brier"])
        assert whole["ece"] <= average["ece"] + 1e-12

    def test_entropies_are_of_the_own_data_and_of_others(self, calibrated):
        some = where(calibrated, method="F-CAGrad", kind="entropy", task="left")
        assert [record["measured_on"] for record in some] == ["multimnist", "multifashion"]
        assert [sum(record["count"]) for record in some] == [64, 64]
        assert some[0]["auroc"] is None
        assert 0 <= some[1]["auroc"] <= 1

    @torch.no_grad()
    def test_the_auroc_is_that_of_the_entropies(self, calibrated, runs, garments):
        (run,) = [run for run in find([runs]).runs if run.config.label == "F-CAGrad"]
        model = trained(run)
        other = replace(
            run.config, data=replace(run.config.data, name="multifashion"), source="npz", root=str(garments)
        )
        strange = Trainer(other).data["test"]
        entropies = []
        for dataset in (model.dataset, strange):
            inputs = torch.stack([dataset[i][0] for i in range(len(dataset))])
            p = model.model(inputs, ["left"])["left"].softmax(dim=1)
            entropies.append(-(p * p.log()).sum(dim=1))
        (found,) = where(calibrated, method="F-CAGrad", kind="entropy", task="left", measured_on="multifashion")
        assert found["auroc"] == pytest.approx(entropy_auroc(*entropies), abs=1e-3)
        assert found["mean"] == pytest.approx(float(entropies[1].mean()) / 10, rel=1e-4)

    def test_it_is_drawn_from_its_records(self, reliability, calibrated):
        drawing = drawing_of(reliability, calibrated)
        assert len(visible(drawing)) == 2 * 4 + 2  # of each task all four, of the tasks pooled the first two
        texts = [text.get_text() for axis in visible(drawing) for text in axis.get_legend().get_texts()]
        (found,) = where(calibrated, method="F-CAGrad", kind="reliability", task="left")
        assert f"{found['ece']:.3f}" in texts
        assert f"{found['brier']:.3f}" in texts

    def test_items_can_be_fewer(self, runs):
        figure = CalibrationFigure((str(runs),), split="train", samples=20)
        assert {sum(r["count"]) for r in records_of(figure) if r["task"] == "left"} == {20}

    def test_a_run_without_classes_says_what_to_choose(self, scenes):
        with pytest.raises(ValueError, match="no task that names one of several classes.*Choose runs on multimnist"):
            records_of(CalibrationFigure((str(scenes),)))

    def test_data_of_another_shape_are_an_error(self, runs):
        figure = CalibrationFigure((str(runs),), out_of_domain=("faces40",), out_of_domain_source="faces40")
        with pytest.raises(ValueError, match=r"of faces40 are of shape .* those of multimnist of \(1, 36, 36\)"):
            records_of(figure)


class TestCurves:
    @pytest.mark.parametrize(("name", "scale"), [("loss", 1.0), ("accuracy", 100.0)])
    @pytest.mark.parametrize("split", ["validation", "test"])
    def test_test_and_validation_values_are_those_of_the_run(self, curved, runs, name, scale, split):
        for run in find([runs]).runs:
            some = where(curved, method=run.config.label, split=split, task="right", metric=name)
            expected = [scale * value for value in run.series(f"{split}/{name}/right")]
            assert [record["value"] for record in some] == pytest.approx(expected)
            assert [record["epoch"] for record in some] == [1, 2]

    def test_training_values_are_those_of_the_snapshots(self, curved, runs):
        (run,) = [run for run in find([runs]).runs if run.config.label == "F-CAGrad"]
        for epoch in (1, 2):
            expected = trained(run, "train", epoch).evaluate()
            some = where(curved, method="F-CAGrad", split="train", epoch=epoch, task="left")
            found = {record["metric"]: record["value"] for record in some}
            assert found == {"accuracy": 100 * expected["accuracy/left"], "loss": expected["loss/left"]}

    def test_without_snapshots_there_is_the_loss_of_the_steps_and_a_word_on_it(self, runs, capsys):
        records = records_of(CurvesFigure((str(runs),)))
        plain = where(records, method="CAGrad")
        assert {(r["split"], r["metric"]) for r in plain} == {(STEPS, "loss"), ("test", "loss"), ("test", "accuracy")}
        (run,) = [run for run in find([runs]).runs if run.config.label == "CAGrad"]
        found = [record["value"] for record in where(plain, split=STEPS, task="left")]
        assert found == run.series("train/loss/left")
        assert capsys.readouterr().err.count("--keep-every 1") == 1

    def test_directions_and_units_are_said(self, curved, scenes):
        said = {(r["metric"], r["unit"], r["better"]) for r in curved}
        assert said == {("accuracy", "%", "higher"), ("loss", "nats", "lower")}
        said = {(r["task"], r["metric"], r["unit"], r["better"]) for r in records_of(CurvesFigure((str(scenes),)))}
        assert said == {
            ("segmentation", "miou", "%", "higher"),
            ("segmentation", "loss", "nats", "lower"),
            ("depth", "abs_err", "in units of the depth", "lower"),
            ("depth", "loss", "in units of the depth", "lower"),
            ("normals", "mean", "°", "lower"),
            ("normals", "loss", "1 - cosine", "lower"),
        }

    def test_measures_of_two_kinds_never_share_a_panel(self, curved):
        """One of the runs has no snapshots: of the training loss all show the mean over the steps."""
        figure = CurvesFigure(splits=("train", "test"))
        drawing = drawing_of(figure, where(curved, task="left"))
        panels = {axis.get_ylabel().partition("\n")[0]: axis for axis in drawing.axes if axis.get_ylabel()}
        for method in ("CAGrad", "F-CAGrad"):
            (line,) = [line for line in panels["left: loss (nats)"].lines if line.get_label() == method]
            steps = where(curved, task="left", method=method, split=STEPS)
            assert line.get_ydata().tolist() == [record["value"] for record in steps]
        (line,) = panels["left: accuracy (%)"].lines
        assert line.get_label() == "F-CAGrad"

    def test_runs_without_any_snapshot_are_drawn(self, curved):
        drawing = drawing_of(CurvesFigure(), where(curved, method="CAGrad"))
        assert any("no snapshots" in text.get_text() for axis in drawing.axes for text in axis.texts)

    @pytest.mark.parametrize("splits", [(), ("test", "test")])
    def test_splits_are_named_once(self, splits):
        with pytest.raises(ValueError, match="--splits names .*; expected at least one, each once"):
            CurvesFigure(splits=splits)

    def test_nothing_to_draw_is_a_mistake(self, tmp_path, capsys):
        path = made_result(tmp_path, small_config(), {"accuracy/left": 0.5, "accuracy/right": 0.5}, PAIRS, score=None)
        words = ["figure", "curves", str(path), "--splits", "validation", "--out", str(tmp_path / "figures")]
        assert cli.main(words) == 2
        said = capsys.readouterr().err
        assert "has no metrics of validation data" in said
        assert "nothing to draw" in said
        assert not (tmp_path / "figures").exists()

    def test_single_task_runs_of_some_tasks_alone_are_named(self, tmp_path, capsys):
        alone = small_config("multimnist_stl", task="left")
        path = made_result(tmp_path, alone, {"accuracy/left": 0.5}, {"accuracy/left": "higher"})
        both = made_result(tmp_path, small_config(), {"accuracy/left": 0.5, "accuracy/right": 0.5}, PAIRS)
        words = ["figure", "rho", str(path), str(both), "--out", str(tmp_path / "figures")]
        assert cli.main(words) == 0
        assert "STL lacks runs of task right" in capsys.readouterr().err
        data = json.loads((tmp_path / "figures" / "rho.json").read_text())
        assert {record["method"] for record in data["records"]} == {"F-CAGrad"}

    def test_a_value_that_was_not_finite_is_left_out(self, runs, tmp_path):
        path = made_result(tmp_path, small_config(seed=9), {"accuracy/left": None, "accuracy/right": 0.5}, PAIRS)
        records = records_of(CurvesFigure((str(path),), splits=("test",)))
        assert [r["value"] for r in where(records, metric="accuracy")] == [None, 50.0]
        assert drawing_of(CurvesFigure(splits=("test",)), records).axes


def swept(out, radii, seeds=(0,), recipe="multimnist_f_cagrad", **changes):
    """Write a run of each radius and seed; its accuracies are known, see :func:`accuracies`."""
    for rho in radii:
        for seed in seeds:
            made_result(out, small_config(recipe, rho=rho, seed=seed, **changes), accuracies(rho, seed), PAIRS)


def accuracies(rho, seed):
    return {"accuracy/left": 0.5 + rho / 10 + seed / 100, "accuracy/right": 0.25 + rho / 10}


def points(figure, records):
    """Return for each method what the panel of the average shows: radius -> mean, and the bars' half heights."""
    axis = drawing_of(figure, records).axes[2]
    assert "average accuracy, %" in axis.get_ylabel()
    return {
        bars.get_label(): {
            float(x): (float(y), (segment[1][1] - segment[0][1]) / 2)
            for x, y, segment in zip(*bars.lines[0].get_data(), bars.lines[2][0].get_segments(), strict=True)
        }
        for bars in axis.containers
    }


class TestRho:
    def test_a_curve_has_the_mean_and_the_deviation_of_the_seeds(self, tmp_path):
        swept(tmp_path, [0.5, 1.5, 3.0], seeds=(0, 1, 2))
        figure = RhoFigure((str(tmp_path),))
        found = points(figure, records_of(figure))
        assert list(found) == ["F-CAGrad"]
        for rho, (mean, half) in found["F-CAGrad"].items():
            values = [50 * sum(accuracies(rho, seed).values()) for seed in (0, 1, 2)]
            assert (mean, half) == pytest.approx((fmean(values), stdev(values)))
        assert list(found["F-CAGrad"]) == [0.5, 1.5, 3.0]

    def test_every_task_and_their_mean_are_measured(self, tmp_path):
        swept(tmp_path, [0.5])
        records = records_of(RhoFigure((str(tmp_path),)))
        expected = {"left accuracy, %": 55.0, "right accuracy, %": 30.0, "average accuracy, %": 42.5}
        assert {r["metric"]: r["value"] for r in records} == pytest.approx(expected)
        assert {r["better"] for r in records} == {"higher"}

    def test_a_plain_method_is_the_point_at_zero_of_its_flat_forms(self, tmp_path):
        swept(tmp_path, [0.0], recipe="multimnist_cagrad")
        swept(tmp_path, [0.5, 1.0])
        swept(tmp_path, [0.5], recipe="multimnist_f_mgda")
        figure = RhoFigure((str(tmp_path),))
        found = points(figure, records_of(figure))
        assert {method: list(some) for method, some in found.items()} == {"F-CAGrad": [0.0, 0.5, 1.0], "F-MGDA": [0.5]}

    def test_a_flat_form_with_runs_at_zero_keeps_them_alone(self, tmp_path, capsys):
        swept(tmp_path, [0.0], recipe="multimnist_cagrad", seeds=(0, 1))
        swept(tmp_path, [0.0, 1.0])
        figure = RhoFigure((str(tmp_path),))
        records = records_of(figure)
        assert [r["seed"] for r in where(records, rho=0.0, metric="left accuracy, %")] == [0]
        assert "F-CAGrad has runs of its own at rho 0" in capsys.readouterr().err

    def test_runs_that_differ_in_more_are_curves_of_their_own(self, tmp_path):
        method = small_config().method
        for c in (0.2, 0.8):
            swept(tmp_path, [0.5, 1.0], method=replace(method, options={"c": c}))
        swept(tmp_path, [0.0], recipe="multimnist_cagrad", method=Method("cagrad", {"c": 0.2}))
        figure = RhoFigure((str(tmp_path),))
        found = points(figure, records_of(figure))
        assert {method: list(some) for method, some in found.items()} == {
            "F-CAGrad c=0.2": [0.0, 0.5, 1.0],
            "F-CAGrad c=0.8": [0.5, 1.0],
        }

    def test_a_form_whose_heads_have_a_radius_of_their_own_is_not_plain_at_zero(self, tmp_path):
        swept(tmp_path, [0.0], recipe="multimnist_cagrad")
        swept(tmp_path, [0.5, 1.0], method=replace(small_config().method, rho_heads=0.5))
        figure = RhoFigure((str(tmp_path),))
        found = points(figure, records_of(figure))
        assert sorted(map(list, found.values())) == [[0.0], [0.5, 1.0]]

    def test_one_radius_is_a_point_and_a_word_on_sweeps(self, tmp_path, capsys):
        swept(tmp_path, [0.5])
        figure = RhoFigure((str(tmp_path),))
        assert points(figure, records_of(figure)) == {"F-CAGrad": {0.5: (pytest.approx(42.5), 0.0)}}
        assert "--grid rho=0,0.5,1" in capsys.readouterr().err

    def test_a_run_that_failed_is_named_and_left_out(self, tmp_path, capsys):
        swept(tmp_path, [0.5], seeds=(0,))
        failed = {"accuracy/left": None, "accuracy/right": 0.5}
        path = made_result(tmp_path, small_config(rho=0.5, seed=1), failed, PAIRS)
        figure = RhoFigure((str(tmp_path),))
        records = records_of(figure)
        assert [r["value"] for r in where(records, seed=1)] == [None, 50.0, None]
        assert f"{path}: left accuracy, % is not finite" in capsys.readouterr().err
        assert points(figure, records) == {"F-CAGrad": {0.5: (pytest.approx(42.5), 0.0)}}

    def test_what_other_metrics_have_no_mean_over_the_tasks(self, scenes):
        records = records_of(RhoFigure((str(scenes),)))
        assert {r["metric"]: r["value"] for r in records}["depth abs err"] == read(scenes).result("abs_err/depth")
        assert {r["better"] for r in records} == {"higher", "lower"}
        assert not any("average" in r["metric"] for r in records)
