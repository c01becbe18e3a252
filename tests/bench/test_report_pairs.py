"""Plain against flat in a report: paired differences with their intervals, and what a step costs."""

import json
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from scipy import stats
from tests.bench.small import SMALL, drawn_run, made_result, small_config

from flatmtl_bench import cli, recipes
from flatmtl_bench.recipes.config import Method, Optimizer
from flatmtl_bench.reports.difference import difference
from flatmtl_bench.reports.epochs import columns
from flatmtl_bench.reports.reading import find
from flatmtl_bench.reports.results import tables
from flatmtl_bench.reports.section import Section

PAIRS = {"accuracy/left": "higher", "accuracy/right": "higher"}


def config(recipe, **changes):
    return replace(recipes.build(recipe), **{"source": "mnist5k", "device": "cpu", **changes})


def of_seeds(out, recipe, seeds, better=PAIRS, **changes):
    """Write a run of each seed, with random numbers."""
    return [drawn_run(out, config(recipe, seed=seed, **changes), better) for seed in seeds]


def section(out, **options):
    """Return the only section of the runs in a folder."""
    (table,) = tables(find([out]).runs)
    return Section(table, **options)


def grid(out, name, **options):
    (found,) = [grid for grid in section(out, **options).grids() if grid.name == name]
    return found


def summaries(paths):
    return [json.loads((path / "summary.json").read_text()) for path in paths]


def rewrite(path, file, **changes):
    values = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps({**values, **changes}))


class TestDifference:
    @pytest.mark.parametrize("count", [2, 3, 5, 40])
    def test_its_interval_is_that_of_the_paired_t_test(self, count):
        drawn = np.random.default_rng(count)
        first, second = drawn.normal(0.0, 1.0, (2, count))
        found = difference(first.tolist(), second.tolist(), "higher")
        expected = stats.ttest_rel(second, first).confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-10)
        assert found.mean == pytest.approx(np.mean(second - first))

    def test_it_contains_the_true_mean_in_95_of_100_cases(self):
        drawn = np.random.default_rng(0)
        hits = []
        for first, second in drawn.normal([[0.0], [0.5]], 1.0, (2000, 2, 5)):
            found = difference(first.tolist(), second.tolist(), "higher")
            hits.append(found.low <= 0.5 <= found.high)
        assert np.mean(hits) == pytest.approx(0.95, abs=0.015)  # three standard errors

    @pytest.mark.parametrize(("better", "wins"), [("higher", 1), ("lower", 2)])
    def test_the_good_direction_decides_who_wins(self, better, wins):
        found = difference([1.0, 1.0, 1.0, 1.0], [2.0, 0.5, 0.0, 1.0], better)
        assert (found.wins, found.ties, found.count) == (wins, 1, 4)

    @pytest.mark.parametrize(("better", "clear"), [("higher", True), ("lower", False)])
    def test_it_is_clear_only_on_the_good_side(self, better, clear):
        assert difference([0.0, 0.0, 0.0], [1.0, 1.1, 0.9], better).clear == clear
        assert difference([1.0, 1.1, 0.9], [0.0, 0.0, 0.0], better).clear == (not clear)
        assert not difference([0.0, 0.0], [-1.0, 3.0], better).clear

    def test_one_seed_has_no_interval(self):
        found = difference([1.0], [2.0], "higher")
        assert (found.mean, found.low, found.high, found.wins, found.clear) == (1.0, None, None, 1, False)

    @pytest.mark.parametrize("values", [[1.0, None], [None, None], []])
    def test_there_is_none_where_a_value_is_lacking(self, values):
        assert difference(values, [1.0] * len(values), "higher") is None
        assert difference([1.0] * len(values), values, "higher") is None

    def test_values_that_are_no_pairs_are_refused(self):
        with pytest.raises(ValueError, match="2 and 1 values cannot be paired"):
            difference([1.0, 2.0], [1.0], "higher")


class TestPairs:
    def paired(self, out, **options):
        return [(pair.plain.config.recipe, pair.flat.config.recipe) for pair in section(out, **options).pairs]

    def test_a_plain_method_is_paired_with_each_of_its_flat_forms(self, tmp_path):
        for recipe in ("multimnist_mgda", "multimnist_cagrad", "multimnist_ls"):
            of_seeds(tmp_path, recipe, [0])
        for rho in (0.05, 0.5):
            of_seeds(tmp_path, "multimnist_f_mgda", [0], rho=rho)
        of_seeds(tmp_path, "multimnist_f_cagrad", [0], method=Method("cagrad", {"c": 0.4}, "sam", norm="joint"))
        assert self.paired(tmp_path) == [
            *[("multimnist_mgda", "multimnist_f_mgda")] * 2,
            ("multimnist_cagrad", "multimnist_f_cagrad"),
        ]
        names = [row[0].text for row in grid(tmp_path, "differences").rows]
        assert len({*names}) == 3
        assert "F-MGDA rho=0.05" in names[0]
        assert names[0].endswith(" vs MGDA")

    def test_single_task_learning_is_paired_with_its_own_flat_form_and_not_with_the_sum_of_losses(self, tmp_path):
        for recipe in ("multimnist_stl", "multimnist_f_stl"):
            for task in ("left", "right"):
                of_seeds(tmp_path, recipe, [0, 1], {f"accuracy/{task}": "higher"}, task=task)
        of_seeds(tmp_path, "multimnist_ls", [0, 1])
        assert self.paired(tmp_path) == [("multimnist_stl", "multimnist_f_stl")]
        (row,) = grid(tmp_path, "cost").rows
        assert [cell.text for cell in row[-2:]] == ["-", "-"]  # with one task there is no conflict

    def test_other_settings_make_no_pair_and_that_is_said(self, tmp_path):
        of_seeds(tmp_path, "multimnist_mgda", [0])
        of_seeds(tmp_path, "multimnist_f_mgda", [0], optimizer=Optimizer(lr=0.1))
        assert self.paired(tmp_path) == []
        assert [grid.name for grid in section(tmp_path).grids()] == ["results"]
        assert any("F-MGDA (multimnist_f_mgda) is not compared" in line for line in section(tmp_path).lines())
        compared = ("multimnist_mgda", "multimnist_f_mgda")
        assert self.paired(tmp_path, compared=compared) == [compared]

    def test_only_seeds_that_both_have_count_and_that_is_said(self, tmp_path):
        plain, flat = {}, {}
        for values, recipe, seeds in ((plain, "mgda", (0, 1, 3)), (flat, "f_mgda", (1, 2, 3))):
            for seed in seeds:
                made = config(f"multimnist_{recipe}", seed=seed)
                values[seed] = float(np.random.default_rng([seed, len(recipe)]).uniform())
                made_result(tmp_path, made, dict.fromkeys(PAIRS, values[seed]), PAIRS)
        (pair,) = section(tmp_path).to_dict()["pairs"]
        assert (pair["seeds"], pair["left_out"]) == ([1, 3], [0, 2])
        assert pair["differences"]["accuracy/left"]["values"] == [flat[seed] - plain[seed] for seed in (1, 3)]
        said = "MGDA and F-MGDA are compared without seeds 0, 2, which only one of them has."
        assert said in section(tmp_path).lines()
        assert said in section(tmp_path).to_dict()["notes"]

    def test_of_several_settings_the_one_is_named_that_lacks_seeds(self, tmp_path):
        of_seeds(tmp_path, "multimnist_mgda", [0, 1, 2])
        of_seeds(tmp_path, "multimnist_f_mgda", [0, 1, 2], rho=0.5)
        of_seeds(tmp_path, "multimnist_f_mgda", [0, 1], rho=1.0)
        said = [line for line in section(tmp_path).lines() if "are compared without" in line]
        assert said == ["MGDA and F-MGDA rho=1 are compared without seed 2, which only one of them has."]

    def test_without_a_seed_in_common_there_is_no_pair(self, tmp_path):
        of_seeds(tmp_path, "multimnist_mgda", [0])
        of_seeds(tmp_path, "multimnist_f_mgda", [1])
        assert self.paired(tmp_path) == []
        assert "MGDA and F-MGDA have no seed in common, so they are not compared." in section(tmp_path).lines()

    def test_a_run_that_failed_is_in_no_difference_of_that_metric(self, tmp_path):
        of_seeds(tmp_path, "multimnist_mgda", [0, 1])
        for seed, failed in enumerate((None, "accuracy/left")):
            drawn_run(tmp_path, config("multimnist_f_mgda", seed=seed), PAIRS, failed=failed)
        (pair,) = section(tmp_path).to_dict()["pairs"]
        known = {name: found is not None for name, found in pair["differences"].items()}
        assert known == {"accuracy/left": False, "accuracy/right": True, "accuracy": False}
        (row,) = grid(tmp_path, "differences").rows
        assert [cell.text == "-" for cell in row[2:]] == [True, False, True]

    def test_what_is_clearly_better_stands_out(self, tmp_path):
        for seed in range(3):
            plain = {"accuracy/left": 0.5, "accuracy/right": 0.5}
            flat = {"accuracy/left": 0.6 + 0.001 * seed, "accuracy/right": 0.4 + 0.001 * seed}
            made_result(tmp_path, config("multimnist_mgda", seed=seed), plain, PAIRS)
            made_result(tmp_path, config("multimnist_f_mgda", seed=seed), flat, PAIRS)
        (row,) = grid(tmp_path, "differences").rows
        assert [cell.strong for cell in row] == [False, False, True, False, False]
        assert row[2].text == "+10.10 [+9.85, +10.35] 3/3"
        assert row[3].text == "-9.90 [-10.15, -9.65] 0/3"


class TestCost:
    def write(self, tmp_path):
        return [of_seeds(tmp_path, f"multimnist_{form}mgda", range(3)) for form in ("", "f_")]

    def cost(self, tmp_path):
        (pair,) = section(tmp_path).to_dict()["pairs"]
        return pair["cost"]

    def test_it_is_that_of_the_summaries(self, tmp_path):
        plain, flat = map(summaries, self.write(tmp_path))
        found = self.cost(tmp_path)
        assert found["step_milliseconds"]["plain"] == pytest.approx([1000 * s["step_seconds"] for s in plain])
        assert found["step_mebibytes"]["flat"] == pytest.approx([s["step_bytes"] / 1024**2 for s in flat])
        for name, of in (("step_milliseconds", "step_seconds"), ("step_mebibytes", "step_bytes")):
            expected = fmean(f[of] / p[of] for p, f in zip(plain, flat, strict=True))
            assert found[name]["ratio"] == pytest.approx(expected)
        shown = grid(tmp_path, "cost")
        assert shown.rows[0][3].text.startswith(f"{found['step_milliseconds']['ratio']:.2f} ± ")
        assert "Made on P with 2 cores, 1 thread." in shown.caption

    def test_conflict_is_the_mean_over_the_epochs(self, tmp_path):
        (path, *_), _ = self.write(tmp_path)
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        expected = 100 * fmean(line["train/conflict"] for line in lines)
        assert self.cost(tmp_path)["conflict_percent"]["plain"][0] == pytest.approx(expected)

    def test_runs_that_did_not_measure_memory_have_a_dash(self, tmp_path):
        plain, _ = self.write(tmp_path)
        for value, path in zip((None, "much", -1.0), plain, strict=True):
            rewrite(path, "summary.json", step_bytes=value)
        found = self.cost(tmp_path)["step_mebibytes"]
        assert (found["plain"], found["ratio"]) == ([None] * 3, None)
        assert grid(tmp_path, "cost").rows[0][4].text == "-"

    @pytest.mark.parametrize(
        "other", [{"processor": "Q"}, {"threads": 2}, {"ranks": 2}, {"processor": None}, {"threads": None}], ids=str
    )
    def test_times_of_different_machines_have_no_ratio(self, tmp_path, other):
        _, (flat, *_) = self.write(tmp_path)
        rewrite(flat, "env.json", **other)
        found = self.cost(tmp_path)
        assert found["step_milliseconds"]["ratio"] is None
        assert found["step_mebibytes"]["ratio"] is not None
        shown = grid(tmp_path, "cost")
        assert shown.rows[0][3].text == "-"
        assert any(line.startswith("No ratio of times of F-MGDA vs MGDA") for line in shown.caption)

    def test_an_accelerator_counts_where_it_is_used(self, tmp_path):
        for form, device in (("", "cpu"), ("f_", "cuda")):
            for path in of_seeds(tmp_path, f"multimnist_{form}mgda", [0], device=device):
                rewrite(path, "env.json", accelerator="G")
        assert self.cost(tmp_path)["machines"] == ["P with 2 cores, 1 thread", "G, P with 2 cores, 1 thread"]


class TestCompare:
    @pytest.fixture
    def report(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)

        def run(*words, code=0):
            assert cli.main(["report", *words]) == code
            return capsys.readouterr()

        return run

    def test_two_recipes_are_shown_and_the_second_is_compared_with_the_first(self, tmp_path, report):
        for recipe in ("ls", "mgda", "cagrad"):
            of_seeds(tmp_path / "runs", f"multimnist_{recipe}", range(3))
        for task in ("left", "right"):
            of_seeds(tmp_path / "runs", "multimnist_stl", range(3), {f"accuracy/{task}": "higher"}, task=task)
        words = ("--compare", "multimnist_ls", "multimnist_mgda")
        (whole,), (table,) = json.loads(report("--json").out), json.loads(report(*words, "--json").out)
        assert [row["method"] for row in table["rows"]] == ["MGDA", "LS"]
        first, second = (next(r for r in table["rows"] if r["method"] == name) for name in ("LS", "MGDA"))
        (pair,) = table["pairs"]
        for name in PAIRS:
            both = (row["metrics"][name]["values"] for row in (first, second))
            assert pair["differences"][name]["values"] == [b - a for a, b in zip(*both, strict=True)]
        assert second["delta_m"] == next(r for r in whole["rows"] if r["method"] == "MGDA")["delta_m"]
        assert "Differences, multimnist_mgda less multimnist_ls with the same seed" in report(*words).out

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (("multimnist_mgda", "multimnist_cagrat"), "no finished run of multimnist_cagrat. Did you mean"),
            (("multimnist_mgda", "multimnist_mgda"), "names one recipe twice"),
            (("multimnist_mgda", "multimnist_ls"), "have no runs of one data set, model, length and protocol"),
        ],
    )
    def test_what_cannot_be_compared_is_a_mistake(self, tmp_path, report, names, message):
        for recipe, epochs in (("mgda", 15), ("cagrad", 15), ("ls", 9)):
            of_seeds(tmp_path / "runs", f"multimnist_{recipe}", [0], epochs=epochs)
        said = report("--compare", *names, code=2)
        assert message in said.err
        assert said.out == ""


class TestEpochs:
    def test_what_is_not_finite_or_not_there_is_nan(self):
        rows = [{"epoch": 1, "a": None, "b": 1}, {"epoch": 2, "a": float("inf"), "c": 2.5}, {"epoch": 3, "a": 0.5}]
        found = columns(rows)
        assert list(found) == ["epoch", "a", "b", "c"]
        expected = {
            "epoch": [1, 2, 3],
            "a": [np.nan, np.nan, 0.5],
            "b": [1, np.nan, np.nan],
            "c": [np.nan, 2.5, np.nan],
        }
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values)

    def test_a_run_gives_them_back_as_the_file_has_them(self, tmp_path):
        path = drawn_run(tmp_path, config("multimnist_mgda"), PAIRS, failed="accuracy/left")
        (run,) = find([path]).runs
        written = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        assert run.rows == written
        assert run.epochs == list(range(1, 16))
        assert run.series("test/accuracy/left") == run.series("nothing") == [None] * 15


def test_a_row_trained_on_other_data_than_single_tasks_has_no_delta_m(tmp_path, capsys):
    for task in ("left", "right"):
        config = small_config("multimnist_stl", task=task)
        made_result(tmp_path, config, {f"accuracy/{task}": 0.5}, {f"accuracy/{task}": "higher"})
    more = replace(SMALL, train_samples=9999)
    for config in (small_config("multimnist_mgda"), small_config("multimnist_mgda", data=more)):
        made_result(tmp_path, config, dict.fromkeys(PAIRS, 0.75), PAIRS)
    assert cli.main(["report", str(tmp_path), "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)
    found = {
        row["settings"].get("data.train_samples"): row["delta_m"] for row in table["rows"] if row["method"] == "MGDA"
    }
    assert found[9999] is None
    assert found[96]["mean"] == pytest.approx(-50.0)
    assert any("MGDA" in note and "data.train_samples" in note for note in table["notes"])
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "No Delta m of MGDA data.train_samples=9999" in capsys.readouterr().out
