"""The benchmark scripts, by a glance at each: what they write is what the docs read."""

import json
import math
import platform
import time
from dataclasses import replace

import pytest
import torch

pytest.importorskip("torchjd")
pytest.importorskip("scipy")
from benchmarks import aggregators, flatness, loaders, report, scenes, step
from docs import generate
from tests.bench.small import made_result

from flatmtl_bench import data, recipes
from flatmtl_bench.recipes.config import Data
from flatmtl_bench.reports.reading import find

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


@pytest.fixture(scope="module")
def steps():
    return step.run(step.Options(cases=("mlp_m2",), processes=1, rounds=3, memory_steps=4))


def small(case: str) -> step.Problem:
    return replace(step.CASES[case], batch=2).problem("cpu")


def asked(problem: step.Problem, run: step.Step) -> list[list[str]]:
    """Return which losses a step asks for, pass by pass."""
    found, closure = [], problem.closure
    problem.closure = lambda tasks: found.append(list(tasks)) or closure(tasks)
    run(problem)
    return found


class TestStep:
    def test_every_step_is_timed_beside_its_floor(self, steps):
        (case,) = steps["cases"]
        assert [(r["by"], r["kind"]) for r in case["times"]] == [(c.by, c.kind) for c in step.CONTENDERS]
        for record in case["times"]:
            assert len(record["pairs"]) == 3
            assert all(0.0 < seconds < 10.0 for pair in record["pairs"] for seconds in pair)
            ratios = torch.tensor([own / bare for bare, own in record["pairs"]], dtype=torch.float64)
            expected = torch.quantile(ratios, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
            low, high = record["quartiles"]
            assert [low, record["ratio"], high] == pytest.approx(expected)

    @pytest.mark.parametrize("swapped", [False, True])
    def test_a_pair_names_the_floor_first_whichever_ran_first(self, swapped):
        order = []
        floor, own = (lambda _: order.append("floor") or time.sleep(0.05)), (lambda _: order.append("step"))
        bare, seconds = step.timed_pair(floor, own, small("mlp_m2"), step.Options(), swapped=swapped)
        assert order == (["step", "floor"] if swapped else ["floor", "step"])
        assert bare > seconds

    @pytest.mark.parametrize("case", step.CASES)
    def test_every_case_has_a_loss_for_each_task(self, case):
        problem = small(case)
        losses = problem.closure(problem.tasks)
        assert len(losses) == step.CASES[case].tasks
        assert all(loss.isfinite() for loss in losses.values())

    @pytest.mark.parametrize("case", ["lenet", "transformer", "mlp_m10"])
    def test_the_floor_does_the_passes_of_our_step_and_nothing_else(self, case):
        for contender in step.CONTENDERS[:3]:
            floor, problem = step.FLOORS[contender.kind], small(case)
            before = {name: p.clone() for name, p in problem.model.named_parameters()}
            passes = asked(problem, floor)
            assert all(p.grad is None and p.equal(before[name]) for name, p in problem.model.named_parameters())
            assert passes == asked(small(case), contender.make())

    def test_everybody_does_the_same_step(self):
        found: dict[str, list] = {"plain": [], "flat": []}
        for contender in step.CONTENDERS:
            if contender.by != "flatmtl, ASAM":
                problem = small("mlp_m2")
                problem.model.double()
                problem.x = problem.x.double()
                contender.make()(problem)
                found[contender.kind].append([p.grad for p in problem.model.parameters()])
        assert [len(same) for same in found.values()] == [3, 2]
        for first, *others in found.values():
            for other in others:
                torch.testing.assert_close(other, first, rtol=1e-9, atol=0.0)

    def test_a_peak_counts_what_is_kept_and_what_was_there_for_a_moment(self):
        kept = []
        MB = 2**20

        def greedy(problem: step.Problem) -> None:
            kept.append(torch.empty(MB, dtype=torch.uint8))
            del problem
            torch.empty(2 * MB, dtype=torch.uint8)

        assert step.peaks(greedy, small("mlp_m2"), step.Options(memory_steps=3)) == [3 * MB, 4 * MB, 5 * MB]

    def test_memory_does_not_grow_and_the_flat_step_keeps_to_its_goal(self, steps):
        (case,) = steps["cases"]
        floors, (plain, *flat), _ = case["memory"][:2], case["memory"][2:5], case["memory"][5:]
        goal = steps["memory_goal"]
        most = goal["tolerance"] * (max(plain["peaks"]) + goal["shared_parameters"] * case["shared_bytes"])
        for record in (*floors, plain, *flat):
            assert len(record["peaks"]) == 4
            assert len(set(record["peaks"][1:])) == 1
        for record in flat:
            assert floors[1]["peaks"][-1] < max(record["peaks"]) <= most

    def test_a_profile_names_who_allocates_beyond_the_passes(self):
        lines = step.profiled("mlp_m2", step.Options())
        heads = [line for line in lines if "allocated beyond the passes" in line]
        assert [line.split(":")[0] for line in heads] == [f"{c.by} {c.kind}" for c in step.CONTENDERS[:3]]
        assert any("aten::" in line and "flatmtl/mtl.py" in line for line in lines)
        assert not any(line.endswith(step.PASSES) for line in lines)

    def test_an_unknown_case_is_refused_before_anything_runs(self, tmp_path):
        with pytest.raises(ValueError, match="unknown case 'lenett'. Did you mean 'lenet'"):
            step.main(step.Options(cases=("lenett",), out=tmp_path / "step.json"))

    def test_the_docs_are_made_of_it(self, steps, tmp_path, monkeypatch):
        (tmp_path / "step.json").write_text(json.dumps(steps))
        monkeypatch.setattr(generate, "RESULTS", tmp_path)
        page = tmp_path / "page.md"
        page.write_text("<!-- step:begin -->\n<!-- step:end -->\n")
        for made in (
            generate.Page(page, {"step": generate.step_block}),
            generate.Figure(tmp_path / "step.svg", "step.json", generate.draw_step),
        ):
            assert not made.is_current()
            made.write()
            assert made.is_current()
        text = page.read_text()
        assert text.count("| MLP, m = 2, batch 256 | ") == 3
        for contender in step.CONTENDERS:
            assert f"| {contender.by} |" in text

    @pytest.mark.parametrize(("goal", "says"), [(100.0, "flatmtl, SAM meets it"), (0.5, "flatmtl, SAM misses it")])
    def test_the_docs_say_which_goal_is_missed(self, steps, goal, says):
        cases = [{**case, "goal": goal} for case in steps["cases"]]
        assert says in generate.step_goals_list({**steps, "cases": cases})

    @pytest.mark.parametrize(("copies", "says"), [(2.0, "is met"), (-2.0, "is missed")])
    def test_the_docs_say_whether_memory_is_within_its_goal(self, steps, copies, says):
        goal = {**steps["memory_goal"], "shared_parameters": copies}
        assert says in generate.step_memory_sentence({**steps, "memory_goal": goal})


class TestLoaders:
    @pytest.mark.parametrize("name", ["nyuv2", "cityscapes"])
    def test_what_is_written_is_read_as_that_data_set(self, tmp_path, name):
        loaders.write_maps(tmp_path, name, (32, 64))
        items = data.build(name, "train", root=tmp_path, validation_share=0.0)
        assert (items.source, len(items), items[0][0].shape) == ("full", 48, (3, 32, 64))

    def test_faces_too(self, tmp_path):
        loaders.write_faces(tmp_path)
        assert [len(data.build("celeba", split, root=tmp_path)) for split in data.SPLITS] == [224, 16, 16]

    def test_the_time_of_training_is_divided_into_steps_and_waiting(self):
        small = Data("scenes", size=[32, 32], train_samples=4, validation_samples=1, test_samples=1)
        config = replace(recipes.build("scenes_ls"), data=small, batch_size=2, width=1 / 64, device="cpu", loggers=[])
        found = loaders.record("scenes", config, loaders.Options(workers=(0,), seconds=0.01, steps=2))
        assert found["alone"]["0"] > found["training"]["rate"] > 0
        assert 0 < found["training"]["waiting"] < 1


class TestReport:
    def test_every_format_is_timed_on_folders_that_are_runs(self, tmp_path):
        options = report.Options(seeds=1, epochs=2, rounds=1, out=tmp_path / "report.json")
        report.main(options)
        found = json.loads(options.out.read_text())
        assert (found["runs"], found["environment"]["python"]) == (50, platform.python_version())
        assert [record["format"] for record in found["records"]] == list(report.FORMATS)
        for record in found["records"]:
            assert 0.0 < record["seconds"] < 60.0
            assert record["mebibytes"] > 10.0
        for config in report.configs(options):
            report.write_run(tmp_path / "runs", config)
        assert len(find([tmp_path / "runs"]).runs) == 50
        assert not find([tmp_path / "runs"]).others

    def test_a_report_that_fails_is_no_measurement(self, tmp_path):
        with pytest.raises(SystemExit, match="has failed"):
            report.timed((), tmp_path)


def test_the_result_of_scenes_is_a_report(tmp_path, monkeypatch):
    monkeypatch.setattr(scenes, "METHODS", ("ls",))
    options = scenes.Options(runs=str(tmp_path), seeds=1)
    better = {"miou/segmentation": "higher", "abs_err/depth": "lower", "mean/normals": "lower"}
    for name in ("scenes_ls", "scenes_f_ls"):
        made_result(tmp_path, replace(recipes.build(name), source="scenes"), dict.fromkeys(better, 0.5), better)
    for path in tmp_path.iterdir():
        (path / "env.json").write_text(json.dumps({"python": "3.11.0"}))
    found = scenes.result(options)
    assert [row["flat_settings"]["rho"] for row in found["rows"]] == [0.0, 0.05]
    assert (found["width"], found["environment"]["python"]) == (options.width, "3.11.0")


class TestFlatness:
    """What is taken from the records of figures, by records made up."""

    def records(self, *fields, **common):
        whose = [("CAGrad", 0), ("CAGrad", 1), ("F-CAGrad", 0), ("F-CAGrad", 1)]
        return [
            {"data": "digits", "method": method, "seed": seed, **common, **of_run}
            for method, seed in reversed(whose)
            for of_run in fields
        ]

    def test_numbers_are_those_of_the_runs_in_the_order_of_the_seeds(self):
        found = flatness.per_run(self.records({"value": 1.0}), lambda some: float(some[0]["seed"]))
        assert found == {"digits": {"CAGrad": [0.0, 1.0], "F-CAGrad": [0.0, 1.0]}}

    def test_the_last_epoch_counts_and_the_tasks_the_same(self):
        fields = [{"epoch": e, "task": t, "value": 10.0 * e + k} for e in (5, 10) for k, t in enumerate(("a", "b"))]
        assert flatness.at_last(self.records(*fields), "value")["digits"]["CAGrad"] == [100.5, 100.5]
        assert flatness.at_first(self.records(*fields), "value")["digits"]["CAGrad"] == [50.5, 50.5]

    def test_what_a_model_withstands_ends_with_the_first_radius_that_costs_more_than_five_points(self):
        accuracies = {0: 90.0, 1: 88.0, 2: 86.0, 3: 84.9, 4: 89.0}
        fields = [{"split": "test", "radius": r, "value": a + d} for r, a in accuracies.items() for d in (-1.0, 1.0)]
        fields += [{"split": "train", "radius": r, "value": 0.0} for r in accuracies]
        assert flatness.withstood(self.records(*fields)) == {"digits": {"CAGrad": [2, 2], "F-CAGrad": [2, 2]}}

    def test_the_flat_form_is_ahead_from_the_epoch_after_the_last_at_which_it_was_not(self):
        lead = {1: 1.0, 2: -1.0, 3: 1.0, 4: 1.0}
        common = {"split": "test", "metric": "accuracy", "task": "left"}
        found = [
            {**record, **common, "epoch": e, "value": 90.0 + d * (record["method"] == "F-CAGrad")}
            for record in self.records({})
            for e, d in lead.items()
        ]
        train = [{**record, "split": "train"} for record in found]
        numbers = dict(flatness.of_curves([*found, *train], flatness.Options(runs="", epochs=4)))
        assert numbers["ahead in test accuracy from epoch"] == {"digits": {"F-CAGrad": [3.0]}}
        assert numbers["test accuracy, epoch 4"]["digits"]["F-CAGrad"] == [91.0, 91.0]

    def test_the_docs_are_made_of_it(self, tmp_path, monkeypatch):
        conflict = {name: {"digits": {"CAGrad": [40.0, 50.0]}} for name in ("intra_conflict", "inter_conflict")}
        seen = {"brier": {"digits": {"CAGrad": [0.2, 0.2], "F-CAGrad": [0.1, 0.3]}}}
        seen |= {f"{name}, last snapshot": numbers for name, numbers in conflict.items()}
        result = {"options": flatness.settings(flatness.Options(runs="")), "seen": seen}
        (tmp_path / "flatness.json").write_text(json.dumps(result))
        monkeypatch.setattr(generate, "RESULTS", tmp_path)
        text = generate.flatness_block()
        assert "brier: CAGrad 0.200 ± 0.000, F-CAGrad 0.200 ± 0.141 | in part (1 of 2)" in text
        assert "| digits | CAGrad 45.0 ± 7.1 | CAGrad 45.0 ± 7.1 |" in text
