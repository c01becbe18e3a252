"""The figures of conflict, sharpness and gradient norms, from runs of two epochs."""

import json
import math
import re
from dataclasses import replace

import pytest
from tests.bench.small import fit, small_config

from flatmtl import SAM
from flatmtl_bench import cli
from flatmtl_bench.analysis.gradients import task_gradients
from flatmtl_bench.analysis.sharpness import sharpness
from flatmtl_bench.analysis.trained import trained
from flatmtl_bench.figures.conflict import ConflictFigure
from flatmtl_bench.figures.gradnorm import GradnormFigure
from flatmtl_bench.figures.over_training import of_measure, over_training
from flatmtl_bench.figures.sharpness import SharpnessFigure
from flatmtl_bench.figures.style import values, where
from flatmtl_bench.reports.reading import find
from flatmtl_bench.reports.results import tables

TINY = {"model": "tests.bench.tiny:Tiny", "loggers": []}
METHODS = {"CAGrad", "F-CAGrad combine=individual", "F-CAGrad combine=direct"}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The folder of a plain run, one with individual and one with direct aggregation."""
    path = tmp_path_factory.mktemp("runs")
    flat = small_config(**TINY)
    direct = replace(flat, method=replace(flat.method, combine="direct"))
    for config in (small_config("multimnist_cagrad", **TINY), flat, direct):
        fit(path, config, keep_every=1)
    return path


@pytest.fixture
def runs(out):
    return find([out]).runs


def of_all(figure, runs):
    """Return the records of a figure, as its command measures them."""
    return figure.records(tables(runs))


def labels(drawing):
    return [axis.get_ylabel() for axis in drawing.axes if axis.get_ylabel()]


@pytest.mark.parametrize("name", ["conflict", "sharpness", "gradnorm"])
def test_a_command_writes_data_and_picture(name, out, tmp_path, capsys):
    assert cli.main(["figure", name, str(out), "--out", str(tmp_path), "--samples", "32", "--rho", "0.05"]) == 0
    paths = [tmp_path / f"{name}.{ending}" for ending in ("json", "png", "pdf")]
    assert capsys.readouterr().out.split() == [str(path) for path in paths]
    data = json.loads(paths[0].read_text())
    assert data["options"]["samples"] == 32
    assert {record["method"] for record in data["records"]} == METHODS
    assert {record["epoch"] for record in data["records"]} == {1, 2}
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    assert paths[2].read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sharpness", "--rho", "0"], "got rho=0.0 and steps=1; expected a radius above 0"),
        (["sharpness", "--steps", "0"], "steps=0; expected a radius above 0 and at least one step"),
        (["sharpness", "--rho", "1e30"], "perturbed loss of task 'left' is"),
        (["sharpness", "--rho", "1e30", "--steps", "2"], "the loss of task 'left' is (nan|inf) after 1 steps"),
        (["gradnorm", "--samples", "0"], "of which 0 were asked for"),
        (["conflict", "--batch-size", "0"], "in batches of 0; expected at least one of each"),
    ],
)
def test_options_that_mean_nothing_are_refused(words, message, out, tmp_path, capsys):
    assert cli.main(["figure", words[0], str(out), "--out", str(tmp_path), *words[1:]]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "rho", "message"),
    [
        (ConflictFigure, 0.0, "--rho must be above 0, got 0.0. At 0 there is no flat gradient"),
        (GradnormFigure, (0.5, -1.0), r"--rho must be radii above 0, got \(0.5, -1.0\)"),
        (GradnormFigure, (), r"--rho must be radii above 0, got \(\)"),
    ],
)
def test_without_a_radius_there_are_no_flat_gradients(kind, rho, message):
    with pytest.raises(ValueError, match=message):
        kind(rho=rho)


@pytest.mark.parametrize("kind", [ConflictFigure, SharpnessFigure, GradnormFigure])
def test_a_run_without_snapshots_is_told_how_to_get_them(kind, tmp_path):
    fit(tmp_path, small_config(**TINY))
    (run,) = find([tmp_path]).runs
    with pytest.raises(ValueError, match="has no snapshots of its weights.*--keep-every 1"):
        list(kind().measure(run))


class TestSharpness:
    def test_that_of_the_last_epoch_is_what_the_run_measured_itself(self, runs):
        for run in runs:
            wanted = run.config.sharpness
            found = SharpnessFigure(rho=(wanted.rho,), samples=wanted.samples).measure(run)
            last = {record["task"]: record["sharpness"] for record in found if record["epoch"] == 2}
            assert last == pytest.approx(run.summary["sharpness"], rel=1e-5)

    def test_steps_are_those_of_the_analysis(self, runs):
        model = trained(runs[0], "train", 1)
        expected = sharpness(model.model, model.closures(32), model.parameters, 0.5, steps=3)
        records = SharpnessFigure(rho=(0.5,), samples=32, steps=3).measure(runs[0])
        assert {r["task"]: r["sharpness"] for r in records if r["epoch"] == 1} == expected

    def test_each_radius_has_a_row_and_each_task_of_one_data_set_a_column(self, runs):
        figure = SharpnessFigure(samples=32)
        drawing = figure.draw(of_all(figure, runs))
        assert labels(drawing) == [f"sharpness\n(loss), rho {rho}" for rho in (0.005, 0.05, 0.5)]
        assert [axis.get_title() for axis in drawing.axes[:2]] == ["multimnist, left", "multimnist, right"]
        assert {text.get_text() for text in drawing.legends[0].get_texts()} == METHODS


class TestGradnorm:
    def test_it_is_of_the_training_loss_of_the_snapshots(self, runs):
        for record in GradnormFigure(samples=48).measure(runs[0]):
            losses = trained(runs[0], "train", record["epoch"]).evaluate(48)
            assert record["loss"] == pytest.approx(losses[f"loss/{record['task']}"], rel=1e-5)

    def test_norms_are_those_of_the_gradients_of_the_mean_loss(self, runs):
        model = trained(runs[0], "train", 2)
        found = task_gradients(model.model, model.closures(48, 48), model.parameters, SAM(0.05))
        records = [r for r in GradnormFigure(rho=(0.05,), samples=48).measure(runs[0]) if r["epoch"] == 2]
        assert [r["norm"] for r in records] == pytest.approx(found.norms.tolist(), rel=1e-4)
        assert [r["norm_flat"] for r in records] == pytest.approx(found.norms_flat.tolist(), rel=1e-3)

    def test_losses_and_norms_are_drawn_once_and_flat_norms_for_each_radius(self, runs):
        figure = GradnormFigure(rho=(0.05, 0.5), samples=32)
        drawing = figure.draw(of_all(figure, runs))
        flat = [f"... of the flat\ngradient, rho {rho}" for rho in (0.05, 0.5)]
        losses = ["log10 of the\ntraining loss", "log10 of the norm of\nthe loss gradient"]
        assert labels(drawing) == [*losses, *flat]

    def test_the_logarithm_of_the_loss_is_drawn_and_a_zero_is_left_out(self):
        whose = {"data": "digits", "method": "MGDA", "flat": False, "seed": 0, "rho": 0.5, "task": "left"}
        losses = {1: 100.0, 2: 0.0, 3: 0.1}
        records = [{**whose, "epoch": k, "loss": loss, "norm": 1.0, "norm_flat": 1.0} for k, loss in losses.items()]
        (line,) = GradnormFigure(rho=(0.5,)).draw(records).axes[0].get_lines()
        assert line.get_xydata().tolist() == [[1.0, 2.0], [3.0, -1.0]]


class TestConflict:
    def test_what_training_recorded_is_told_for_each_epoch(self, runs):
        for run in runs:
            records = list(ConflictFigure(samples=0).measure(run))
            assert values(records, "measured") == ["training"]
            shares = where(records, statistic="conflict")
            assert [r["value"] for r in shares] == run.series("train/conflict")
            intra = where(records, statistic="intra_conflict", task="left")
            expected = run.series("train/intra_conflict/left") if run.config.rho else []
            assert [r["value"] for r in intra] == expected

    def test_snapshots_of_plain_and_flat_runs_tell_the_same_things(self, runs):
        figure = ConflictFigure(samples=64)
        of_snapshots = [where(list(figure.measure(run)), measured="snapshot") for run in runs]
        told = [{(record["statistic"], record["task"]) for record in records} for records in of_snapshots]
        assert told[0] == told[1] == told[2]
        assert ("inter_conflict", "right") in told[0]

    @pytest.mark.parametrize(("batch_size", "count"), [(None, 3), (16, 6), (96, 1)])
    def test_the_cosines_are_those_of_single_mini_batches(self, runs, batch_size, count):
        records = list(ConflictFigure(batch_size=batch_size).measure(runs[0]))
        for name in ("cosines", "cosines_flat"):
            assert [sum(r["value"]) for r in where(records, statistic=name)] == [count, count]

    def test_mini_batches_are_drawn_from_the_seed(self, runs):
        first, again, other = (list(ConflictFigure(samples=64, seed=seed).measure(runs[0])) for seed in (0, 0, 1))
        assert first == again
        assert first != other

    def test_there_is_a_panel_for_each_measure_and_task_and_one_of_cosines(self, runs):
        figure = ConflictFigure(samples=64)
        drawing = figure.draw(of_all(figure, runs))
        assert {*labels(drawing)} == {
            "share in conflict,\nas training went on",
            "share in conflict\nat snapshots",
            "cosine of\nloss gradients",
            "cosine of\nflat gradients",
            "intra-conflict\n(share)\nleft",
            "intra-conflict\n(share)\nright",
            "inter-conflict\n(share)\nleft",
            "inter-conflict\n(share)\nright",
            "share of pairs,\nlast snapshot",
        }
        (cosines,) = (axis for axis in drawing.axes if axis.get_xlabel() == "cosine of loss gradients")
        assert [math.fsum(line.get_ydata()) for line in cosines.get_lines()] == pytest.approx([1.0] * len(METHODS))

    @pytest.mark.parametrize(("recipe", "pairs"), [("multimnist_stl", 0), ("multimnist_ls", 1)])
    def test_tasks_alone_have_no_pairs_and_those_of_a_loss_weighting_do(self, recipe, pairs, tmp_path):
        tasks = ("left", "right") if recipe.endswith("stl") else (None,)
        for task in tasks:
            fit(tmp_path, small_config(recipe, task=task, epochs=1, **TINY), keep_every=1)
        figure = ConflictFigure(samples=32)
        records = of_all(figure, find([tmp_path]).runs)
        snapshots = where(records, measured="snapshot")
        assert [sum(r["value"]) for r in where(snapshots, statistic="cosines")] == [pairs] * len(tasks)
        assert [r["value"] is None for r in where(snapshots, statistic="conflict")] == [pairs == 0] * len(tasks)
        inter = where(snapshots, statistic="inter_conflict")
        assert {r["task"]: r["value"] in (0.0, 1.0) for r in inter} == {"left": True, "right": True}
        assert "inter-conflict\n(share)\nright" in labels(figure.draw(records))

    def test_without_snapshots_it_draws_what_training_recorded(self, runs):
        figure = ConflictFigure(samples=0)
        drawing = figure.draw(of_all(figure, runs))
        assert labels(drawing) == ["share in conflict,\nas training went on"]


def made(data, tasks):
    """Return records of a loss that is k for task k."""
    whose = {"data": data, "method": "MGDA", "flat": False, "seed": 0}
    pairs = [(epoch, task) for epoch in (1, 2) for task in tasks]
    return of_measure([{**whose, "epoch": e, "task": t, "x": float(tasks.index(t))} for e, t in pairs], "loss", "x")


def draw(*records):
    return over_training([record for some in records for record in some])


class TestManyPanels:
    def test_with_several_data_sets_each_task_has_a_row(self):
        drawing = draw(made("digits", ["left", "right"]), made("garments", ["left", "right"]))
        assert labels(drawing) == ["loss\nleft", "loss\nright"]
        assert [axis.get_title() for axis in drawing.axes[:2]] == ["digits", "garments"]

    def test_of_many_tasks_the_mean_is_drawn(self):
        (axis,) = draw(made("faces", [f"attribute {k}" for k in range(40)])).axes
        assert axis.get_title() == "faces, mean over 40 tasks"
        assert axis.get_lines()[0].get_ydata() == pytest.approx([19.5, 19.5])

    def test_values_that_are_not_there_are_left_out(self):
        records = made("faces", [f"attribute {k}" for k in range(40)])
        records[0] = {**records[0], "value": None}
        (axis,) = draw(records).axes
        assert axis.get_lines()[0].get_ydata() == pytest.approx([20.0, 19.5])
