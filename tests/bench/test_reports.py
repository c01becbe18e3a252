import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
from markupsafe import escape
from plotly.offline import get_plotlyjs
from tests.bench.small import made_result, made_run, small_config

from flatmtl_bench.recipes import AGGREGATORS
from flatmtl_bench.reports import page
from flatmtl_bench.reports.comparison import Comparison, spread
from flatmtl_bench.reports.page.looks import HUES, looks
from flatmtl_bench.reports.page.values import runs_grid
from flatmtl_bench.reports.reading import read
from flatmtl_bench.reports.results import tables
from flatmtl_bench.reports.section import Section

PLAIN = [[0.5, 0.9, 0.8], [0.5, 0.6, 0.88]]  # validation accuracy of each epoch, for two seeds
FLAT = [[0.5, 0.92, 0.91], [0.6, 0.7, 0.9]]


def comparison(out, plain=PLAIN, flat=FLAT):
    groups = []
    for recipe, seeds, conflict, seconds in (
        ("multimnist_cagrad", plain, 0.5, 0.125),
        ("multimnist_f_cagrad", flat, 0.25, 0.25),
    ):
        configs = [small_config(recipe, seed=seed, epochs=3) for seed in range(len(seeds))]
        folders = [
            made_run(out, c, values, conflict=conflict, sharpness=conflict / 10, step_seconds=seconds)
            for c, values in zip(configs, seeds, strict=True)
        ]
        groups.append([read(folder) for folder in folders])
    return Comparison(*groups)


class TestTable:
    def test_it_agrees_with_the_metrics_files(self, tmp_path):
        heading, plain, flat, difference = comparison(tmp_path).table()
        column = heading.index("average, %")
        best = [[100 * (max(values) - 0.1) for values in group] for group in (PLAIN, FLAT)]
        gains = [f - p for p, f in zip(*best, strict=True)]
        assert plain[column] == f"{fmean(best[0]):.2f} ± {stdev(best[0]):.2f}"
        assert flat[column] == f"{fmean(best[1]):.2f} ± {stdev(best[1]):.2f}"
        assert difference[column] == f"+{fmean(gains):.2f} ± {stdev(gains):.2f}"

    def test_times_are_compared_as_a_ratio(self, tmp_path):
        heading, _, _, difference = comparison(tmp_path).table()
        assert difference[heading.index("ms per step")] == "x 2.00 ± 0.00"

    def test_one_seed_has_no_spread(self, tmp_path):
        rows = comparison(tmp_path, PLAIN[:1], FLAT[:1]).table()
        assert not [cell for row in rows for cell in row if "±" in cell]

    def test_methods_are_named(self, tmp_path):
        assert [row[0] for row in comparison(tmp_path).table()] == ["method", "CAGrad", "F-CAGrad", "difference"]

    def test_unequal_seeds_are_refused(self, tmp_path):
        both = comparison(tmp_path)
        with pytest.raises(ValueError, match="expected equal seeds"):
            Comparison(both.plain, both.flat[:1])


class TestFinding:
    @pytest.mark.parametrize(
        ("plain", "flat", "begins"),
        [
            (PLAIN, FLAT, "F-CAGrad beats CAGrad with both seeds: average test accuracy 81.00% against 79.00%, +2.00"),
            (FLAT, PLAIN, "F-CAGrad does not beat CAGrad with any of two seeds: "),
            ([[0.9], [0.8]], [[0.8], [0.9]], "No clear winner: F-CAGrad is ahead of CAGrad with one of two seeds: "),
            ([[0.8]], [[0.9]], "F-CAGrad beats CAGrad with the one seed that was run: "),
            ([[0.9]], [[0.9]], "F-CAGrad does not beat CAGrad with the one seed that was run: "),
            ([[0.8]] * 12, [[0.9]] * 12, "F-CAGrad beats CAGrad with all 12 seeds: "),
        ],
    )
    def test_it_says_what_the_numbers_say(self, tmp_path, plain, flat, begins):
        assert comparison(tmp_path, plain, flat).finding().startswith(begins)

    def test_few_seeds_are_called_few(self, tmp_path):
        assert "Two seeds are few" in comparison(tmp_path).finding()
        assert "few" not in comparison(tmp_path / "more", PLAIN * 3, FLAT * 3).finding()

    def test_it_names_conflict_sharpness_and_time(self, tmp_path):
        found = comparison(tmp_path).finding()
        assert "conflict in 25% of its steps against 50%" in found
        assert "sharpness is 0.0250 against 0.0500" in found
        assert "a step takes 2.0 times as long" in found


# How colours look to the colour-blind, on linear RGB (Machado, Oliveira and Fernandes 2009, severity 1).
SEEN = {
    "by most": np.eye(3),
    "without red cones": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "without green cones": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "without blue cones": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


class Loads(HTMLParser):
    """Collects what a page would fetch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found += [
            (tag, name, value) for name, value in attrs if name in ("src", "href", "srcset", "data", "action")
        ]


def sections(both):
    return [Section(table, reason="nobody trained one.") for table in tables([*both.plain, *both.flat])]


def embedded(html, name):
    """Return what a page holds as JSON."""
    return json.loads(re.search(f'<script type="application/json" id="{name}">(.*?)</script>', html)[1])


def shown(data, part, title):
    """Return the curves of a metric: method -> of each seed a number for each epoch."""
    titles = [(metric["part"], metric["title"]) for metric in data["metrics"]]
    k = titles.index((part, title))
    return {method["name"]: [seed[k] for seed in method["curves"]] for method in data["methods"]}


def many(run, recipe, count, epochs):
    """Return made runs of a recipe, five seeds with each of several radii, whose metrics are all different."""
    config = small_config(recipe, epochs=epochs)
    for k in range(count):
        radius = {"rho": 0.01 * (1 + k // 5)} if config.rho else {"batch_size": 32 + k // 5}
        draw = np.random.default_rng(k)
        metrics = {name: draw.uniform(0.1, 1.0, epochs) for name in run.metrics} | {"epoch": np.arange(1, epochs + 1)}
        yield replace(run, config=replace(config, seed=k % 5, **radius), metrics=metrics)


class TestPage:
    @pytest.fixture
    def html(self, tmp_path):
        return page.render(sections(comparison(tmp_path)), finding=["It <won>."], figures=[Path("figures/a b.png")])

    def test_it_loads_nothing_and_links_to_itself_and_figures_only(self, html):
        loads = Loads()
        loads.feed(html)
        assert loads.found == [("a", "href", link) for link in ("#table-1", "#full", "#figures", "figures/a%20b.png")]
        own = html.replace(get_plotlyjs(), "")
        assert len(own) < len(html) - 1_000_000  # the library is inside
        assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest", own)

    def test_its_curves_are_the_metrics(self, html):
        (data,) = embedded(html, "curves")
        assert shown(data, "validation", "average accuracy, %") == {
            "CAGrad": [[50.0, 90.0, 80.0], [50.0, 60.0, 88.0]],
            "F-CAGrad": [[50.0, 92.0, 91.0], [60.0, 70.0, 90.0]],
        }
        assert shown(data, "test", "right accuracy, %")["CAGrad"][0] == [30.0, 70.0, 60.0]
        assert shown(data, "training", "average loss")["CAGrad"] == [[1.5, 0.75, 0.5]] * 2
        assert shown(data, "training", "task pairs in conflict, %")["F-CAGrad"] == [[25.0] * 3] * 2

    def test_a_metric_that_no_run_has_is_no_choice(self, html):
        (data,) = embedded(html, "curves")
        assert not [metric for metric in data["metrics"] if "flat over loss" in metric["title"]]

    def test_numbers_of_curves_have_five_digits_and_what_is_not_finite_is_null(self, tmp_path):
        config = small_config(epochs=3)
        run = read(made_run(tmp_path, config, [0.5, 0.123456789, 0.5]))
        nan = replace(run, metrics={**run.metrics, "train/conflict": np.array([0.5, np.nan, 0.25])})
        html = page.render([Section(table) for table in tables([nan])])
        (data,) = embedded(html, "curves")
        assert shown(data, "validation", "left accuracy, %")["F-CAGrad"] == [[50.0, 12.346, 50.0]]
        assert shown(data, "training", "task pairs in conflict, %")["F-CAGrad"] == [[50.0, None, 25.0]]

    def test_the_curve_of_single_tasks_is_the_mean_of_their_runs(self, tmp_path):
        better = {"accuracy/left": "higher", "accuracy/right": "higher"}
        runs = []
        for task, value in (("left", 0.75), ("right", 0.25)):
            name = f"accuracy/{task}"
            config = small_config("multimnist_stl", task=task)
            runs.append(read(made_result(tmp_path, config, {name: value}, {name: better[name]})))
        (data,) = embedded(page.render([Section(table) for table in tables(runs)]), "curves")
        assert shown(data, "test", "left accuracy, %") == {"STL": [[75.0]]}
        assert shown(data, "test", "average accuracy, %") == {"STL": [[50.0]]}

    def test_it_holds_finding_tables_protocol_and_runs(self, html, tmp_path):
        both = comparison(tmp_path / "again")
        (section,) = sections(both)
        texts = [cell for grid in section.grids() for row in grid.texts() for cell in row]
        names = [run.name for run in (*both.plain, *both.flat)]
        for text in ("It &lt;won&gt;.", *section.lines(), *texts, *names, "2 of 3"):
            assert str(escape(text)) in html or text in html

    def test_it_holds_all_values_of_each_run(self, html, tmp_path):
        both = comparison(tmp_path / "again")
        values = embedded(html, "settings")
        runs = {run["name"]: {**values["common"], **run["values"]} for run in values["runs"]}
        for run in (*both.plain, *both.flat):
            known = {name.removeprefix("config: "): text for name, text in runs[run.name].items() if "config: " in name}
            assert {name: json.loads(text) for name, text in known.items() if name in ("rho", "seed", "loggers")} == {
                name: run.config.flat()[name] for name in ("rho", "seed", "loggers")
            }
            assert known.keys() == run.config.flat().keys()
            assert runs[run.name]["environment: packages.torch"] == "2.14.1"
            assert runs[run.name]["data: train"] == "digits <train>"
        assert {*runs[both.plain[0].name]} <= {*values["order"]}

    def test_the_table_of_runs_has_what_differs_and_nothing_else(self, tmp_path):
        (table,) = tables(comparison(tmp_path).plain)
        grid = runs_grid(table)
        assert grid.texts()[0] == ["run", "method", "epochs that count", "minutes", "seed"]
        assert [row[1:] for row in grid.texts()[1:]] == [
            ["CAGrad", "2 of 3", "3.0", "0"],
            ["CAGrad", "3 of 3", "3.0", "1"],
        ]

    def test_text_from_the_runs_is_escaped(self, tmp_path):
        both = comparison(tmp_path)
        evil = "</script><script>alert(1)</script>"
        environment = {"host": evil}
        runs = [
            replace(run, environment=environment, path=Path(f"{evil.replace('/', '')}{k}"))
            for k, run in enumerate(both.flat)
        ]
        html = page.render([Section(table, reason=evil) for table in tables(runs)], title=evil, finding=[evil])
        assert "<script>alert" not in html
        assert {run["name"] for run in embedded(html, "settings")["runs"]} == {run.name for run in runs}

    def test_plain_and_flat_share_a_hue_and_no_two_rows_look_alike(self, tmp_path):
        run = read(made_run(tmp_path, small_config(), [0.5, 0.5]))
        recipes = [f"multimnist_{flat}{name}" for name in list(AGGREGATORS)[:10] for flat in ("", "f_")]
        runs = [one for recipe in recipes for one in many(run, recipe, 10, 2)]
        (table,) = tables(runs)
        found = looks([table])
        assert len(table.rows) == len({*found.values()}) == 40
        hues = {row.config.label.removeprefix("F-"): look.hue for row, look in found.items()}
        assert all(hues[row.config.label.removeprefix("F-")] == look.hue for row, look in found.items())
        assert all(row.flat == look.flat for row, look in found.items())

    def test_500_runs_of_200_epochs_make_a_page_that_can_be_sent(self, tmp_path):
        run = read(made_run(tmp_path, small_config(), [0.5, 0.5]))
        recipes = [f"multimnist_{flat}{name}" for name in list(AGGREGATORS)[:5] for flat in ("", "f_")]
        found = [Section(table) for table in tables([one for name in recipes for one in many(run, name, 50, 200)])]
        html = page.render(found)
        assert len(embedded(html, "settings")["runs"]) == 500
        assert len(html) < 15e6

    def test_tables_of_one_title_are_told_apart_by_their_data(self, tmp_path):
        run = read(made_run(tmp_path, small_config(), [0.5]))
        runs = [replace(run, summary={**run.summary, "fingerprints": {"test": text}}) for text in ("abc", "def")]
        html = page.render([Section(table) for table in tables(runs)])
        assert all(f"test data {text}</h2>" in html for text in ("abc", "def"))

    def test_it_knows_its_own_pages(self, html, tmp_path):
        ours, other = tmp_path / "ours.html", tmp_path / "other.html"
        ours.write_text(html)
        other.write_text("<!doctype html><title>my thesis</title>")
        assert (page.is_ours(ours), page.is_ours(other)) == (True, False)


class TestColours:
    """The colours of methods in both schemes, as the style sheet has them."""

    @pytest.fixture(params=[0, 1], ids=["light", "dark"])
    def colours(self, request):
        """The colours of one scheme in linear RGB, that of the card first."""
        style = (Path(page.__file__).parent / "style.css").read_text()
        found = re.findall(r"--(?:card|hue-\d): #(\w{6})", style)
        assert len(found) == 2 * (HUES + 1)
        half = found[(HUES + 1) * request.param :][: HUES + 1]
        values = np.array([[int(colour[k : k + 2], 16) / 255 for k in (0, 2, 4)] for colour in half])
        return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)

    def test_they_stand_out_from_the_card(self, colours):
        card, *hues = colours @ XYZ[1]
        assert [hue for hue in hues if (max(hue, card) + 0.05) / (min(hue, card) + 0.05) < 3.0] == []

    @pytest.mark.parametrize("eyes", SEEN)
    def test_they_are_told_apart(self, colours, eyes):
        seen = np.clip(colours[1:] @ np.array(SEEN[eyes]).T, 0, 1) @ XYZ.T / XYZ.sum(1)
        roots = np.where(seen > 0.008856, np.cbrt(seen), 7.787 * seen + 16 / 116)
        x, y, z = roots.T
        lab = np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)  # CIELAB: 2.3 can just be seen
        distances = np.linalg.norm(lab[:, None] - lab, axis=-1)[np.triu_indices(HUES, 1)]
        assert distances.min() > 15


class TestReading:
    def test_an_unfinished_run_is_an_error(self, tmp_path):
        path = made_run(tmp_path, small_config(), [0.5])
        (path / "summary.json").unlink()
        with pytest.raises(FileNotFoundError, match=r"summary\.json"):
            read(path)

    def test_a_config_of_another_version_is_an_error(self, tmp_path):
        path = made_run(tmp_path, small_config(), [0.5])
        (path / "config.json").write_text('{"recipe": "old"}')
        with pytest.raises(ValueError, match="of this version"):
            read(path)


def test_spread_of_one_value_is_none():
    assert spread([2.0], ".1f") == "2.0"
