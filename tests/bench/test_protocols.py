import json

import pytest

from flatmtl_bench.protocols import outcome

VALIDATION = [0.10, 0.50, 0.90, 0.90, 0.70, 0.60, 0.60, 0.60, 0.60, 0.60, 0.60, 0.60]
TEST = [0.20, 0.30, 0.40, 0.50, 0.95, 0.60, 0.60, 0.60, 0.60, 0.60, 0.60, 0.85]


@pytest.fixture
def rows(tmp_path):
    """Twelve epochs as a run folder keeps them."""
    path = tmp_path / "metrics.jsonl"
    with open(path, "w") as file:
        for epoch, (v, t) in enumerate(zip(VALIDATION, TEST, strict=True), start=1):
            row = {"epoch": epoch, "validation/score": v, "test/score": t, "test/loss/left": 10 * t}
            file.write(json.dumps(row) + "\n")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_honest_takes_the_first_epoch_that_is_best_on_validation(rows):
    test = {"score": 0.4, "loss/left": 4.0}
    assert outcome(rows, "honest") == {"protocol": "honest", "epochs": [3], "test": test, "validation": {"score": 0.9}}


def test_paper_takes_the_mean_of_the_last_ten_epochs(rows):
    result = outcome(rows, "paper")
    assert result["epochs"] == list(range(3, 13))
    assert result["test"]["score"] == pytest.approx(sum(TEST[2:]) / 10)


def test_paper_takes_all_epochs_of_a_short_run(rows):
    assert outcome(rows[:2], "paper")["test"]["score"] == 0.25


def test_official_takes_the_epoch_that_is_best_on_test(rows):
    result = outcome(rows, "official")
    assert (result["epochs"], result["test"]["score"]) == ([5], 0.95)


def test_a_metric_that_was_not_finite_has_no_mean(rows):
    rows[5]["test/loss/left"] = None
    assert outcome(rows, "paper")["test"]["loss/left"] is None
