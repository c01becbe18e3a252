import json
import re
from html.parser import HTMLParser
from statistics import fmean, stdev

import pytest
from plotly.offline import get_plotlyjs
from tests.bench.small import made_run, small_config

from flatmtl_bench.reports import page
from flatmtl_bench.reports.comparison import Comparison, spread
from flatmtl_bench.reports.reading import read

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


class Loads(HTMLParser):
    """Collects what a page would fetch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found += [
            (tag, name, value) for name, value in attrs if name in ("src", "href", "srcset", "data", "action")
        ]


class TestPage:
    @pytest.fixture
    def html(self, tmp_path):
        return page.render(comparison(tmp_path))

    def test_it_loads_nothing(self, html):
        loads = Loads()
        loads.feed(html)
        assert loads.found == []
        own = html.replace(get_plotlyjs(), "")
        assert len(own) < len(html) - 1_000_000  # the library is inside
        assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest", own)

    def test_its_curves_are_the_metrics(self, html):
        curves = {c["title"]: c for c in json.loads(re.search(r"const curves = (.*);", html)[1])}
        assert curves["validation accuracy"]["methods"][1]["label"] == "F-CAGrad"
        assert curves["validation accuracy"]["methods"][1]["seeds"] == [[50.0, 92.0, 91.0], [60.0, 70.0, 90.0]]
        assert curves["training loss, mean of the tasks"]["methods"][0]["seeds"][0] == [1.5, 0.75, 0.5]

    def test_it_holds_finding_table_config_and_environment(self, html, tmp_path):
        both = comparison(tmp_path / "again")
        for text in (both.finding(), *both.table()[3], "method.options.c", "packages.torch", both.flat[0].name):
            assert text in html

    def test_text_from_the_runs_is_escaped(self, html):
        assert "digits &lt;train&gt;" in html
        assert "digits <train>" not in html

    def test_it_knows_its_own_pages(self, html, tmp_path):
        ours, other = tmp_path / "ours.html", tmp_path / "other.html"
        ours.write_text(html)
        other.write_text("<!doctype html><title>my thesis</title>")
        assert (page.is_ours(ours), page.is_ours(other)) == (True, False)


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
