"""The figure of gradient norms and losses for each way to combine gradients, from runs of three epochs."""

import json

import pandas as pd
import pytest
from tests.bench.small import fit, lines, small_config

from flatmtl_bench import cli
from flatmtl_bench.figures.strategies import StrategiesFigure
from flatmtl_bench.figures.style import where
from flatmtl_bench.reports.reading import find
from flatmtl_bench.reports.results import tables

TINY = {"model": "tests.bench.tiny:Tiny", "loggers": [], "epochs": 3}
RECIPES = ("multimnist_mgda", "multimnist_f_mgda", "multimnist_f_mgda_direct")
METHODS = ["MGDA", "F-MGDA combine=individual", "F-MGDA combine=direct"]
NORM, NORM_FLAT, LOSS = "norm of the loss gradient", "norm of the flat gradient", "training loss"


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The folder of plain, individual and direct runs with two seeds; none keeps snapshots."""
    path = tmp_path_factory.mktemp("runs")
    for recipe in RECIPES:
        for seed in (0, 1):
            fit(path, small_config(recipe, seed=seed, **TINY))
    return path


@pytest.fixture(scope="module")
def metrics(out):
    """The metrics of all runs in one table, with the method of each."""
    methods = dict(zip(RECIPES, METHODS, strict=True))
    frames = []
    for path in out.iterdir():
        config = json.loads((path / "config.json").read_text())
        frame = pd.DataFrame(lines(path / "metrics.jsonl"))  # pandas' own reader rounds
        frames.append(frame.assign(method=methods[config["recipe"]], seed=config["seed"]))
    return pd.concat(frames)


@pytest.fixture(scope="module")
def drawing(out):
    return drawn(out)


def drawn(out):
    figure = StrategiesFigure()
    return figure.draw(figure.records(tables(find([out]).runs)))


def panels(drawing):
    """Return the axes by title of the column and label of the row."""
    rows = [axis for axis in drawing.axes if axis.get_ylabel()]
    titles = [axis.get_title() for axis in drawing.axes[: len(drawing.axes) // len(rows)]]
    labels = [row.get_ylabel() for row in rows for _ in titles]
    return dict(zip(zip(titles * len(rows), labels, strict=True), drawing.axes, strict=True))


def expected(metrics, method, name):
    """Return the mean over the seeds of each epoch, and the standard deviation, from that table."""
    table = metrics[metrics.method == method].pivot(index="epoch", columns="seed", values=name)
    return table.mean(axis=1).tolist(), table.std(axis=1, ddof=1).tolist()


@pytest.mark.parametrize("task", ["left", "right"])
@pytest.mark.parametrize(("title", "name"), [(NORM, "norm"), (LOSS, "loss")])
def test_lines_are_means_over_the_seeds_and_bands_one_standard_deviation(drawing, metrics, title, name, task):
    axis = panels(drawing)[title, f"{task}\n(loss: nats)"]
    assert [line.get_label() for line in axis.get_lines()] == METHODS
    for line, band in zip(axis.get_lines(), axis.collections, strict=True):
        means, spread = expected(metrics, line.get_label(), f"train/{name}/{task}")
        assert line.get_xdata().tolist() == [1, 2, 3]
        assert line.get_ydata() == pytest.approx(means, rel=1e-12)
        (outline,) = band.get_paths()
        for epoch, middle, width in zip((1, 2, 3), means, spread, strict=True):
            heights = {y for x, y in outline.vertices if x == epoch}
            assert (min(heights), max(heights)) == pytest.approx((middle - width, middle + width), rel=1e-9)


def test_flat_gradients_are_those_of_the_runs_that_aggregate_them_apart(drawing, metrics):
    for task in ("left", "right"):
        (line,) = panels(drawing)[NORM_FLAT, f"{task}\n(loss: nats)"].get_lines()
        assert line.get_label() == "F-MGDA combine=individual"
        means, _ = expected(metrics, line.get_label(), f"train/norm_flat/{task}")
        assert line.get_ydata() == pytest.approx(means, rel=1e-12)


def test_norms_are_on_the_left_and_the_loss_on_the_right(drawing):
    assert [axis.get_title() for axis in drawing.axes[:3]] == [NORM, NORM_FLAT, LOSS]
    assert len(drawing.axes) == 6


def test_what_is_not_finite_is_left_out_of_the_mean(out):
    figure = StrategiesFigure()
    records = figure.records(tables(find([out]).runs))
    wanted = {"method": METHODS[0], "task": "left", "quantity": "loss"}
    first = next(r for r in records if r["epoch"] == 2 and all(r[name] == value for name, value in wanted.items()))
    other = next(r for r in where(records, **wanted, epoch=2) if r["seed"] != first["seed"])
    lacking = [{**record, "value": None} if record is first else record for record in records]
    line = panels(figure.draw(lacking))[LOSS, "left\n(loss: nats)"].get_lines()[0]
    assert line.get_ydata()[1] == other["value"]


def test_a_loss_weighting_has_a_loss_and_a_word_about_its_norms(tmp_path, capsys):
    fit(tmp_path, small_config("multimnist_f_ls", **TINY))
    assert {axis.get_title() for axis in drawn(tmp_path).axes} == {LOSS, ""}
    assert capsys.readouterr().err.count("has no gradient norms: F-LS does not look at") == 1


def test_each_data_set_has_rows_of_its_own_and_an_empty_panel_says_so(out, drawing):
    figure = StrategiesFigure()
    records = figure.records(tables(find([out]).runs))
    others = [{**r, "data": "rooms"} for r in records if r["quantity"] != "norm_flat"]
    found = panels(figure.draw([*records, *others]))
    assert [label for title, label in found if title == LOSS] == [
        f"{data}\n{task}\n(loss: nats)" for data in ("multimnist", "rooms") for task in ("left", "right")
    ]
    (text,) = found[NORM_FLAT, "rooms\nleft\n(loss: nats)"].texts
    assert text.get_text() == "not recorded"


def test_of_many_tasks_the_mean_is_drawn():
    whose = {"data": "faces", "method": "MGDA", "flat": False, "seed": 0, "unit": "nats", "quantity": "loss"}
    records = [
        {**whose, "epoch": e, "task": f"attribute {k}", "value": float(k + e)} for e in (1, 2) for k in range(40)
    ]
    (axis,) = StrategiesFigure().draw(records).axes
    assert axis.get_ylabel() == "mean over 40 tasks\n(loss: nats)"
    assert axis.get_lines()[0].get_ydata() == pytest.approx([20.5, 21.5])


def test_the_command_writes_every_number_and_the_picture(out, metrics, tmp_path, capsys):
    assert cli.main(["figure", "strategies", str(out), "--out", str(tmp_path)]) == 0
    paths = [tmp_path / f"strategies.{ending}" for ending in ("json", "png", "pdf")]
    assert capsys.readouterr().out.split() == [str(path) for path in paths]
    records = pd.DataFrame(json.loads(paths[0].read_text())["records"])
    assert len(records) == 2 * 3 * 2 * (2 + 3 + 2)  # seeds, epochs, tasks, and the quantities of each method
    for (method, seed, task, quantity), some in records.groupby(["method", "seed", "task", "quantity"]):
        own = metrics[(metrics.method == method) & (metrics.seed == seed)].sort_values("epoch")
        assert some.sort_values("epoch").value.tolist() == own[f"train/{quantity}/{task}"].tolist()
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    assert paths[2].read_bytes().startswith(b"%PDF")


def test_an_ablation_is_named_where_nothing_stands_beside_it(tmp_path):
    fit(tmp_path, small_config("multimnist_f_mgda_each", **TINY))
    assert {line.get_label() for axis in drawn(tmp_path).axes for line in axis.get_lines()} == {"F-MGDA combine=each"}
