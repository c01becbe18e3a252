"""Figures of loss surfaces, robustness and segmentation: what they measure of runs, and what they draw."""

import json
import math
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from tests.bench.small import fit, small_config
from tests.bench.test_trainer_scenes import ROOMS
from tests.bench.test_trainer_scenes import config as scenes_config
from torch import nn

from flatmtl_bench import cli
from flatmtl_bench.analysis.trained import trained
from flatmtl_bench.data.painting import class_colour
from flatmtl_bench.figures.landscape import LandscapeFigure
from flatmtl_bench.figures.robustness import RobustnessFigure, _columns
from flatmtl_bench.figures.segmentation import SegmentationFigure, _class_numbers, _labels, _picture, _png
from flatmtl_bench.figures.style import style
from flatmtl_bench.reports.reading import Run, find, read
from flatmtl_bench.reports.results import tables

TASKS = ("left", "right")


class Normed(nn.Module):
    """A small model with BatchNorm and Dropout."""

    def __init__(self, heads, in_channels):
        super().__init__()
        layers = nn.Conv2d(in_channels, 4, 5, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        self.trunk = nn.Sequential(*layers, nn.Dropout(0.2))
        self.heads = nn.ModuleDict({task: nn.Linear(16, outputs) for task, outputs in heads.items()})

    def forward(self, x, tasks=None):
        z = self.trunk(x)
        return {task: self.heads[task](z) for task in (self.heads if tasks is None else tasks)}


NORMED = "tests.bench.test_figures_surfaces:Normed"


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A folder of plain and flat runs on digits, of two seeds."""
    out = tmp_path_factory.mktemp("digits")
    for recipe in ("multimnist_cagrad", "multimnist_f_cagrad"):
        for seed in (0, 1):
            fit(out, small_config(recipe, seed=seed, epochs=1, model=NORMED, loggers=[]))
    return out


@pytest.fixture(scope="module")
def rooms(tmp_path_factory):
    """A folder of a plain and a flat run on rooms."""
    out = tmp_path_factory.mktemp("rooms")
    for recipe in ("scenes_imtl_g", "scenes_f_imtl_g"):
        fit(out, scenes_config(recipe, epochs=1))
    return out


def runs_in(folder):
    return find([folder]).runs


def records_of(figure, folder):
    """Return what the command would write and draw: what JSON has kept."""
    return json.loads(json.dumps(figure.records(tables(runs_in(folder))), allow_nan=False))


def axes_of(drawing, kind="rectilinear"):
    return [axis for axis in drawing.axes if axis.name == kind and axis.get_label() != "<colorbar>"]


def texts(drawing):
    """All texts of a drawing, as one."""
    return "\n".join(text.get_text() for text in drawing.findobj(plt.Text))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("landscape", ("--steps", "1", "--samples", "16")),
        ("robustness", ("--radii", "0", "1", "--draws", "1", "--samples", "16")),
    ],
)
def test_the_command_writes_data_and_pictures(digits, tmp_path, name, words, capsys):
    assert cli.main(["figure", name, str(digits), *words, "--out", str(tmp_path)]) == 0
    paths = capsys.readouterr().out.splitlines()
    assert [path.rpartition("/")[2] for path in paths] == [f"{name}.json", f"{name}.png", f"{name}.pdf"]
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_draws_segmentations(rooms, tmp_path, capsys):
    assert cli.main(["figure", "segmentation", str(rooms), "--out", str(tmp_path)]) == 0
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        f"segmentation.{end}" for end in ("json", "pdf", "png")
    ]


def test_the_command_says_which_runs_have_a_segmentation(digits, tmp_path, capsys):
    assert cli.main(["figure", "segmentation", str(digits), "--out", str(tmp_path)]) == 2
    assert "has no segmentation task" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


class TestLandscape:
    FIGURE = LandscapeFigure(steps=1, span=0.5, samples=32)

    @pytest.fixture(scope="class")
    @classmethod
    def records(cls, digits):
        return records_of(cls.FIGURE, digits)

    def test_there_is_a_surface_for_each_task_of_each_run(self, records):
        assert len(records) == 4 * 2
        assert {(r["method"], r["seed"], r["task"]) for r in records} == {
            (method, seed, task) for method in ("CAGrad", "F-CAGrad") for seed in (0, 1) for task in TASKS
        }
        assert {np.shape(r["loss"]) for r in records} == {(3, 3)}
        assert all(r["positions"] == [-0.5, 0.0, 0.5] for r in records)

    def test_its_centre_is_the_test_loss_of_the_epoch_that_counts(self, digits, records):
        for run in runs_in(digits):
            model = trained(run)
            exact = model.evaluate(32)
            of_run = [r for r in records if (r["method"], r["seed"]) == (run.config.label, run.config.seed)]
            assert {r["task"]: r["loss"][1][1] for r in of_run} == {task: exact[f"loss/{task}"] for task in TASKS}
            assert all(r["centre"] == r["loss"][1][1] for r in of_run)
            assert {r["epoch"] for r in of_run} == {run.summary["epochs"][-1]}

    def test_the_rise_is_the_mean_over_the_square(self, records):
        for r in records:
            assert r["rise"] == pytest.approx(np.mean(r["loss"]) - r["loss"][1][1], rel=1e-9)

    def test_statistics_of_batch_norm_are_frozen_or_those_of_training_samples(self, digits, records):
        run = runs_in(digits)[0]
        (again, *_) = replace(self.FIGURE, batch_norm="re-estimated").measure(run)
        assert again["batch_norm"] == "re-estimated"
        assert {r["batch_norm"] for r in records} == {"frozen"}
        assert again["loss"] != records[0]["loss"]

    def test_a_model_without_batch_norm_says_so(self, tmp_path):
        run = read(fit(tmp_path, small_config(epochs=1, loggers=[])))
        figure = replace(self.FIGURE, batch_norm="re-estimated")
        assert [r["batch_norm"] for r in figure.measure(run)] == ["none"] * 2

    def test_the_first_seed_of_each_method_is_drawn_on_the_levels_of_its_row(self, records):
        drawing = self.FIGURE.draw(records)
        contours, surfaces = axes_of(drawing), axes_of(drawing, "3d")
        assert [len(contours), len(surfaces)] == [4, 4]
        assert [axis.get_title() for axis in contours] == ["CAGrad, seed 0", "F-CAGrad, seed 0"] * 2
        for task, (plain, flat) in zip(TASKS, (contours[:2], contours[2:]), strict=True):
            drawn = [r["loss"] for r in records if r["task"] == task and r["seed"] == 0]
            levels = plain.collections[0].levels
            assert np.allclose(np.diff(np.log(levels)), np.log(levels[1] / levels[0]))
            assert levels.tolist() == flat.collections[0].levels.tolist()
            assert (levels[0], levels[-1]) == pytest.approx((np.min(drawn), np.max(drawn)))
        assert {axis.get_zlim() for axis in surfaces} == {(0, 1)}

    def test_the_first_direction_goes_to_the_right(self):
        """A loss that rises along the first direction alone has contours that are vertical lines."""
        records = [self.record(loss=[[1.0] * 3, [2.0] * 3, [4.0] * 3])]
        contours = axes_of(self.FIGURE.draw(records))[0].collections[1]
        paths = [path.vertices for path in contours.get_paths() if len(path.vertices)]
        assert paths
        assert all(np.ptp(vertices[:, 0]) < 1e-9 < np.ptp(vertices[:, 1]) for vertices in paths)

    def record(self, **changes):
        whose = {"data": "multimnist", "method": "CAGrad", "flat": False, "seed": 0}
        common = {"split": "test", "task": "left", "unit": "nats", "samples": 8, "batch_norm": "none", "epoch": 1}
        numbers = {"positions": [-0.5, 0.0, 0.5], "centre": 2.0, "rise": 0.5}
        return {**whose, **common, **numbers, **changes}

    @pytest.mark.parametrize("lowest", [-1.0, 0.0])
    def test_losses_that_are_not_positive_have_levels_at_equal_distances(self, lowest):
        drawing = self.FIGURE.draw([self.record(loss=[[lowest] * 3, [0.5] * 3, [1.0] * 3])])
        levels = axes_of(drawing)[0].collections[0].levels
        assert np.allclose(np.diff(levels), (1.0 - lowest) / (len(levels) - 1))

    @pytest.mark.parametrize("height", [1.0, 0.0])
    def test_a_plane_is_drawn(self, height):
        drawing = self.FIGURE.draw([self.record(loss=[[height] * 3] * 3, centre=height, rise=0.0)])
        assert f"loss {height:g},\nmean rise 0" in texts(drawing)

    def test_what_is_not_finite_is_left_out_and_said(self):
        holes = [[None, 1.0, 2.0], [1.0, 1.0, 2.0], [None, 1.0, 4.0]]
        nothing = [[None] * 3] * 3
        records = [
            self.record(loss=holes, centre=1.0, rise=None),
            self.record(loss=nothing, centre=None, rise=None, task="right"),
        ]
        drawing = self.FIGURE.draw(records)
        written = texts(drawing)
        assert "loss 1,\nmean rise: not finite" in written
        assert "no finite loss" in written
        levels = axes_of(drawing)[0].collections[0].levels
        assert (levels[0], levels[-1]) == pytest.approx((1.0, 4.0))

    def test_the_spread_over_seeds_is_told(self, records):
        left = [r["centre"] for r in records if r["task"] == "left" and r["method"] == "CAGrad"]
        written = texts(self.FIGURE.draw(records))
        assert f"loss {np.mean(left):.3g} ± {np.std(left, ddof=1):.2g}" in written
        assert "BatchNorm statistics frozen" in written

    @pytest.mark.parametrize(
        ("options", "said"),
        [({"steps": 0}, "--steps must be a whole number from 1"), ({"span": -1.0}, "--span must be a finite number")],
    )
    def test_bad_options_are_refused(self, options, said):
        with pytest.raises(ValueError, match=said):
            LandscapeFigure(**options)


class TestRobustness:
    FIGURE = RobustnessFigure(radii=(0.0, 2.0), draws=2, samples=32)

    @pytest.fixture(scope="class")
    @classmethod
    def records(cls, digits):
        return records_of(cls.FIGURE, digits)

    def test_there_is_a_record_for_each_run_task_split_radius_and_draw(self, records):
        assert len(records) == 4 * 2 * 2 * 2 * 2
        assert {r["split"] for r in records} == {"train", "test"}
        assert {(r["metric"], r["better"]) for r in records} == {
            ("left accuracy, %", "higher"),
            ("right accuracy, %", "higher"),
        }

    def test_at_radius_zero_it_is_the_accuracy_of_the_model_on_each_split(self, digits, records):
        run = runs_in(digits)[0]
        for split in ("train", "test"):
            exact = trained(run, split).evaluate(32)
            for task in TASKS:
                same = {"split": split, "metric": f"{task} accuracy, %", "radius": 0.0, "seed": run.config.seed}
                found = [r for r in records if r["method"] == run.config.label and same.items() <= r.items()]
                assert [r["value"] for r in found] == [100 * exact[f"accuracy/{task}"]] * 2

    def test_size_and_norm_of_the_weights_are_told(self, digits, records):
        run = runs_in(digits)[0]
        weights = torch.nn.utils.parameters_to_vector(trained(run).model.parameters()).detach().double()
        (norm, size) = next(
            (r["weight_norm"], r["parameters"])
            for r in records
            if (r["method"], r["seed"]) == (run.config.label, run.config.seed)
        )
        assert size == len(weights)
        assert norm == pytest.approx(np.linalg.norm(weights.numpy()), rel=1e-6)

    @pytest.mark.parametrize(("scale", "farthest"), [("absolute", 1000.0), ("relative", 1.0), ("filter", 1.0)])
    def test_each_scale_has_its_usual_radii(self, digits, scale, farthest):
        run = runs_in(digits)[0]
        records = list(RobustnessFigure(scale=scale, draws=1, samples=8).measure(run))
        radii = sorted({r["radius"] for r in records})
        assert radii == pytest.approx(np.linspace(0, farthest, 21).tolist())
        assert {r["scale"] for r in records} == {scale}

    def test_curves_are_means_over_draws_and_seeds(self, records):
        drawing = self.FIGURE.draw(records)
        (left, _) = drawing.axes
        lines = {line.get_label(): line for line in left.lines}
        assert list(lines) == [f"{method}, {split}" for method in ("CAGrad", "F-CAGrad") for split in ("train", "test")]
        for label, line in lines.items():
            method, split = label.split(", ")
            found = [
                r for r in records if (r["metric"], r["method"], r["split"]) == ("left accuracy, %", method, split)
            ]
            means = [np.mean([r["value"] for r in found if r["radius"] == radius]) for radius in (0.0, 2.0)]
            assert line.get_ydata() == pytest.approx(means)
            assert line.get_linestyle() == {"train": "-", "test": "--"}[split]

    def test_methods_differ_in_colour_and_marker(self, records):
        lines = self.FIGURE.draw(records).axes[0].lines
        looks = {(line.get_color(), line.get_marker()) for line in lines}
        assert len(looks) == len({colour for colour, _ in looks}) == len({marker for _, marker in looks}) == 2

    def test_axes_have_units_and_the_spread_is_named(self, records):
        written = texts(self.FIGURE.draw(records))
        assert "left accuracy, %\nhigher is better" in written
        assert "radius (norm of the perturbation)" in written
        assert "mean over directions and seeds; band: one standard deviation" in written.replace("\n", " ")
        assert "weight norm: CAGrad" in written

    def test_tasks_without_an_accuracy_have_the_first_of_their_metrics(self, rooms):
        figure = replace(self.FIGURE, samples=2)
        records = records_of(figure, rooms)
        assert {(r["metric"], r["better"]) for r in records} == {
            ("segmentation miou, %", "higher"),
            ("depth abs err", "lower"),
            ("normals mean, °", "lower"),
        }
        written = texts(figure.draw(records))
        assert "depth abs err\nlower is better" in written
        assert "normals mean, °\nlower is better" in written

    def test_many_tasks_are_one_row_of_their_mean(self):
        better = {f"error/Attribute_{k}": "lower" for k in range(40)}
        forty = Run(Path("run"), small_config(), {}, {}, {"better": better})
        (column,) = _columns(forty)
        assert (column.heading, column.better) == ("average error, %", "lower")
        assert column.value({f"error/Attribute_{k}": float(k) for k in range(40)}) == 19.5

    def test_the_legend_is_no_wider_than_the_drawing(self, records):
        with style():
            drawing = self.FIGURE.draw(records)
            drawing.draw_without_rendering()
        box = drawing.legends[0].get_window_extent()
        assert 0 <= box.x0 < box.x1 <= drawing.bbox.width

    def test_what_is_not_finite_is_none(self, digits):
        figure = replace(self.FIGURE, radii=(0.0, 3e38), draws=1, samples=8)
        records = list(figure.measure(runs_in(digits)[0]))
        far = [r["value"] for r in records if r["radius"] > 0]
        assert far == [None] * 4
        assert all(math.isfinite(r["value"]) for r in records if r["radius"] == 0.0)


class TestSegmentation:
    FIGURE = SegmentationFigure(pictures=(1, 3), train_picture=2)

    @pytest.fixture(scope="class")
    @classmethod
    def records(cls, rooms):
        return records_of(cls.FIGURE, rooms)

    def test_rows_are_a_training_picture_augmented_and_as_it_was_and_unseen_ones(self, records):
        assert list(dict.fromkeys(r["row"] for r in records)) == [
            "training,\naugmented",
            "training,\noriginal",
            "unseen\n1",
            "unseen\n3",
        ]
        assert {r["task"] for r in records} == {"segmentation"}
        assert [r["method"] for r in records] == ["IMTL-G"] * 4 + ["F-IMTL-G"] * 4

    def test_pictures_and_truths_are_those_of_the_data_and_predictions_those_of_the_model(self, rooms, records):
        run = runs_in(rooms)[0]
        test, train = trained(run, "test"), trained(run, "train")
        expected = {"training,\noriginal": train.dataset[2], "unseen\n1": test.dataset[1], "unseen\n3": test.dataset[3]}
        for r in (r for r in records if r["method"] == run.config.label and r["row"] in expected):
            picture, targets = expected[r["row"]]
            kept = _picture(r["picture"]) / 255
            np.testing.assert_allclose(kept, picture.movedim(0, -1).numpy(), atol=0.5 / 255 + 1e-6)
            assert torch.equal(_labels(r["truth"]), targets["segmentation"])
            with torch.no_grad():
                said = test.model(picture[None], ["segmentation"])["segmentation"][0]
            assert torch.equal(_labels(r["prediction"]), said.argmax(0))

    def test_all_runs_see_one_augmentation_whatever_their_seed(self, rooms, records, tmp_path):
        other = read(fit(tmp_path, scenes_config("scenes_imtl_g", seed=1, epochs=1)))
        augmented = [r for r in [*records, *self.FIGURE.measure(other)] if r["row"].endswith("augmented")]
        assert len(augmented) == 3
        assert len({(r["picture"], r["truth"]) for r in augmented}) == 1
        assert augmented[0]["picture"] != next(r["picture"] for r in records if r["row"].endswith("original"))

    def test_a_run_without_augmentation_has_no_such_row(self, tmp_path):
        data = replace(ROOMS, augment=False)
        run = read(fit(tmp_path, scenes_config("scenes_imtl_g", data, epochs=1)))
        assert [r["row"] for r in self.FIGURE.measure(run)] == ["training,\noriginal", "unseen\n1", "unseen\n3"]

    def test_each_run_has_a_column_and_its_panels_are_painted_by_class(self, records):
        drawing = self.FIGURE.draw(records)
        panels = np.array(drawing.axes).reshape(4, 4)
        assert [axis.get_title() for axis in panels[0]] == ["input", "truth", "IMTL-G\nseed 0", "F-IMTL-G\nseed 0"]
        for row, label in zip(panels, dict.fromkeys(r["row"] for r in records), strict=True):
            plain, flat = (r for r in records if r["row"] == label)
            truth = _labels(plain["truth"])
            for axis, record in ((row[2], plain), (row[3], flat)):
                painted = np.array([class_colour(k) for k in range(13)])[_labels(record["prediction"])]
                np.testing.assert_allclose(np.asarray(axis.images[0].get_array())[truth >= 0], painted[truth >= 0])
            right = (_labels(plain["prediction"]) == truth)[truth >= 0].double().mean().item()
            assert row[2].get_xlabel() == f"{right:.0%} right"
        assert {*records[0]["classes"]} <= {text.get_text() for text in drawing.legends[0].get_texts()}

    def test_pixels_without_a_label_are_hatched_in_the_truth_and_pale_in_predictions(self, records):
        truth = _labels(records[0]["truth"])
        truth[:8], truth[8:] = -1, 0
        _, true, predicted = self.FIGURE.draw([{**records[0], "truth": encoded(truth)}]).axes
        hatched = np.asarray(true.images[0].get_array())[:8]
        assert {tuple(colour) for colour in hatched.reshape(-1, 3)} == {(1.0,) * 3, (0.35,) * 3}
        colours = np.array([class_colour(k) for k in range(13)])[_labels(records[0]["prediction"])]
        shown = np.asarray(predicted.images[0].get_array())
        np.testing.assert_allclose(shown[8:], colours[8:])
        np.testing.assert_allclose(1 - shown[:8], 0.35 * (1 - colours[:8]))

    def test_a_picture_without_any_label_is_drawn(self, records):
        truth = torch.full_like(_labels(records[0]["truth"]), -1)
        drawing = self.FIGURE.draw([{**records[0], "truth": encoded(truth)}])
        assert drawing.axes[2].get_xlabel() == "no labels"

    def test_a_run_without_such_a_task_is_refused_and_told_who_has_one(self, digits):
        with pytest.raises(ValueError, match="has no segmentation task; its tasks are left, right. Name runs on nyuv2"):
            list(self.FIGURE.measure(runs_in(digits)[0]))

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"pictures": (4,)}, r"--pictures \(test pictures\) must be a whole number from 0 to 3, got 4"),
            ({"train_picture": -1}, r"--train-picture \(train pictures\) must be a whole number from 0 to 8, got -1"),
        ],
    )
    def test_a_picture_that_is_not_there_is_refused(self, rooms, options, said):
        with pytest.raises(ValueError, match=said):
            list(replace(self.FIGURE, **options).measure(runs_in(rooms)[0]))


def encoded(labels):
    return _png(_class_numbers(labels))
