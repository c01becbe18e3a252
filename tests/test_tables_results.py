"""The committed tables that were made again: what they say follows from their own numbers and from the paper's."""

import json
from pathlib import Path

import pytest
from benchmarks import tables
from scipy.stats import ttest_rel

from flatmtl_bench.reports import paper
from flatmtl_bench.reproduce.tables import TABLES

PATHS = sorted(Path(tables.RESULTS).glob("table[1-9].json"))
OUTCOMES = [outcome for path in PATHS for outcome in json.loads(path.read_text())]


def names(outcome):
    return f"table{outcome['table']}-{outcome['data']}"


def by_seed(outcome, method, metric):
    """Return seed -> value of a cell."""
    (cell,) = (c for c in outcome["cells"] if (c["method"], c["metric"]) == (method, metric))
    return dict(zip(cell["ours"]["seeds"], cell["ours"]["values"], strict=True))


def test_there_are_some():
    assert OUTCOMES


@pytest.mark.parametrize("outcome", OUTCOMES, ids=names)
class TestOutcome:
    def test_the_papers_numbers_are_those_that_are_printed(self, outcome):
        table = TABLES[f"table{outcome['table']}"]
        rows = {row.label: row for row in table.rows}
        count = 0
        for cell in outcome["cells"]:
            row = rows[cell["method"]]
            printed = (
                {} if row.beside else paper.printed(table.number, outcome["paper_data"], row.printed, flat=row.flat)
            )
            found = [number.mean for number in printed.values()]
            assert (cell["paper"] is None) or cell["paper"]["mean"] in found
            count += cell["paper"] is not None
        assert count > 0

    def test_gains_and_their_intervals_follow_from_the_seeds(self, outcome):
        assert outcome["gains"]
        for gain in outcome["gains"]:
            flat, plain = (by_seed(outcome, gain[form], gain["metric"]) for form in ("flat", "plain"))
            seeds = sorted({*flat} & {*plain})
            first, second = ([values[seed] for seed in seeds] for values in (flat, plain))
            low, high = ttest_rel(first, second).confidence_interval(0.95)
            assert (gain["ours"]["low"], gain["ours"]["high"]) == pytest.approx((low, high))
            better = [a > b if gain["better"] == "higher" else a < b for a, b in zip(first, second, strict=True)]
            assert (gain["ours"]["wins"], gain["ours"]["count"]) == (sum(better), len(seeds))

    def test_verdicts_are_the_sides_of_their_intervals(self, outcome):
        for claim in outcome["claims"]:
            if claim["found"] is None:
                assert claim["verdict"] == "not measured"
                continue
            low, high = claim["found"]["low"], claim["found"]["high"]
            one_side = low > 0 or high < 0
            assert (claim["verdict"] in ("yes", "no")) == one_side
            if one_side:
                assert (claim["found"]["wins"] > claim["found"]["count"] / 2) == (claim["verdict"] == "yes")


def test_commands_name_no_folder_of_a_machine():
    words = tables.command(tables.Options(("table1",), "/some/runs", "/some/pictures"), "table1", ["--seeds", "2"])
    assert tables.shown(words) == [
        *("flatmtl", "reproduce", "table1", "--scale", "small", "--json", "--threads", "1", "--device", "cpu"),
        *("--out", "FOLDER", "--seeds", "2", "--root", "FOLDER"),
    ]
    assert "FOLDER" in tables.shown(["reproduce", "table1", "--root=/home/me/x"])
    assert not [path for path in PATHS if "/work" in path.read_text() or "/tmp" in path.read_text()]


class TestMerged:
    """A file keeps what it has of data sets that a command leaves out."""

    def test_what_was_made_replaces_what_was_there_of_the_same_data_only(self):
        before = [{"paper_data": "MultiMNIST", "made": 1}, {"paper_data": "MultiFashion+MNIST", "made": 1}]
        made = [{"paper_data": "MultiMNIST", "made": 2}]
        assert tables.merged(before, made) == [*made, before[1]]

    def test_the_order_is_that_of_the_paper(self):
        names = ["MultiFashion", "MultiMNIST", "MultiFashion+MNIST"]
        outcomes = [{"paper_data": name} for name in names]
        assert tables.merged(outcomes[2:], outcomes[1::-1]) == outcomes

    def test_each_outcome_says_what_made_it(self):
        assert all({"command", "environment"} <= outcome.keys() for outcome in OUTCOMES)


def outcome(data="MultiMNIST", **seeds):
    """Return what a file has of a data set: of each method its seeds."""
    cells = [{"method": method, "ours": {"seeds": numbers}} for method, numbers in seeds.items()]
    return {"paper_data": data, "cells": [*cells, {"method": "quoted", "ours": None}]}


class TestKept:
    """Nothing that is there is lost without being asked for."""

    @pytest.fixture
    def make(self, tmp_path, monkeypatch):
        """Return what makes table 8 of given outcomes; its file holds two seeds of a method."""
        path = tmp_path / "table8.json"
        path.write_text(json.dumps([outcome(ERM=[0, 1])]))

        def make(*outcomes, flags=(), **options):
            monkeypatch.setattr(tables, "run", lambda _: json.dumps(outcomes))
            tables.main(tables.Options(("table8",), out=tmp_path, **options), flags)
            return json.loads(path.read_text())

        make.path = path
        return make

    @pytest.mark.parametrize("fewer", [outcome(ERM=[0]), outcome(Ours=[0, 1]), outcome()])
    def test_fewer_seeds_or_methods_are_not_written(self, make, fewer):
        before = make.path.read_text()
        with pytest.raises(SystemExit, match=r"would lose ERM with seed .* on MultiMNIST.*--overwrite"):
            make(fewer)
        assert make.path.read_text() == before

    def test_they_are_if_asked_for(self, make):
        assert make(outcome(ERM=[0]), overwrite=True)[0]["cells"][0]["ours"]["seeds"] == [0]

    def test_as_many_more_and_other_data_are_written(self, make):
        assert len(make(outcome(ERM=[0, 1], Ours=[0]))[0]["cells"]) == 3
        assert [each["paper_data"] for each in make(outcome("MultiFashion", ERM=[0]))] == ["MultiFashion", "MultiMNIST"]

    @pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"paper_data": "mine"}]'])
    def test_a_file_of_something_else_stops_before_anything_is_trained(self, make, monkeypatch, text):
        make.path.write_text(text)
        with pytest.raises(SystemExit, match="holds no list of tables"):
            make()
        assert make.path.read_text() == text

    @pytest.mark.parametrize("flag", ["--dry-run", "--dry_run", "--scale=full", "--scale", "--format", "--protocol"])
    def test_flags_that_make_something_else_are_refused(self, make, flag):
        with pytest.raises(SystemExit, match=f"{flag} is not for this script"):
            make(outcome(ERM=[0, 1]), flags=[flag])
