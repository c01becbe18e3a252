"""`flatmtl report`: tables with Delta m from run folders, and the choice of settings by validation."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from rich.text import Text
from tests.bench.small import ENVIRONMENT, FLAGS, drawn_run, made_result

from flatmtl_bench import cli, recipes, sweep
from flatmtl_bench.recipes import RECIPES
from flatmtl_bench.recipes.config import Config, Data, EarlyStop, Method, Optimizer, Schedule
from flatmtl_bench.reports import overview, paper, terminal
from flatmtl_bench.reports.reading import read
from flatmtl_bench.reports.settings import flags
from flatmtl_bench.runs import digest, settings

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "metrics.json").read_text())["delta_m"]["tables"]
PAIRS = {"accuracy/left": "higher", "accuracy/right": "higher"}
SCENES = {
    **{f"{name}/segmentation": "higher" for name in ("miou", "pixel_accuracy")},
    **{f"{name}/depth": "lower" for name in ("abs_err", "rel_err")},
    **{f"{name}/normals": "lower" for name in ("mean", "median")},
    **{f"within_{angle}/normals": "higher" for angle in ("11.25", "22.5", "30")},
}
STREETS = {name: direction for name, direction in SCENES.items() if not name.endswith("/normals")}
SEEDED = np.random.default_rng(0)


def config(recipe, **changes):
    """Return the config of a finished run: its source is known."""
    name = recipes.build(recipe).data.name
    source = {"multimnist": "mnist5k", "nyuv2": "full", "cityscapes": "full"}.get(name, name)
    return replace(recipes.build(recipe), **{"source": source, **changes})


def drawn(better):
    return {name: float(SEEDED.uniform(0.2, 0.9)) for name in better}


def of_task(values, task):
    return {name: value for name, value in values.items() if name.endswith(f"/{task}")}


def trained_alone(out, recipe, metrics, better, seed, tasks=("left", "right"), **changes):
    """Write the single-task run of each task."""
    for task in tasks:
        alone = config(recipe, seed=seed, task=task, **changes)
        made_result(out, alone, of_task(metrics, task), of_task(better, task))


@pytest.fixture
def report(tmp_path, monkeypatch, capsys):
    """Return the tables of the runs in the folder `runs` as JSON holds them; `report.text` is what is printed."""
    monkeypatch.chdir(tmp_path)

    def run(*words, code=0):
        assert cli.main(["report", *words]) == code
        said = capsys.readouterr()
        run.err = said.err
        return said.out

    def tables(*words):
        return json.loads(run(*words, "--json"))

    tables.text, tables.err = run, lambda: run.err
    return tables


@pytest.fixture
def out(tmp_path):
    return tmp_path / "runs"


def row(table, method, **chosen):
    """Return the only row of a method with these settings."""
    rows = [r for r in table["rows"] if r["method"] == method and chosen.items() <= r["settings"].items()]
    assert len(rows) == 1, rows
    return rows[0]


def delta(values, baseline, better):
    """Return Delta m as its definition has it."""
    signs = np.array([-1 if direction == "higher" else 1 for direction in better.values()])
    values, baseline = (np.array([numbers[name] for name in better]) for numbers in (values, baseline))
    return 100 * np.mean(signs * (values - baseline) / baseline)


class TestNumbers:
    def test_means_and_deviations_are_those_of_the_seeds(self, out, report):
        seeds = [drawn(SCENES) for _ in range(3)]
        for seed, values in enumerate(seeds):
            made_result(out, config("scenes_ls", seed=seed), values, SCENES)
        (table,) = report()
        found = row(table, "LS")
        assert found["seeds"] == [0, 1, 2]
        for name in SCENES:
            numbers = [values[name] for values in seeds]
            assert found["metrics"][name]["values"] == numbers
            assert found["metrics"][name]["mean"] == pytest.approx(np.mean(numbers))
            assert found["metrics"][name]["sd"] == pytest.approx(np.std(numbers, ddof=1))

    def test_delta_m_is_of_each_seed_against_the_mean_of_the_single_task_runs(self, out, report):
        alone, methods = [drawn(SCENES) for _ in range(2)], [drawn(SCENES) for _ in range(3)]
        for seed, values in enumerate(alone):
            trained_alone(out, "scenes_stl", values, SCENES, seed, ("normals", "depth", "segmentation"))
        for seed, values in enumerate(methods):
            made_result(out, config("scenes_f_mgda", seed=seed), values, SCENES)
        (table,) = report()
        baseline = {name: np.mean([values[name] for values in alone]) for name in SCENES}
        expected = [delta(values, baseline, SCENES) for values in methods]
        assert table["better"] == SCENES
        assert table["baseline"]["metrics"] == pytest.approx(baseline)
        found = row(table, "F-MGDA")["delta_m"]
        assert found["values"] == pytest.approx(expected)
        assert found["mean"] == pytest.approx(np.mean(expected))
        assert found["sd"] == pytest.approx(np.std(expected, ddof=1))
        stl = row(table, "STL")
        assert stl["metrics"]["miou/segmentation"]["values"] == [values["miou/segmentation"] for values in alone]
        assert stl["delta_m"]["mean"] == pytest.approx(0, abs=1e-12)
        assert len(stl["runs"]) == 6

    @pytest.mark.parametrize(
        ("recipe", "entry", "better"), [("nyuv2", "tab:nyu", SCENES), ("cityscapes", "tab:cityscape", STREETS)]
    )
    def test_delta_m_against_the_paper_is_that_of_its_printed_rows(self, out, report, recipe, entry, better):
        by_label = {r.config.label: n for n, r in RECIPES.items() if re.fullmatch(f"{recipe}_[a-z_]+_paper", n)}
        percent = {name: 0.01 if name.startswith(("miou", "pixel", "within")) else 1.0 for name in better}
        expected = {}
        for printed in GOLDEN[entry]["rows"]:
            label = printed["row"].replace("IMTL", "IMTL-G")
            metrics = dict(zip(better, printed["metrics"], strict=True))
            made_result(out, config(by_label[label]), {n: percent[n] * metrics[n] for n in better}, better, score=None)
            expected[label] = printed["recomputed"]
        (table,) = report("--baseline", "paper")
        assert {r["method"]: r["delta_m"]["mean"] for r in table["rows"]} == pytest.approx(expected, rel=1e-9)
        assert len(expected) >= 15

    def test_the_paper_has_a_row_of_every_metric(self):
        for dataset, better in (("nyuv2", SCENES), ("cityscapes", STREETS)):
            assert list(paper.single_task(dataset).metrics) == list(better)

    def test_a_single_seed_has_no_deviation(self, out, report):
        made_result(out, config("multimnist_ls"), drawn(PAIRS), PAIRS)
        (table,) = report()
        assert row(table, "LS")["metrics"]["accuracy/left"]["sd"] is None
        assert "±" not in report.text().splitlines()[-1]


def cells(text, method):
    """Return the cells of a method's only row of a printed table."""
    (line,) = [line for line in text.splitlines() if re.match(rf"{re.escape(method)}  ", line)]
    return re.split(r" {2,}", line)


class TestTable:
    def test_shares_are_in_per_cent_and_the_best_is_marked(self, out, report):
        made_result(out, config("multimnist_ls"), {"accuracy/left": 0.5, "accuracy/right": 0.875}, PAIRS)
        made_result(out, config("multimnist_mgda"), {"accuracy/left": 0.75, "accuracy/right": 0.25}, PAIRS)
        text = report.text()
        heading = "method  seeds  left accuracy, %  right accuracy, %  average accuracy, %"
        assert heading in text
        assert cells(text, "LS")[1:] == ["1", "50.00", "*87.50", "*68.75"]
        assert cells(text, "MGDA")[1:] == ["1", "*75.00", "25.00", "50.00"]

    def test_less_is_better_where_it_is_an_error(self, out, report):
        for recipe, error in (("streets_ls", 0.25), ("streets_mgda", 0.5)):
            made_result(out, config(recipe), {**drawn(STREETS), "abs_err/depth": error}, STREETS)
        text = report.text()
        assert "*0.2500" in cells(text, "LS")
        assert "0.5000" in cells(text, "MGDA")

    def test_a_value_that_is_not_finite_is_a_failure_and_never_the_best(self, out, report):
        trained_alone(out, "multimnist_stl", {"accuracy/left": 0.5, "accuracy/right": 0.5}, PAIRS, 0)
        for seed, left in enumerate((0.9, None, float("nan"))):
            values = {"accuracy/left": left, "accuracy/right": 0.25}
            made_result(out, config("multimnist_mgda", seed=seed), values, PAIRS)
        text = report.text()
        assert cells(text, "MGDA")[2:] == ["failed 2/3", "25.00 ± 0.00", "failed 2/3", "failed 2/3"]
        assert cells(text, "STL")[2:] == ["*50.00", "*50.00", "*50.00", "*+0.00"]
        found = row(report()[0], "MGDA")
        assert found["metrics"]["accuracy/left"] == {"mean": None, "sd": None, "values": [0.9, None, None]}
        assert found["delta_m"]["mean"] is None

    @pytest.mark.parametrize("number", ["NaN", "-Infinity", "null"])
    def test_so_is_one_that_another_program_wrote(self, out, report, number):
        path = made_result(out, config("multimnist_ls"), {"accuracy/left": 0.125, "accuracy/right": 0.5}, PAIRS)
        summary = path / "summary.json"
        summary.write_text(summary.read_text().replace("0.125", number))
        assert cells(report.text(), "LS")[2:] == ["failed 1/1", "*50.00", "failed 1/1"]

    def test_rows_are_in_pairs_of_plain_and_flat_after_single_task_learning(self, out, report):
        names = ("f_cagrad", "f_mgda", "ls", "cagrad", "f_ls", "mgda")
        for name in names:
            made_result(out, config(f"multimnist_{name}"), drawn(PAIRS), PAIRS)
        for recipe in ("multimnist_f_stl", "multimnist_stl"):
            trained_alone(out, recipe, drawn(PAIRS), PAIRS, 0)
        methods = [r["method"] for r in report()[0]["rows"]]
        assert methods == ["STL", "F-STL", "MGDA", "F-MGDA", "CAGrad", "F-CAGrad", "LS", "F-LS"]

    def test_rows_show_the_settings_that_tell_them_apart_and_no_others(self, out, report):
        for rho in (0.05, 0.5):
            made_result(out, config("multimnist_f_mgda", rho=rho), drawn(PAIRS), PAIRS)
        for c in (0.2, 0.4):
            made_result(out, config("multimnist_cagrad", method=Method("cagrad", {"c": c})), drawn(PAIRS), PAIRS)
        made_result(out, config("multimnist_ls"), drawn(PAIRS), PAIRS)
        found = [(r["method"], r["settings"]) for r in report()[0]["rows"]]
        assert found == [
            ("F-MGDA", {"rho": 0.05}),
            ("F-MGDA", {"rho": 0.5}),
            ("CAGrad", {"method.options.c": 0.2}),
            ("CAGrad", {"method.options.c": 0.4}),
            ("LS", {}),
        ]
        assert "F-MGDA rho=0.05" in report.text()

    @pytest.mark.parametrize("beside", [[], ["multimnist_mgda"], ["multimnist_f_pcgrad_direct"]])
    def test_an_ablation_is_named_whatever_stands_beside_it(self, out, report, beside):
        for recipe in (*beside, "multimnist_f_mgda_direct"):
            made_result(out, config(recipe), drawn(PAIRS), PAIRS)
        settings_of = {r["method"]: r["settings"] for r in report()[0]["rows"]}
        assert settings_of["F-MGDA"] == {"method.combine": "direct"}
        assert "F-MGDA combine=direct" in report.text()

    def test_ways_to_combine_beside_each_other_are_told_apart(self, out, report):
        for end in ("mgda", "f_mgda", "f_mgda_direct", "f_mgda_second", "f_mgda_each"):
            made_result(out, config(f"multimnist_{end}"), drawn(PAIRS), PAIRS)
        found = [(r["method"], r["settings"]) for r in report()[0]["rows"]]
        ways = ("individual", "direct", "each", "second")
        assert found == [("MGDA", {}), *(("F-MGDA", {"method.combine": way}) for way in ways)]

    def test_what_plain_and_flat_rows_differ_in_beside_the_perturbation_is_shown(self, out, report):
        made_result(out, config("multimnist_mgda"), drawn(PAIRS), PAIRS)
        made_result(out, config("multimnist_f_mgda", optimizer=Optimizer(lr=0.1)), drawn(PAIRS), PAIRS)
        assert [r["settings"] for r in report()[0]["rows"]] == [{"optimizer.lr": 0.001}, {"optimizer.lr": 0.1}]

    def test_recipes_of_one_label_are_told_apart(self, out, report):
        for name in ("nyuv2_pcgrad_paper", "nyuv2_pcgrad_official"):
            made_result(out, config(name, shared="all"), drawn(SCENES), SCENES, score=None)
        found = [r["settings"]["recipe"] for r in report()[0]["rows"]]
        assert sorted(found) == ["nyuv2_pcgrad_official", "nyuv2_pcgrad_paper"]

    @pytest.mark.parametrize(
        "changes",
        [{"epochs": 9}, {"model": "lenet"}, {"width": 0.5}, {"protocol": "official"}, {"averaging": "batches"}],
        ids=str,
    )
    def test_what_is_not_comparable_is_in_tables_of_its_own(self, out, report, changes):
        for changed in ({}, changes):
            made_result(out, config("multimnist_ls", **changed), drawn(PAIRS), PAIRS)
        tables = report()
        assert [len(table["rows"]) for table in tables] == [1, 1]
        titles = [line for line in report.text().splitlines() if line.startswith("multimnist (source ")]
        assert len(set(titles)) == 2

    def test_runs_on_other_test_data_are_in_tables_of_their_own(self, out, report):
        for k in range(2):
            made_result(out / str(k), config("multimnist_ls", seed=k), drawn(PAIRS), PAIRS, fingerprint=f"data{k}")
        assert [table["fingerprint"] for table in report("runs/0", "runs/1")] == ["data0", "data1"]
        text = report.text("runs/0", "runs/1")
        assert "protocol honest, test data data0" in text
        assert "protocol honest, test data data1" in text

    def test_of_many_tasks_there_are_means(self, out, report):
        better = {f"error/{k}": "lower" for k in range(40)}
        values = drawn(better)
        made_result(out, config("faces40_ls"), values, better)
        made_result(out, config("faces40_mgda"), {**values, "error/3": None}, better)
        text = report.text()
        assert "method  seeds  average error, %" in text
        assert cells(text, "LS")[1:] == ["1", f"*{np.mean(list(values.values())):.2f}"]
        assert cells(text, "MGDA")[1:] == ["1", "failed 1/1"]

    def test_columns_are_in_the_order_of_the_data(self, out, report):
        trained_alone(out / "alone", "scenes_stl", drawn(SCENES), SCENES, 0, ["normals", "depth", "segmentation"])
        made_result(out / "together", config("scenes_ls"), drawn(SCENES), SCENES)
        assert list(report("runs/alone", "runs/together")[0]["better"]) == list(SCENES)

    def test_a_method_on_one_task_is_single_task_learning(self, out, report):
        trained_alone(out, "multimnist_ls", drawn(PAIRS), PAIRS, 0)
        made_result(out, config("multimnist_ls"), drawn(PAIRS), PAIRS)
        assert [(r["method"], len(r["runs"])) for r in report()[0]["rows"]] == [("STL", 2), ("LS", 1)]

    def test_seeds_are_listed_where_they_are_not_the_same(self, out, report):
        for recipe, seeds in (("multimnist_ls", (0, 1)), ("multimnist_mgda", (1, 3))):
            for seed in seeds:
                made_result(out, config(recipe, seed=seed), drawn(PAIRS), PAIRS)
        assert cells(report.text(), "LS")[1] == "0,1"
        assert cells(report.text(), "MGDA")[1] == "1,3"


class TestBaseline:
    def test_lacking_tasks_are_named_with_the_command_that_trains_them(self, out, report):
        for seed in range(2):
            made_result(out, config("scenes_ls", seed=seed), drawn(SCENES), SCENES)
        trained_alone(out, "scenes_stl", drawn(SCENES), SCENES, 0, ["depth"])
        text = report.text()
        assert "No Delta m: there is no complete set of single-task runs." in text
        assert "flatmtl sweep scenes_stl --grid task=segmentation,depth,normals --seeds 2" in text
        lacking = "STL lacks runs of task segmentation with seed 0, task normals with seed 0 (scenes_stl)"
        assert lacking in text
        (table,) = report()
        assert (table["baseline"], row(table, "LS")["delta_m"]) == (None, None)

    def test_of_several_settings_that_which_lacks_tasks_is_named(self, out, report):
        for rho, tasks in ((0.05, ["left", "right"]), (0.5, ["left"])):
            trained_alone(out, "multimnist_f_stl", drawn(PAIRS), PAIRS, 0, tasks, rho=rho)
        lacking = (
            "F-STL rho=0.5 lacks runs of task right with seed 0 (multimnist_f_stl); seeds count that have all tasks."
        )
        assert report.text().count("lacks runs") == report.text().count(lacking) == 1

    def test_the_command_is_one_of_the_same_protocol(self, out, report):
        made_result(out, config("nyuv2_ls_paper"), drawn(SCENES), SCENES, score=None)
        assert "flatmtl sweep nyuv2_stl_paper --grid" in report.text()

    def test_only_seeds_with_all_tasks_count(self, out, report):
        values = [drawn(PAIRS) for _ in range(2)]
        trained_alone(out, "multimnist_stl", values[0], PAIRS, 0)
        trained_alone(out, "multimnist_stl", values[1], PAIRS, 1, ["left"])
        made_result(out, config("multimnist_ls"), drawn(PAIRS), PAIRS)
        (table,) = report()
        assert row(table, "STL")["seeds"] == [0]
        assert table["baseline"]["metrics"] == values[0]
        assert "task right with seed 1" in table["notes"][0]

    def test_several_single_task_rows_are_no_baseline(self, out, report):
        for lr in (0.1, 0.2):
            trained_alone(out, "multimnist_stl", drawn(PAIRS), PAIRS, 0, optimizer=Optimizer(lr=lr))
        assert "No Delta m: there are 2 STL rows." in report.text()

    def test_the_runs_that_are_lacking_are_a_command_with_the_settings_of_the_others(self, out, report):
        changed = {"width": 0.0625, "epochs": 3, "data": replace(recipes.build("scenes_ls").data, train_samples=16)}
        better = {"miou/segmentation": "higher", "abs_err/depth": "lower"}
        made_result(out, config("scenes_ls", **changed), drawn(better), better)
        assert (
            "flatmtl sweep scenes_stl --grid task=segmentation,depth --seeds 1 --epochs 3 --width 0.0625 "
            "--data.train-samples 16"
        ) in " ".join(report.text().split())

    def test_flat_single_task_runs_are_no_baseline(self, out, report):
        trained_alone(out, "multimnist_f_stl", drawn(PAIRS), PAIRS, 0)
        (table,) = report()
        assert table["baseline"] is None
        assert row(table, "F-STL")["metrics"]["accuracy/left"]["mean"] is not None

    def test_a_baseline_that_failed_is_none(self, out, report):
        trained_alone(out, "multimnist_stl", {"accuracy/left": None, "accuracy/right": 0.5}, PAIRS, 0)
        assert "No Delta m: accuracy/left of an STL run was not finite." in report.text()

    def test_a_baseline_of_zero_is_none(self, out, report):
        trained_alone(out, "multimnist_stl", {"accuracy/left": 0.0, "accuracy/right": 0.5}, PAIRS, 0)
        assert "No Delta m: Delta m: 'accuracy/left' of the baseline is 0.0; expected a number above 0" in report.text()

    def test_the_paper_is_stated_with_its_columns_and_units(self, out, report):
        made_result(out, config("cityscapes_ls"), drawn(STREETS), STREETS)
        text = report.text("--baseline", "paper")
        assert "against the STL row of table 4 of Phan et al. (2025): miou/segmentation = mIoU 74.01 %, " in text
        assert "rel_err/depth = depth rel err 27.77." in text

    @pytest.mark.parametrize(
        ("recipe", "source", "better"),
        [("scenes_ls", "scenes", SCENES), ("nyuv2_ls", "scenes", SCENES), ("multimnist_ls", "mnist5k", PAIRS)],
    )
    def test_the_paper_is_no_baseline_of_other_data(self, out, report, recipe, source, better):
        made_result(out, config(recipe, source=source), drawn(better), better)
        assert report.text("--baseline", "paper", code=2) == ""
        assert f"the paper's STL row is for other data than {recipe[:-3]} (source {source})" in report.err()
        assert "Use --baseline stl." in report.err()

    def test_of_several_data_sets_those_of_the_paper_are_compared(self, out, report):
        made_result(out, config("scenes_ls"), drawn(SCENES), SCENES)
        made_result(out, config("nyuv2_ls"), drawn(SCENES), SCENES)
        found = {table["data"]: table["baseline"] is not None for table in report("--baseline", "paper")}
        assert found == {"scenes": False, "nyuv2": True}

    def test_the_paper_is_no_baseline_of_some_tasks_only(self, out, report):
        trained_alone(out, "nyuv2_stl", drawn(SCENES), SCENES, 0, ["depth"])
        report.text("--baseline", "paper", code=2)
        assert "differ in mean/normals, " in report.err()


class TestChoice:
    def write(self, out, scores):
        """Write a run of each radius and seed with these validation scores."""
        for rho, seeds in scores.items():
            for seed, score in enumerate(seeds):
                made = config("multimnist_f_mgda", rho=rho, seed=seed)
                made_result(out, made, drawn(PAIRS), PAIRS, score=score)

    def test_the_best_mean_validation_score_is_kept(self, out, report):
        self.write(out, {0.05: [0.5, 0.5], 0.5: [0.9, 0.3], 1.0: [0.6, 0.1]})
        made_result(out, config("multimnist_mgda"), drawn(PAIRS), PAIRS)
        (table,) = report("--tuned")
        assert [(r["method"], r["seeds"]) for r in table["rows"]] == [("MGDA", [0]), ("F-MGDA", [0, 1])]
        assert all(re.match("multimnist_f_mgda-.*-s[01]$", name) for name in table["rows"][1]["runs"])
        chosen = "multimnist_f_mgda --rho 0.5 is the best of 3 settings by the mean validation score of seeds 0, 1"
        assert report.err() == f"{chosen}, 0.6000.\n"

    def test_test_results_have_no_say(self, out, report):
        for rho, test, score in ((0.05, 0.9, 0.1), (0.5, 0.1, 0.9)):
            made_result(out, config("multimnist_f_mgda", rho=rho), dict.fromkeys(PAIRS, test), PAIRS, score=score)
        (table,) = report("--tuned")
        assert row(table, "F-MGDA")["metrics"]["accuracy/left"]["mean"] == 0.1

    def test_a_setting_that_lacks_a_seed_does_not_compete_and_that_is_said(self, out, report):
        self.write(out, {0.05: [0.5, 0.5], 0.5: [0.9]})
        report.text("--tuned")
        assert "--rho 0.05 is the best of 1 setting by" in report.err()
        assert "multimnist_f_mgda --rho 0.5 does not compete: it lacks seed 1 (all have seed 0)." in report.err()

    def test_settings_are_compared_by_the_seeds_that_are_named(self, out, report):
        self.write(out, {0.05: [0.5, 0.5], 0.1: [0.8], 0.5: [0.55, 0.6, float("nan")]})
        (table,) = report("--tuned", "--tuned-seeds", "0", "1")
        assert row(table, "F-MGDA")["seeds"] == [0, 1, 2]  # of the chosen setting all are shown
        chosen = "--rho 0.5 is the best of 2 settings by the mean validation score of seeds 0, 1, 0.5750."
        assert [line.split(maxsplit=1)[1] for line in report.err().splitlines()] == [
            chosen,
            "--rho 0.1 does not compete: it lacks seed 1 (all have seed 0).",
        ]

    def test_seeds_that_no_setting_has_choose_nothing(self, out, report):
        self.write(out, {0.05: [0.5], 0.5: [0.9]})
        assert report.text("--tuned", "--tuned-seeds", "7", code=2) == ""
        assert "none of 2 settings has a finite validation score for each of seed 7" in report.err()

    def test_seeds_to_choose_by_need_a_choice(self, out, report):
        self.write(out, {0.05: [0.5]})
        assert report.text("--tuned-seeds", "0", code=2) == ""
        assert "Add --tuned." in report.err()

    def test_a_score_that_is_not_finite_does_not_compete(self, out, report):
        self.write(out, {0.05: [0.5, 0.5], 0.5: [0.9, float("nan")]})
        report.text("--tuned")
        assert "multimnist_f_mgda --rho 0.5 does not compete: its validation score is not finite." in report.err()

    def test_where_none_competes_none_is_chosen(self, out, report):
        self.write(out, {0.05: [float("nan")], 0.5: [float("inf")]})
        assert report.text("--tuned", code=2) == ""
        assert "none of 2 settings has a finite validation score for each of seed 0" in report.err()
        assert "no setting could be chosen by validation" in report.err()

    def test_without_validation_the_remedy_is_said(self, out, report):
        for rho in (0.05, 0.5):
            values = drawn(SCENES)
            made_result(out, config("nyuv2_f_mgda_paper", rho=rho), values, SCENES, score=None)
        made_result(out, config("nyuv2_ls_paper"), drawn(SCENES), SCENES, score=None)
        (table,) = report("--tuned")
        assert [r["method"] for r in table["rows"]] == ["LS"]  # of which there was nothing to choose
        assert "nyuv2_f_mgda_paper has 2 settings, but runs without validation metrics" in report.err()
        assert "Tune nyuv2_f_mgda, which holds some data out, and train nyuv2_f_mgda_paper with what" in report.err()

    def test_an_ablation_is_not_tuned_by_the_method_that_it_is_one_of(self, out, report):
        for recipe, rho in product(("multimnist_f_mgda_direct", "multimnist_f_mgda_direct_paper"), (0.05, 0.5)):
            made_result(out, config(recipe, rho=rho, protocol="paper"), drawn(PAIRS), PAIRS, score=None)
        assert report.text("--tuned", code=2) == ""
        assert "to choose by (protocol paper). Tune with --protocol honest" in report.err()
        assert "Tune multimnist_f_mgda_direct, which holds some data out" in report.err()

    def test_one_setting_of_single_task_learning_is_chosen_for_all_tasks(self, out, report):
        for rho, score in ((0.05, 0.5), (0.5, 0.75)):
            for task, more in (("left", 0.2), ("right", -0.2)):
                made = config("multimnist_f_stl", rho=rho, task=task)
                made_result(out, made, of_task(drawn(PAIRS), task), of_task(PAIRS, task), score=score + more)
        (table,) = report("--tuned")
        assert len(row(table, "F-STL")["runs"]) == 2
        assert "multimnist_f_stl --rho 0.5 is the best of 2 settings" in report.err()
        assert "0.7500" in report.err()

    @pytest.mark.parametrize(
        ("recipe", "changes"),
        [
            ("multimnist_f_mgda", {"rho": 0.25, "batch_size": 64}),
            ("multimnist_cagrad_official", {"method": Method("cagrad", {"c": 0.1, "rescale": "1+c2"}, norm="joint")}),
            ("multimnist_nash_mtl", {"method": Method("nash_mtl", {"max_norm": None})}),
            ("multimnist_ls", {"method": Method("fixed", {"weights": [1.0, 2.0]}), "optimizer": Optimizer("sgd")}),
            ("scenes_f_mgda", {"method": Method("mgda", {}, "asam", rho_heads=0.5)}),
            ("scenes_ls", {"data": Data("scenes", size=[32, 64], augment=False), "width": 0.25}),
            ("multimnist_cagrad", {"method": Method("cagrad")}),
        ],
    )
    def test_its_flags_are_those_to_type(self, capsys, recipe, changes):
        wanted, before = replace(recipes.build(recipe), **changes), recipes.build(recipe)
        kept = [settings(c) for c in (before, wanted)]
        names = sorted(name for name in {*kept[0], *kept[1]} if kept[0].get(name, "") != kept[1].get(name, ""))
        assert cli.main(["run", recipe, *shlex.split(flags(wanted, names)), "--dry-run"]) == 0
        assert json.loads(capsys.readouterr().out) == wanted.to_dict()


def changed(value):
    """Return another value of the kind."""
    if value is None or isinstance(value, list | dict):
        return {"c": 0.5} if isinstance(value, dict) else [7]
    return not value if isinstance(value, bool) else value + "x" if isinstance(value, str) else value + 1


def variants(values):
    """Yield for each field of a config, as plain values, a copy in which it has another value."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from ({**values, name: inner} for inner in variants(value))
        else:
            yield {**values, name: changed(value)}


def test_settings_are_what_counts_for_the_name_of_a_run(monkeypatch):
    for cls in (Config, Data, Schedule, EarlyStop):  # values that no run could have do here
        monkeypatch.setattr(cls, "__post_init__", lambda _self: None)
    made = replace(Config(), seed=1)
    count = 0
    for values in variants(dataclasses.asdict(made)):
        other = Config.from_dict(values)
        assert (settings(other) != settings(made)) == (digest(other) != digest(made)), values
        count += 1
    assert count > 40


OLD = '{"test": {"accuracy": 0.5}, "stopped_early": true, "epochs": [1], "seconds": 1.0, "data": {}}'
ODD = {
    "epochs": [None, [], {}, 3, [0], [2], ["1"], [1.0]],
    "seconds": [None, "long", [], 10**400],
    "data": [None, "digits", [], {"test": None}],
}


class TestFolders:
    @pytest.mark.parametrize("name", ODD)
    def test_a_summary_that_is_not_whole_is_named_whatever_the_format(self, out, name, capsys):
        made_result(out, config("multimnist_ls"), drawn(PAIRS), PAIRS)
        for seed, value in enumerate(ODD[name], start=1):
            path = made_result(out, config("multimnist_ls", seed=seed), drawn(PAIRS), PAIRS) / "summary.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
        assert cli.main(["report", str(out), "--out", str(out / "page.html")]) == 0
        said = capsys.readouterr().err.splitlines()
        assert len(said) == len(ODD[name])
        assert all("summary.json is broken" in line or "are said to count" in line for line in said)

    def test_metrics_of_fewer_epochs_than_were_trained_are_broken(self, out, capsys):
        made_result(out, config("multimnist_ls"), drawn(PAIRS), PAIRS)
        path = drawn_run(out, config("multimnist_ls", seed=1, epochs=12), PAIRS, epochs=12) / "metrics.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
        assert cli.main(["report", str(out)]) == 0
        assert "has 3 of 12 epochs" in capsys.readouterr().err

    def test_numbers_that_no_metric_has_count_as_not_finite(self, out, capsys):
        for seed, value in enumerate((0.5, 1.7e308)):
            path = made_result(out, config("multimnist_ls", seed=seed), dict.fromkeys(PAIRS, value), PAIRS)
        metrics = path / "metrics.jsonl"
        metrics.write_text(metrics.read_text().replace("1.7e+308", "1e308"))
        assert cli.main(["report", str(out)]) == 0
        assert "failed 1/2" in capsys.readouterr().out
        assert cli.main(["report", str(out), "--out", str(out / "page.html")]) == 0

    def test_what_is_no_finished_run_is_named_and_the_rest_reported(self, out, report):
        made_result(out, config("multimnist_ls"), drawn(PAIRS), PAIRS)
        broken = [
            ("unfinished", "summary.json", None, "unfinished is not finished."),
            ("torn", "summary.json", '{"test": ', "summary.json is broken: "),
            ("list", "summary.json", "[]", "expected an object, got []"),
            ("words", "summary.json", '{"test": {"miou": "good"}}', "its metrics are no numbers by name"),
            ("old", "summary.json", OLD, "does not say which metrics count"),
            ("up", "summary.json", '{"test": {}, "better": {"accuracy/left": "up"}}', "'better' is no direction"),
            ("older", "config.json", '{"recipe": "old"}', "of this version of flatmtl"),
            ("other", "config.json", '{"model_type": "bert"}', "is no config of a run"),
            ("gaps", "metrics.jsonl", '{"epoch": 1}\n{"epoch": 3}\n', "expected the epochs from 1 on"),
            ("rows", "metrics.jsonl", "{}\n{", "metrics.jsonl is broken"),
            ("bare", "env.json", None, "env.json"),
        ]
        for seed, (name, file, content, _) in enumerate(broken, start=1):
            path = made_result(out, config("multimnist_ls", seed=seed), drawn(PAIRS), PAIRS).rename(out / name)
            (path / file).unlink()
            if content is not None:
                (path / file).write_text(content)
        (out / "foreign").mkdir()
        (out / "notes.txt").write_text("a file is no folder")
        (table,) = report()
        assert row(table, "LS")["seeds"] == [0]
        said = report.err().splitlines()
        assert len(said) == len(broken) + 1
        for name, _, _, message in [*broken, ("foreign", "", "", "foreign is no run: it has no config.json.")]:
            (line,) = [line for line in said if f"runs/{name}" in line and (f"{name}/" in line or f"{name} " in line)]
            assert message in line

    def test_a_run_that_has_failed_is_said_to_have(self, out, report):
        path = made_result(out, config("multimnist_ls"), drawn(PAIRS), PAIRS)
        (path / "summary.json").rename(path / "error.txt")
        assert report.text(code=2) == ""
        assert f"runs/{path.name} has failed; see its error.txt." in report.err()
        assert "flatmtl: no finished run in runs." in report.err()

    def test_a_run_folder_is_a_run(self, out, report):
        paths = [made_result(out, config("multimnist_ls", seed=seed), drawn(PAIRS), PAIRS) for seed in range(3)]
        (table,) = report(str(paths[2]), str(paths[0]), str(paths[2]))
        assert row(table, "LS")["seeds"] == [0, 2]
        assert report.err() == ""

    def test_a_run_in_two_places_counts_once(self, out, report):
        values = drawn(PAIRS)
        for place in ("a", "b"):
            made_result(out / place, config("multimnist_ls"), values, PAIRS)
        (table,) = report("runs/a", "runs/b")
        assert row(table, "LS")["metrics"]["accuracy/left"]["values"] == [values["accuracy/left"]]
        assert re.search(r"runs/b/\S+ is the same run as runs/a/\S+, which is taken\.", report.err())

    @pytest.mark.parametrize("name", ["nowhere", "file"])
    def test_a_folder_that_is_not_there_is_a_mistake(self, out, report, name):
        made_result(out, config("multimnist_ls"), drawn(PAIRS), PAIRS)
        Path("file").write_text("")
        assert report.text("runs", name, code=2) == ""
        assert f"{name} is no folder; expected one of a run, or one of such folders." in report.err()


def test_a_report_of_runs_that_were_trained(tmp_path, monkeypatch, capsys):
    """Two tasks alone, both with MGDA; Delta m from their own summaries."""
    monkeypatch.chdir(tmp_path)
    small = [*FLAGS, "--device", "cpu", "--loggers"]
    for words in (["multimnist_stl"], ["multimnist_stl", "--task", "right"], ["multimnist_mgda"]):
        assert cli.main(["run", *words, *small]) == 0
    capsys.readouterr()
    assert cli.main(["report", "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)
    test = {}
    for path in tmp_path.glob("runs/*/summary.json"):
        summary = json.loads(path.read_text())
        tasks = [name for name in PAIRS if name in summary["test"]]
        test[tuple(tasks)] = {name: summary["test"][name] for name in tasks}
    both = test.pop(tuple(PAIRS))
    alone = {name: value for values in test.values() for name, value in values.items()}
    assert row(table, "MGDA")["delta_m"]["values"] == pytest.approx([delta(both, alone, PAIRS)])
    assert row(table, "STL")["metrics"]["accuracy/right"]["values"] == [alone["accuracy/right"]]


def test_it_starts_without_the_packages_that_train(tmp_path):
    made_result(tmp_path / "runs", config("multimnist_ls"), drawn(PAIRS), PAIRS)
    code = (
        "import sys; from flatmtl_bench import cli; cli.main(['report']); print(sorted({*sys.modules} & {*sys.argv}))"
    )
    heavy = ("torch", "torchvision", "torchmetrics", "lightning", "matplotlib", "plotly")
    words = [sys.executable, "-c", code, *heavy]
    done = subprocess.run(words, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert done.stdout.startswith("multimnist (source mnist5k), resnet18, 200 epochs, protocol honest\n")


class TestTerminal:
    ROWS = (
        ("method", "seeds", "segmentation pixel accuracy, %", "depth abs err", "normals within 11.25, %"),
        ("STL", "2", Text("*38.39 ± 3.60", "bold"), "0.6389 ± 0.0364", "30.57 ± 1.81"),
        ("F-CAGrad rho=0.05 perturbation=asam c=0.4", "2", "65.43 ± 2.29", "0.6890 ± 0.0247", "28.37 ± 0.90"),
    )

    @pytest.fixture
    def printed(self, monkeypatch, capsys):
        def printed(width, rows=self.ROWS, **environment):
            monkeypatch.setenv("COLUMNS", str(width))
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            terminal.print_lines(rows)
            return re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)

        return printed

    @pytest.mark.parametrize(("width", "blocks"), [(60, 3), (80, 2), (200, 1)])
    def test_it_fits_and_nothing_is_lost(self, printed, width, blocks):
        lines = printed(width, FORCE_COLOR="1").splitlines()
        assert max(map(len, lines)) <= width
        for cell in ("*38.39 ± 3.60", "0.6890 ± 0.0247", "28.37 ± 0.90"):
            assert sum(cell in line for line in lines) == 1
        assert sum(line.startswith("STL") for line in lines) == blocks

    def test_elsewhere_every_row_is_a_line(self, printed):
        lines = printed(40).splitlines()
        assert len(lines) == len(self.ROWS)
        for line, row in zip(lines, self.ROWS, strict=True):
            assert re.split(r" {2,}", line.strip()) == [str(cell) for cell in row]

    def test_brackets_are_text(self, printed):
        assert "a[red]b" in printed(80, [["name"], ["a[red]b"]])


def test_the_overview_has_the_columns_of_a_result_table_where_there_is_no_accuracy(out):
    values = drawn(STREETS)
    runs = [
        read(made_result(out, config("streets_ls"), values, STREETS)),
        read(
            made_result(out, config("streets_stl", task="depth"), of_task(values, "depth"), of_task(STREETS, "depth"))
        ),
        read(made_result(out, config("multimnist_ls"), {**drawn(PAIRS), "accuracy": 0.5}, PAIRS)),
    ]
    heading, dense, alone, digits = overview.table(runs, ["task", "method.options.c"])
    assert heading[:6] == ["recipe", "task", "method.options.c", "seeds", "accuracy, %", "segmentation miou, %"]
    miou, error = (heading.index(name) for name in ("segmentation miou, %", "depth abs err"))
    assert (dense[miou], dense[error]) == (f"{100 * values['miou/segmentation']:.2f}", f"{values['abs_err/depth']:.4f}")
    assert (alone[1], alone[miou], alone[error]) == ("depth", "-", f"{values['abs_err/depth']:.4f}")
    assert [r[4] for r in (dense, alone, digits)] == ["-", "-", "50.00"]
    assert digits[2] == "-"


class InThisProcess:
    """A pool of a sweep that has no processes."""

    def map(self, work, items):
        return ((item, work(item)) for item in items)

    def close(self):
        pass


def test_a_sweep_ends_with_what_validation_chooses(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "LocalPool", lambda _jobs, _threads: InThisProcess())
    monkeypatch.chdir(tmp_path)
    grid = ("--grid", "method.options.c=0.2,0.4")
    words = ["sweep", "multimnist_cagrad", "--tune", *grid, *FLAGS, "--device", "cpu", "--loggers"]
    assert cli.main(words) == 0
    scores = {}
    for path in tmp_path.glob("runs/*/summary.json"):
        c = json.loads(path.with_name("config.json").read_text())["method"]["options"]["c"]
        scores[c] = json.loads(path.read_text())["validation"]["score"]
    assert len(scores) == 2
    best = max(sorted(scores), key=scores.__getitem__)
    chosen = (
        f"multimnist_cagrad --method.options c {best} is the best of 2 settings by the mean validation score of seed 0"
        f", {scores[best]:.4f}."
    )
    assert capsys.readouterr().out.splitlines()[-1] == chosen
    assert cli.main([*words, "--json"]) == 0
    said = capsys.readouterr()
    assert len(json.loads(said.out)) == 2
    assert said.err.splitlines()[-1] == chosen
