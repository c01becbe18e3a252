"""The benchmark scripts, by a glance at each: what they write is what the docs read."""

import json
import math
import time

import pytest
import torch

pytest.importorskip("torchjd")
pytest.importorskip("scipy")
from benchmarks import aggregators
from docs import generate

TASKS = (2, 3)


@pytest.fixture(scope="module")
def result():
    return aggregators.run(aggregators.Options(tasks=TASKS, seeds=2, seconds=0.0))


def record(result, method: str, m: int, by: str) -> dict:
    (found,) = (r for r in result["records"] if (r["method"], r["tasks"], r["by"]) == (method, m, by))
    return found


class TestAggregators:
    def test_every_method_is_timed_against_torchjd(self, result):
        for method in aggregators.METHODS:
            for m in TASKS:
                for by in ("flatmtl", "TorchJD"):
                    found = record(result, method.name, m, by)
                    assert found["calls"] >= 2
                    assert 0.0 < found["seconds"] < 10.0

    def test_every_measure_is_a_number_for_each_matrix(self, result):
        for found in result["records"]:
            assert found["worth"].keys() == result["measures"][found["method"]].keys()
            for values in found["worth"].values():
                assert len(values) == 2
                assert all(map(math.isfinite, values))

    @pytest.mark.parametrize("by", ["flatmtl", "SciPy"])
    def test_the_measures_of_exact_weights_are_zero(self, result, by):
        for found in result["records"]:
            if found["by"] == by:
                for values in found["worth"].values():
                    assert max(values) < 1e-7

    def test_the_measures_notice_weights_that_are_wrong(self):
        J, G = aggregators.problem(3, seed=0)
        for method in aggregators.METHODS:
            right = method.solvers(3)["flatmtl"](J, G)
            wrong = -right if method.name == "UPGrad" else right.new_full((3,), 1.0 / 3.0)
            worth = method.measure(G, torch.stack([right, wrong]))
            assert worth.keys() == method.measures.keys()
            assert all(value[1] > 1e-3 for value in worth.values())

    def test_a_direction_outside_of_cagrads_ball_does_not_count(self):
        _, G = aggregators.problem(3, seed=0)
        W = G.new_tensor([[1.0, 1.0, 1.0], [3.0, 3.0, 3.0]]) / 3.0
        assert aggregators.cagrad_shortfall(G, W)["shortfall"].tolist() == [0.0, math.inf]

    def test_the_environment_names_the_peers(self, result):
        assert {"flatmtl", "torch", "torchjd", "scipy"} <= result["environment"]["packages"].keys()

    def test_the_docs_are_made_of_it(self, result, tmp_path, monkeypatch):
        (tmp_path / "aggregators.json").write_text(json.dumps(result))
        monkeypatch.setattr(generate, "RESULTS", tmp_path)
        page = tmp_path / "page.md"
        page.write_text("before\n<!-- aggregators:begin -->\n<!-- aggregators:end -->\nafter\n")
        made = [
            generate.Page(page, {"aggregators": generate.aggregators_block}),
            generate.Figure(tmp_path / "times.svg", "aggregators.json", generate.draw_aggregators),
        ]
        for thing in made:
            assert not thing.is_current()
            thing.write()
            assert thing.is_current()
        text = page.read_text()
        assert text.startswith("before\n")
        assert text.endswith("\nafter\n")
        assert "| method | m = 2 | m = 3 |" in text
        assert all(f"| {method.name} | " in text for method in aggregators.METHODS)

    def test_a_slow_solver_is_called_once(self):
        slow = {"slow": lambda J, G: time.sleep(0.02) or G[0], "fast": lambda J, G: G[0]}
        problems = [aggregators.problem(2, seed) for seed in range(3)]
        options = aggregators.Options(seconds=0.005, most_seconds=0.01)
        times, weights = aggregators.take_turns(slow, problems, options)
        assert len(times["slow"]) == 1
        assert len(times["fast"]) >= 3
        assert [set(found) for found in weights] == [{"slow", "fast"}, {"fast"}, {"fast"}]
