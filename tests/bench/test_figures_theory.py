"""The figures of spectrum, bound and decomposition, from finished runs to files."""

import json
import math
from functools import cache

import pytest
from tests.bench.small import fit, small_config

from flatmtl_bench import cli
from flatmtl_bench.analysis.bound import penalty
from flatmtl_bench.analysis.decomposition import Comparison
from flatmtl_bench.figures import FIGURES
from flatmtl_bench.figures.decomposition import shares

TASKS = ["left", "right"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of a plain run, of which the last epoch is left alone, and a flat one with every epoch."""
    out = tmp_path_factory.mktemp("runs")
    for recipe, keep_every in (("multimnist_cagrad", None), ("multimnist_f_cagrad", 1)):
        fit(out, small_config(recipe), keep_every=keep_every)
    return out


@pytest.fixture(scope="module")
def figure(runs, tmp_path_factory):
    """Return the records of a figure; the same command is given once."""

    @cache
    def make(name, *words):
        out = tmp_path_factory.mktemp(name)
        assert cli.main(["figure", name, str(runs), "--out", str(out), *words]) == 0
        contents = [(out / f"{name}.{ending}").read_bytes()[:4] for ending in ("png", "pdf")]
        assert contents == [b"\x89PNG", b"%PDF"]
        return json.loads((out / f"{name}.json").read_text())["records"]

    return make


def drawn(name, records):
    """Return the axes of the picture of some records."""
    return FIGURES[name]().draw(records).axes


def test_the_spectrum_is_of_each_task_and_method(figure):
    records = figure("spectrum", "--eigenvalues", "2", "--draws", "2", "--samples", "4")
    assert [(r["method"], r["task"]) for r in records] == [(m, t) for m in ("CAGrad", "F-CAGrad") for t in TASKS]
    for record in records:
        first, second = record["eigenvalues"]
        assert first > second
        assert first > 0
        assert record["trace_error"] > 0
        assert record["size"] == 30_890
    assert len(drawn("spectrum", records)) == 3
    assert drawn("spectrum", records)[0].get_lines()[0].get_ydata().tolist() == records[0]["eigenvalues"]


def test_the_bound_is_told_term_by_term_in_both_forms(figure):
    records = figure("bound", "--draws", "2", "--samples", "32", "--limit", "3.0")
    assert len(records) == 2 * 2 * 2
    for record in records:
        assert record["total"] == pytest.approx(math.fsum(record["terms"].values()))
        assert record["vacuous"] is (record["total"] >= 3.0)
        assert record["largest_loss"] == "lower bound, by ascent"
        assert record["assumption"] in ("holds", "fails", "undecided")
        expected = penalty(record["form"], 32, 31_400, record["norm"], record["sigma"], 3.0, 0.05, 2)
        assert {name: record["terms"][name] for name in expected} == pytest.approx(expected)
    words = [text.get_text() for axis in drawn("bound", records) for text in axis.texts]
    assert words.count("vacuous") == 2
    assert words.count("L") == 2


def test_a_bound_that_says_something_is_not_called_vacuous(figure):
    records = figure("bound", "--draws", "2", "--samples", "32", "--limit", "3.0")
    tight = [{**record, "total": 2.9 if record["form"] == "printed" else 3.0} for record in records]
    words = [text.get_text() for axis in drawn("bound", tight) for text in axis.texts]
    assert words.count("vacuous:\nCAGrad, corrected\nF-CAGrad, corrected") == 2
    tight = [{**record, "total": 2.9} for record in records]
    assert not any("vacuous" in text.get_text() for axis in drawn("bound", tight) for text in axis.texts)


def test_shares_of_premise_and_conclusion_are_told_at_each_epoch_that_there_is(figure):
    records = figure("decomposition", "--batches", "2")
    assert [(r["method"], r["epoch"]) for r in records if r["flat"]] == [("F-CAGrad", 1), ("F-CAGrad", 2)]
    assert len([r for r in records if not r["flat"]]) == 1
    for record in records:
        assert record["batches"] == 2
        assert record["premise"] == record["batches_with_premise"] / 2
        assert 0.0 <= record["conclusion"] <= 1.0
        assert list(record["tasks"]) == TASKS
        assert all(task["direct"] < 0.0 for task in record["tasks"].values())
    assert len(drawn("decomposition", records)) == 3


def comparison(premise, holds):
    """Return one whose premise holds or not, and for which of two tasks the conclusion does."""
    products = (-1.0, 0.0) if premise else (-1.0, 1.0)
    changes = (1.0, 2.0)
    return Comparison(("a", "b"), products, products, changes, changes, changes, changes, holds, (True, True))


def test_shares_count_mini_batches():
    found = shares(
        [comparison(True, (True, True)), comparison(True, (True, False)), comparison(False, (False, False))] * 2
    )
    assert (found["batches"], found["batches_with_premise"]) == (6, 4)
    assert found["premise"] == pytest.approx(2 / 3)
    assert found["conclusion"] == pytest.approx(1 / 3)
    assert found["conclusion_where_premise"] == 0.5
    assert found["conclusion_predicted_where_premise"] == 1.0
    assert found["tasks"]["a"]["conclusion"] == pytest.approx(2 / 3)
    assert found["tasks"]["b"]["conclusion_where_premise"] == 0.5
    assert found["tasks"]["b"]["direct"] == 2.0


def test_a_share_of_no_mini_batch_is_none():
    found = shares([comparison(False, (True, True))])
    assert (found["premise"], found["conclusion_where_premise"]) == (0.0, None)
    assert found["tasks"]["a"]["conclusion_where_premise"] is None
