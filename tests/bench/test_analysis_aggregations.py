"""How often a step calls its aggregator, against the formulas that the paper prints in table 6."""

from dataclasses import replace

import pytest

from flatmtl_bench import recipes
from flatmtl_bench.analysis.aggregations import aggregator_calls
from flatmtl_bench.recipes import AGGREGATORS, METHODS
from flatmtl_bench.recipes.config import Method

EXPECTED = {
    "individual": lambda m: 2,
    "direct": lambda m: 1,
    "second": lambda m: 3,
    "each": lambda m: m + 1,
}


@pytest.mark.parametrize("tasks", [2, 3, 5])
@pytest.mark.parametrize("combine", EXPECTED)
@pytest.mark.parametrize("name", AGGREGATORS)
def test_a_flat_step_aggregates_as_often_as_its_way_to_combine_says(name, combine, tasks):
    for perturbation in ("sam", "asam"):
        method = replace(AGGREGATORS[name], perturbation=perturbation, combine=combine)
        assert aggregator_calls(method, tasks) == EXPECTED[combine](tasks)


@pytest.mark.parametrize("tasks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", AGGREGATORS)
def test_a_plain_step_aggregates_once(name, tasks):
    assert aggregator_calls(AGGREGATORS[name], tasks) == 1


@pytest.mark.parametrize("name", [name for name in METHODS if name not in AGGREGATORS])
def test_a_loss_weighting_aggregates_no_gradients(name):
    for form in ("", "f_"):
        assert aggregator_calls(recipes.build(f"multimnist_{form}{name}").method, 3) == 0


def test_weights_of_tasks_are_no_weights_of_the_two_vectors_that_are_combined():
    method = Method("fixed", {"weights": [1.0, 2.0, 3.0]}, perturbation="sam", combine="second")
    assert aggregator_calls(method, 3) == 3


def test_there_is_a_task():
    with pytest.raises(ValueError, match="expected at least one task, got 0"):
        aggregator_calls(Method("mgda"), 0)
