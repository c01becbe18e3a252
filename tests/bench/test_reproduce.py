import json
import re
from dataclasses import replace
from statistics import fmean, stdev

import pytest
from scipy.stats import ttest_rel
from tests.bench.small import flatmtl, made_result, small_config

from flatmtl_bench import cli
from flatmtl_bench.recipes import RECIPES
from flatmtl_bench.reports import paper
from flatmtl_bench.reports.columns import DELTA_M
from flatmtl_bench.reports.reading import find
from flatmtl_bench.reproduce import claims, contradictions
from flatmtl_bench.reproduce.beside import LOSES, QUOTED
from flatmtl_bench.reproduce.command import Reproduce, _with_data
from flatmtl_bench.reproduce.outcome import Tuning, outcome, tuned
from flatmtl_bench.reproduce.plan import TASKS, Part
from flatmtl_bench.reproduce.scales import FULL, SCALES, SMALL, Size
from flatmtl_bench.reproduce.tables import TABLES, Row

BETTER = {"accuracy/left": "higher", "accuracy/right": "higher"}
TINY = [
    *("--scale", "small", "--data", "multimnist", "--seeds", "1", "--epochs", "1", "--data.train-samples", "48"),
    *("--data.validation-samples", "32", "--data.test-samples", "32", "--sharpness.samples", "16"),
    *("--loggers", "--jobs", "1", "--threads", "1"),
]


def part(table="table1", data="multimnist", size=None, **changes):
    """Return a table on one data set, at the small scale."""
    found = TABLES[table]
    return Part(found, found.data[data], size or SMALL[data], list(found.rows), **changes)


def rows(table, *methods):
    return [row for row in TABLES[table].rows if (row.method, row.flat) in methods]


class TestTables:
    def test_every_printed_number_has_its_place_and_only_those(self):
        ours = {
            (table.number, printed, row.printed, row.flat, metric)
            for table in TABLES.values()
            for data, printed in table.data.items()
            for row in table.rows
            if not row.beside
            for metric in paper.printed(table.number, printed, row.printed, flat=row.flat)
            if metric in table.columns(TASKS[data])
        }
        assert ours == {(e["table"], e["dataset"], e["method"], e["flat"], e["metric"]) for e in paper._entries()}
        assert len(ours) == 505

    def test_every_row_that_is_not_beside_is_printed(self):
        for table in TABLES.values():
            for printed in table.data.values():
                for row in table.rows:
                    assert bool(paper.printed(table.number, printed, row.printed, flat=row.flat)) != row.beside

    def test_directions_are_those_of_the_paper(self):
        for table in TABLES.values():
            for data, printed in table.data.items():
                columns = table.columns(TASKS[data])
                for row in table.rows:
                    for metric, number in paper.printed(table.number, printed, row.printed, flat=row.flat).items():
                        assert columns[metric].better == number.better

    @pytest.mark.parametrize("suffix", ["", "_paper"])
    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize("table", TABLES)
    def test_every_row_has_a_recipe(self, table, scale, suffix):
        for data in TABLES[table].data:
            size = SCALES[scale][data]
            if suffix and size.data != data:
                continue  # what stands for the data at the small scale has no protocol of the paper's
            for row in TABLES[table].rows:
                config = RECIPES[row.recipe(size.data, suffix)].config
                assert (config.method.perturbation != "none") == row.flat
                assert config.method.combine == (row.combine or "individual")

    def test_flat_loses_in_nine_cells_and_in_one_of_the_ablation(self):
        lost = [
            (table.number, cell.row.label, cell.column.heading)
            for table in TABLES.values()
            for data, printed in table.data.items()
            for cells in outcome(Tuning(Part(table, printed, FULL[data], table.rows), {}), [], {}).beside.compared()
            for cell in cells
            if cell.loses
        ]
        assert [entry[:2] for entry in lost] == [
            *[(3, "F-MGDA")] * 3,
            *[(3, "F-PCGrad")] * 4,
            (5, '"Ours (direct)" (F-MGDA)'),
            (7, "F-STL"),
            (7, "F-LS"),
        ]

    def test_quoted_rows_are_those_that_others_ran(self):
        for number in (3, 4):
            quoted = {row.printed for row in TABLES[f"table{number}"].rows if row.quoted}
            assert quoted == {"STL", "SI", "RLW", "DWA", "GradDrop", "Nash-MTL"}


class TestContradictions:
    @pytest.mark.parametrize("each", contradictions.CONTRADICTIONS, ids=lambda each: f"table{each.table}")
    def test_the_table_speaks_against_what_is_said(self, each):
        first, second = each.numbers()
        assert second.is_better_than(first)

    def test_they_are_said_with_their_tables(self):
        for number in range(1, 10):
            said = contradictions.sentences(number)
            assert bool(said) == (number in (3, 4, 5, 7))
            assert all(f"table {number}" in sentence for sentence in said)

    def test_the_one_delta_m_that_does_not_follow_is_named(self):
        (sentence,) = [s for n in (3, 4, 5, 7) for s in contradictions.sentences(n) if s.startswith("Delta m of")]
        assert re.search(r"IMTL in table 3 is printed as -0\.76, and is -0\.60", sentence)


class TestPlan:
    def test_a_radius_is_chosen_with_two_seeds_and_the_chosen_one_trained_with_all(self):
        size = Size("multimnist", ("--source", "mnist5k"), seeds=5, radii=("0.5", "1.0"))
        here = replace(part(size=size), rows=rows("table1", ("mgda", False), ("mgda", True)))
        tuning = [run.config for run in here.tuning().values()]
        assert sorted((c.recipe, c.rho, c.seed) for c in tuning) == [
            ("multimnist_f_mgda", rho, seed) for rho in (0.5, 1.0) for seed in (0, 1)
        ]
        final = [run.config for run in here.final({"multimnist_f_mgda": "1.0"}).values()]
        assert sorted((c.recipe, c.rho, c.seed) for c in final) == [
            *(("multimnist_f_mgda", 1.0, seed) for seed in range(5)),
            *(("multimnist_mgda", 0.0, seed) for seed in range(5)),
        ]

    def test_runs_of_the_choice_count_again(self):
        here = replace(part(), rows=rows("table1", ("mgda", True)))
        shared = {*here.tuning()} & {*here.final({"multimnist_f_mgda": "0.5"})}
        assert len(shared) == 2

    def test_single_tasks_are_trained_one_by_one(self):
        here = replace(part(), rows=rows("table1", ("stl", True)))
        tasks = [run.config.task for run in here.final({"multimnist_f_stl": "0.5"}).values()]
        assert sorted(tasks) == ["left"] * 5 + ["right"] * 5

    def test_protocols_without_validation_take_the_radius_of_the_one_that_has_it(self):
        here = replace(part("table3", "nyuv2", FULL["nyuv2"], suffix="_paper"), rows=rows("table3", ("mgda", True)))
        assert {run.config.recipe for run in here.tuning().values()} == {"nyuv2_f_mgda"}
        final = [run.config for run in here.final({"nyuv2_f_mgda": "0.01"}).values()]
        assert {(c.recipe, c.rho, c.protocol) for c in final} == {("nyuv2_f_mgda_paper", 0.01, "paper")}

    def test_what_the_authors_have_settled_is_not_tuned(self):
        here = replace(
            part("table4", "cityscapes", FULL["cityscapes"], suffix="_official"), rows=rows("table4", ("mgda", True))
        )
        assert here.tuning() == {}
        assert {run.config.rho for run in here.final({}).values()} == {0.0025}

    def test_a_single_radius_needs_no_choice(self):
        size = replace(SMALL["multimnist"], radii=("2.0",))
        here = replace(part(size=size), rows=rows("table1", ("mgda", True)))
        assert here.tuning() == {}
        assert {run.config.rho for run in here.final({}).values()} == {2.0}

    def test_data_that_may_be_others_are_refused(self):
        here = replace(part(flags=("--source", "auto")), rows=rows("table1", ("mgda", False)))
        with pytest.raises(ValueError, match="Name the source"):
            here.final({})

    @pytest.mark.parametrize(
        "flags",
        [
            ("--task", "left"),
            ("--method.combine", "direct"),
            ("--method.aggregator", "mgda"),
            ("--data.name", "scenes"),
        ],
    )
    def test_flags_that_would_make_another_row_of_a_row_are_refused(self, flags):
        here = replace(part(flags=flags), rows=rows("table1", ("cagrad", False)))
        with pytest.raises(ValueError, match=f"{flags[0]} decides what the rows of a table are"):
            here.final({})

    def test_flags_hold_for_all_runs(self):
        here = replace(part(flags=("--epochs", "3")), rows=rows("table1", ("mgda", False), ("mgda", True)))
        runs = {**here.tuning(), **here.final({"multimnist_f_mgda": "0.5"})}
        assert {run.config.epochs for run in runs.values()} == {3}


def made_runs(out, values):
    """Write runs of recipes with test accuracies ``{recipe: [(left, right) of each seed]}``; return them, read."""
    for recipe, seeds in values.items():
        for seed, accuracies in enumerate(seeds):
            config = small_config(recipe, seed=seed)
            tasks = ("left", "right") if config.task else (None,)
            for task in tasks:
                names = [name for name in BETTER if task is None or name.endswith(task)]
                test = {name: dict(zip(BETTER, accuracies, strict=True))[name] for name in names}
                made_result(
                    out, replace(config, task=task), test, {name: BETTER[name] for name in names}, score=test[names[0]]
                )
    return list(find([out]).runs)


VALUES = {
    "multimnist_stl": [(0.90, 0.80), (0.91, 0.81), (0.92, 0.82)],
    "multimnist_mgda": [(0.90, 0.80), (0.92, 0.84), (0.88, 0.79)],
    "multimnist_f_mgda": [(0.93, 0.85), (0.94, 0.85), (0.92, 0.84)],
    "multimnist_pcgrad": [(0.85, 0.75), (0.86, 0.75), (0.84, 0.76)],
    "multimnist_f_pcgrad": [(0.92, 0.84), (0.93, 0.85), (0.92, 0.83)],
}


class TestBeside:
    @pytest.fixture
    def found(self, tmp_path):
        here = replace(part(), rows=[row for row in TABLES["table1"].rows if row.recipe("multimnist") in VALUES])
        return outcome(Tuning(here, {}), made_runs(tmp_path, VALUES), {})

    def test_ours_are_the_means_of_the_runs_and_the_paper_is_what_is_printed(self, found):
        cells = {(c["method"], c["metric"]): c for c in found.to_dict()["cells"]}
        cell = cells["F-MGDA", "accuracy average, %"]
        each = [100 * fmean(pair) for pair in VALUES["multimnist_f_mgda"]]
        assert cell["ours"]["values"] == pytest.approx(each)
        assert cell["ours"]["mean"] == pytest.approx(fmean(each))
        assert cell["ours"]["sd"] == pytest.approx(stdev(each))
        assert cell["paper"] == {"mean": 95.68, "sd": 0.0}
        assert cell["difference"] == pytest.approx(fmean(each) - 95.68)

    def test_gains_are_paired_by_seed(self, found):
        gains = {(g["flat"], g["metric"]): g for g in found.to_dict()["gains"]}
        gain = gains["F-MGDA", "accuracy left, %"]
        pair = [[100 * left for left, _ in VALUES[f"multimnist_{f}mgda"]] for f in ("f_", "")]
        low, high = ttest_rel(*pair).confidence_interval(0.95)
        assert gain["paper"] == pytest.approx(96.37 - 95.62)
        assert gain["ours"]["mean"] == pytest.approx(fmean(pair[0]) - fmean(pair[1]))
        assert (gain["ours"]["low"], gain["ours"]["high"]) == pytest.approx((low, high))
        assert gain["ours"]["wins"] == 3

    def test_a_method_without_runs_is_told_and_left_blank(self, found):
        here = replace(found.beside.part, rows=TABLES["table1"].rows)
        whole = replace(found, beside=replace(found.beside, part=here))
        assert "CAGrad has the results of 0 of 5 seeds." in whole.lines()
        line = next(row for row in whole.beside.side_by_side().rows if row[0].text == "CAGrad")
        printed = paper.printed(1, "MultiMNIST", "CAGrad", flat=False)["accuracy task 1"]
        assert [cell.text for cell in line[1:6]] == ["-", "-", f"{printed.mean:.2f} ± {printed.sd:.2f}", "-", "-"]

    def test_a_run_that_failed_has_no_mean_no_difference_and_no_gain(self, tmp_path):
        values = {**VALUES, "multimnist_f_mgda": [(0.93, 0.85), (float("nan"), 0.85), (0.92, 0.84)]}
        here = replace(part(), rows=[row for row in TABLES["table1"].rows if row.recipe("multimnist") in VALUES])
        found = outcome(Tuning(here, {}), made_runs(tmp_path, values), {}).to_dict()
        cells = {(c["method"], c["metric"]): c for c in found["cells"]}
        assert cells["F-MGDA", "accuracy left, %"]["ours"]["mean"] is None
        assert cells["F-MGDA", "accuracy left, %"]["difference"] is None
        assert cells["F-MGDA", "accuracy right, %"]["ours"]["mean"] == pytest.approx(100 * fmean([0.85, 0.85, 0.84]))
        gains = {(g["flat"], g["metric"]): g["ours"] for g in found["gains"]}
        assert gains["F-MGDA", "accuracy left, %"] is None
        (claim,) = [c for c in found["claims"] if c["what"].endswith("F-MGDA less MGDA")]
        assert claim["verdict"] == "not measured"

    def test_what_comes_of_not_looking_stands_beside_them_if_it_is_known(self, found):
        assert "without looking" not in [grid.name for grid in found.grids()]
        known = replace(found, blind={"accuracy/left": 0.125, "accuracy/right": 0.375})
        (grid,) = [grid for grid in known.grids() if grid.name == "without looking"]
        assert [cell.text for cell in grid.rows[0]] == ["without looking", "12.50", "37.50", "25.00"]
        assert known.to_dict()["without_looking"]["accuracy average, %"] == 25.0
        in_part = replace(found, blind={"accuracy/left": 0.125})
        assert list(in_part.to_dict()["without_looking"]) == ["accuracy left, %"]

    @pytest.mark.parametrize(("radii", "said"), [(("0.5", "1.0"), "validation chose"), (("1.0",), "not tuned")])
    def test_it_says_whether_validation_chose_the_radii(self, radii, said):
        here = part()
        here = replace(here, size=replace(here.size, radii=radii))
        assert said in outcome(Tuning(here, {}), [], {}).beside.side_by_side().caption[0]

    def test_marks_are_on_quoted_rows_and_lost_cells(self):
        here = part("table3", "nyuv2", FULL["nyuv2"])
        grid = outcome(Tuning(here, {}), [], {}).beside.side_by_side()
        lines = {row[0].text: [cell.text for cell in row] for row in grid.rows}
        assert f"SI{QUOTED}" in lines
        assert f"26.42{LOSES}" in lines["F-MGDA"]
        assert not [text for text in lines["F-IMTL"] if LOSES in text]


class TestClaims:
    def test_each_is_answered_by_the_side_on_which_its_interval_lies(self, tmp_path):
        here = replace(part(), rows=[row for row in TABLES["table1"].rows if row.recipe("multimnist") in VALUES])
        found = outcome(Tuning(here, {}), made_runs(tmp_path, VALUES), {})
        told = claims.answers(found.beside)
        (flat,) = [a for a in told if a.what == "accuracy average, %: F-PCGrad less PCGrad"]
        assert (flat.claim, flat.verdict) == ("A method is better when it is flat", "yes")
        gains = [
            100 * (fmean(f) - fmean(p))
            for f, p in zip(VALUES["multimnist_f_pcgrad"], VALUES["multimnist_pcgrad"], strict=True)
        ]
        assert list(flat.found.values) == pytest.approx(gains)
        (best,) = [a.what for a in told if a.claim == "The best flat method beats single-task learning"]
        assert "F-MGDA, the best flat one by validation" in best

    @pytest.mark.parametrize(
        ("plain", "flat", "verdict"),
        [
            ([0.80, 0.81, 0.82], [0.90, 0.91, 0.92001], "yes"),
            ([0.90, 0.91, 0.92001], [0.80, 0.81, 0.82], "no"),
            ([0.80, 0.81, 0.82], [0.90, 0.71, 0.85], "open"),
            ([0.80], [0.90], "open"),
        ],
    )
    def test_verdicts(self, tmp_path, plain, flat, verdict):
        values = {"multimnist_mgda": [(v, v) for v in plain], "multimnist_f_mgda": [(v, v) for v in flat]}
        here = replace(part(), rows=rows("table1", ("mgda", False), ("mgda", True)))
        found = outcome(Tuning(here, {}), made_runs(tmp_path, values), {})
        assert [a.verdict for a in claims.answers(found.beside) if a.what.endswith("F-MGDA less MGDA")] == [verdict]

    @pytest.mark.parametrize(("table", "method"), [("table1", "cagrad"), ("table5", "stl"), ("table3", "stl")])
    def test_claims_about_methods_that_are_left_out_are_not_answered(self, table, method):
        data = next(iter(TABLES[table].data))
        few = [row for row in TABLES[table].rows if row.method == method]
        here = replace(part(table, data), rows=few)
        asked = [answer.claim for answer in claims.answers(outcome(Tuning(here, {}), [], {}).beside)]
        assert not [claim for claim in asked if "closer" in claim or "apart" in claim or "MGDA" in claim]

    def test_the_spread_is_the_range_of_three_methods_seed_by_seed(self, tmp_path):
        plain = {"pcgrad": [0.80, 0.82], "imtl_g": [0.84, 0.83], "cagrad": [0.90, 0.88]}
        flat = {"pcgrad": [0.90, 0.92], "imtl_g": [0.91, 0.91], "cagrad": [0.92, 0.92]}
        values = {f"multimnist_{m}": [(v, v) for v in vs] for m, vs in plain.items()}
        values |= {f"multimnist_f_{m}": [(v, v) for v in vs] for m, vs in flat.items()}
        here = replace(part(), rows=[row for row in TABLES["table1"].rows if row.recipe("multimnist") in values])
        found = outcome(Tuning(here, {}), made_runs(tmp_path, values), {})
        (answer,) = [a for a in claims.answers(found.beside) if "closer" in a.claim]
        assert list(answer.found.values) == pytest.approx([2.0 - 10.0, 1.0 - 6.0])


class TestTuning:
    def test_the_best_validation_score_wins(self, tmp_path):
        for rho, score in ((0.5, 0.7), (1.0, 0.9)):
            for seed in (0, 1):
                config = replace(small_config("multimnist_f_mgda", seed=seed), rho=rho)
                made_result(tmp_path, config, dict.fromkeys(BETTER, 0.5), BETTER, score=score)
        here = replace(part(), rows=rows("table1", ("mgda", True)))
        found = tuned(here, find([tmp_path]).runs)
        assert found.radii == {"multimnist_f_mgda": "1.0"}
        (line,) = found.grid().rows
        assert [(cell.text, cell.strong) for cell in line] == [("F-MGDA", False), ("0.7000", False), ("0.9000", True)]


class TestCommand:
    def test_a_table_of_measured_scores_from_training_to_the_end(self, tmp_path):
        words = ["reproduce", "table8", *TINY, "--radii", "0.5", "--out", "runs"]
        done = flatmtl(*words, "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        (found,) = json.loads(done.stdout)
        cells = {(c["method"], c["metric"]): c for c in found["cells"]}
        assert {method for method, _ in cells} == {"ERM", '"Ours" (F-CAGrad)'}
        each = {c["metric"]: c["ours"]["values"] for c in found["cells"] if c["method"] == '"Ours" (F-CAGrad)'}
        averages = [fmean(pair) for pair in zip(each["Brier score left"], each["Brier score right"], strict=True)]
        assert each["Brier score average"] == pytest.approx(averages)
        assert all(0 < value < 2 for value in averages)

    def test_a_dry_run_trains_nothing_and_says_what_is_needed(self, tmp_path):
        done = flatmtl("reproduce", "table6", *TINY, "--out", "runs", "--dry-run", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        plan = "table6 on MultiMNIST: multimnist, 4 rows, 1 seed, 12 runs to choose radii, 4 that count"
        assert plan in done.stdout
        assert "of 13 different runs whose data are there, 13 are not finished" in done.stdout
        assert re.search(r"about \d+ minutes on this machine, 1 at a time", done.stdout)
        assert not list((tmp_path / "runs").glob("*/metrics.jsonl"))

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ([], "name a table first"),
            (["table10"], "table9"),
            (["table1", "--data", "celeba"], "multimnist"),
            (["table1", "--methods", "famo"], "mgda"),
            (["table1", "--seeds", "0"], "--seeds must be"),
            (["table2", "--scale", "small", "--protocol", "official"], "Use --protocol honest"),
            (["table3"], "data"),
            (["table1", "--data", "multifashion", "--scale", "small"], "fashion*.npz"),
        ],
    )
    def test_mistakes_are_said_before_anything_is_trained(self, tmp_path, monkeypatch, capsys, words, message):
        monkeypatch.chdir(tmp_path)
        try:
            code = cli.main(["reproduce", *words])
        except SystemExit as end:  # what tyro complains of
            code = end.code
        assert code == 2
        assert message in re.sub(r"\s+", " ", capsys.readouterr().err)
        assert not list(tmp_path.iterdir())

    def test_data_that_are_not_there_are_left_out_and_said(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        command = Reproduce(("table8",), scale="small", seeds=1)
        (left,) = _with_data(command, command.parts([]))
        assert left.data == "multimnist"
        assert "left out: MultiFashion (here multifashion)" in capsys.readouterr().err

    def test_a_dry_run_says_what_is_needed_without_the_data(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        assert cli.main(["reproduce", "table8", "--scale", "small", "--seeds", "1", "--epochs", "1", "--dry-run"]) == 0
        told = capsys.readouterr()
        assert "table8 on MultiFashion: multifashion, 2 rows, 1 seed, 0 runs to choose radii, 2 that count" in told.out
        assert told.out.count("its data are not there: Multi") == 2
        assert "of 5 different runs whose data are there, 5 are not finished" in told.out


def test_delta_m_is_that_of_the_report():
    assert TABLES["table3"].columns(TASKS["nyuv2"])["delta m %"] is DELTA_M
    assert Row("IMTL", "imtl_g", flat=True).label == "F-IMTL"
