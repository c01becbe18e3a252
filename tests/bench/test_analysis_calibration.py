"""Calibration against the golden numbers, torchmetrics and SciPy, and the laws that it obeys."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy, mannwhitneyu
from tests.bench.state import state
from torch import nn
from torch.nn.functional import one_hot
from torchmetrics.functional.classification import multiclass_calibration_error
from torchmetrics.functional.regression import mean_squared_error

from flatmtl_bench.analysis.calibration import (
    CalibrationMeter,
    calibration,
    entropy_auroc,
    entropy_histogram,
    highest_entropy,
    pooled,
    predictive_entropies,
    predictive_entropy,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "metrics.json").read_text())["calibration"]
SEEDS = st.integers(0, 2**32 - 1)


def measured(probabilities, labels, bins=10, parts=1):
    meter = CalibrationMeter(bins)
    for p, y in zip(probabilities.chunk(parts), labels.chunk(parts), strict=True):
        meter.update(p, y)
    return meter.compute()


def drawn(seed, items=200, classes=5):
    """Return probabilities of every confidence, and labels that they say something about."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(items, classes, generator=generator, dtype=torch.float64)
    p = (logits * torch.rand(items, 1, generator=generator, dtype=torch.float64) * 5).softmax(dim=1)
    return p, torch.multinomial(p, 1, generator=generator).squeeze(1)


def same(found, expected):
    """Equal but for the order in which float64 numbers are summed."""
    for name in ("count", "accuracy", "confidence"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-12, atol=0, equal_nan=True)
    assert (found.ece, found.brier) == pytest.approx((expected.ece, expected.brier), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("entry", GOLDEN, ids=[entry["name"] for entry in GOLDEN])
class TestGolden:
    @pytest.fixture
    def given_(self, entry):
        return torch.tensor(entry["probabilities"], dtype=torch.float64), torch.tensor(entry["labels"])

    def test_scores(self, entry, given_):
        found = measured(*given_, bins=entry["num_bins"])
        assert (found.ece, found.brier) == pytest.approx((entry["ece"], entry["brier"]), abs=1e-9)

    def test_scores_in_single_precision(self, entry, given_):
        p, labels = given_
        found = measured(p.float(), labels, bins=entry["num_bins"])
        assert found.ece == pytest.approx(entry["ece"], abs=1e-5)
        assert found.brier == pytest.approx(entry["brier"], abs=1e-5)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_bins(self, entry, given_, dtype):
        p, labels = given_
        found = measured(p.to(dtype), labels, bins=entry["num_bins"])
        assert found.count.tolist() == [one["count"] for one in entry["bins"]]
        for name in ("accuracy", "confidence"):
            expected = [math.nan if one[name] is None else one[name] for one in entry["bins"]]
            assert getattr(found, name).tolist() == pytest.approx(expected, abs=1e-6, nan_ok=True)

    def test_entropies(self, entry, given_):
        p, _ = given_
        expected = entry["predictive_entropy_paper_with_1_over_C"]
        assert predictive_entropy(p).tolist() == pytest.approx(expected, abs=1e-9)
        assert float(predictive_entropy(p).mean()) == pytest.approx(entry["mean_predictive_entropy_paper"], abs=1e-9)


class TestOracles:
    @given(SEEDS, st.integers(1, 20))
    def test_ece_is_that_of_torchmetrics_where_no_confidence_lies_on_an_edge(self, seed, bins):
        """It computes in single precision."""
        p, labels = drawn(seed)
        expected = multiclass_calibration_error(p, labels, num_classes=5, n_bins=bins, norm="l1")
        assert measured(p, labels, bins).ece == pytest.approx(float(expected), abs=1e-6)

    @given(SEEDS)
    def test_brier_is_the_mean_squared_error_summed_over_the_classes(self, seed):
        p, labels = drawn(seed)
        expected = mean_squared_error(p.flatten(), one_hot(labels, 5).flatten().double()) * 5
        assert measured(p, labels).brier == pytest.approx(float(expected), rel=1e-9)

    @given(SEEDS, st.integers(2, 12))
    def test_entropy_is_that_of_scipy_over_the_number_of_classes(self, seed, classes):
        p, _ = drawn(seed, 20, classes)
        p[0] = one_hot(torch.tensor(0), classes)
        assert predictive_entropy(p).tolist() == pytest.approx(
            (entropy(p.numpy(), axis=1) / classes).tolist(), abs=1e-12
        )

    @given(SEEDS, st.integers(1, 40), st.integers(1, 40), st.sampled_from([3, 1000]))
    def test_auroc_is_the_statistic_of_mann_and_whitney(self, seed, inside, outside, levels):
        """With three levels most pairs are ties."""
        generator = np.random.default_rng(seed)
        x, y = (torch.tensor(generator.integers(0, levels, size) / levels) for size in (inside, outside))
        expected = mannwhitneyu(y.numpy(), x.numpy()).statistic / (inside * outside)
        assert entropy_auroc(x, y) == pytest.approx(expected, abs=1e-6)


class TestLaws:
    @given(SEEDS, st.integers(1, 200))
    def test_neither_order_nor_batches_matter(self, seed, parts):
        p, labels = drawn(seed)
        order = torch.randperm(len(p), generator=torch.Generator().manual_seed(seed))
        parts = len(p[order].chunk(parts))
        same(measured(p[order], labels[order], parts=parts), measured(p, labels))

    @given(SEEDS, st.integers(1, 5))
    def test_parts_pooled_are_the_whole(self, seed, parts):
        p, labels = drawn(seed)
        some = [measured(*part) for part in zip(p.tensor_split(parts), labels.tensor_split(parts), strict=True)]
        same(pooled(some), measured(p, labels))
        assert pooled(some).entropy.tolist() == measured(p, labels).entropy.tolist()

    @given(right=st.integers(10, 20), wrong=st.integers(0, 10))
    def test_a_constant_confidence_that_is_the_accuracy_has_no_calibration_error(self, right, wrong):
        share = right / (right + wrong)
        p = torch.tensor([[share, 1 - share]], dtype=torch.float64).expand(right + wrong, 2)
        assert measured(p, torch.tensor([0] * right + [1] * wrong)).ece == pytest.approx(0.0, abs=1e-12)

    @given(SEEDS)
    def test_scores_lie_in_their_ranges(self, seed):
        p, labels = drawn(seed)
        found = measured(p, labels)
        assert 0 <= found.brier <= 2
        assert 0 <= found.ece <= 1
        assert 0 <= float(found.entropy.min()) <= float(found.entropy.max()) <= highest_entropy(5)

    @pytest.mark.parametrize(("label", "expected"), [(0, 0.0), (1, 2.0)])
    def test_the_ends_of_the_brier_score_are_certainty_right_and_wrong(self, label, expected):
        assert measured(torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([label])).brier == expected

    def test_a_confidence_on_an_edge_lies_in_the_bin_that_ends_there(self):
        for dtype in (torch.float32, torch.float64):
            edges = torch.tensor(np.linspace(0, 1, 11)[5:], dtype=dtype)
            found = measured(torch.stack([edges, 1 - edges], dim=1), torch.zeros(6, dtype=torch.long))
            assert found.count.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]

    @given(SEEDS)
    def test_higher_entropy_on_both_sides_does_not_raise_the_auroc(self, seed):
        generator = torch.Generator().manual_seed(seed)
        inside, outside = torch.randint(0, 64, (2, 20), generator=generator).double() / 256
        assert entropy_auroc(inside + 0.5, outside + 0.5) == entropy_auroc(inside, outside)

    @given(st.integers(2, 12), st.integers(1, 30))
    def test_a_histogram_holds_every_entropy_up_to_the_highest(self, classes, bins):
        p = torch.cat([torch.full((3, classes), 1 / classes), torch.eye(classes)])
        counts = entropy_histogram(predictive_entropy(p), classes, bins)
        expected = [classes, *[0] * (bins - 2), 3] if bins > 1 else [classes + 3]
        assert counts == expected


class TestMistakes:
    @pytest.mark.parametrize(
        ("probabilities", "labels", "said"),
        [
            ([[2.0, -1.0]], [0], "expected numbers from 0 that sum to 1. Logits become probabilities by softmax"),
            ([[0.5, 0.5], [0.2, 0.2]], [0, 0], "the probabilities of item 1"),
            ([[math.nan, 0.5]], [0], "NaN means that the model failed"),
            ([[1.0]], [0], "at least two classes"),
            ([[0.5, 0.5]], [2], "the label 2; expected 0 to 1"),
            ([[0.5, 0.5]], [-100], "the label -100"),
            ([[0.5, 0.5]], [0, 1], "with a target of shape"),
        ],
    )
    def test_what_are_no_probabilities_or_labels(self, probabilities, labels, said):
        with pytest.raises(ValueError, match=said):
            CalibrationMeter().update(torch.tensor(probabilities), torch.tensor(labels))

    def test_no_items(self):
        meter = CalibrationMeter()
        meter.update(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))
        with pytest.raises(ValueError, match="no calibration of no items"):
            meter.compute()
        with pytest.raises(ValueError, match="no entropy of no items"):
            predictive_entropies(nn.Linear(1, 1), [], ["left"])

    def test_no_bins(self):
        with pytest.raises(ValueError, match="bins must be a whole number from 1"):
            CalibrationMeter(0)

    def test_parts_that_do_not_fit(self):
        p, labels = drawn(0)
        with pytest.raises(ValueError, match=r"parts of \[5, 10\] bins"):
            pooled([measured(p, labels, 10), measured(p, labels, 5)])
        with pytest.raises(ValueError, match="at least one part"):
            pooled([])

    @pytest.mark.parametrize(
        ("inside", "outside", "said"),
        [([], [0.1], "inside"), ([0.1], [], "outside"), ([0.1], [0.2, math.nan], "outside .* 1 of them not finite")],
    )
    def test_an_auroc_of_nothing(self, inside, outside, said):
        with pytest.raises(ValueError, match=said):
            entropy_auroc(torch.tensor(inside), torch.tensor(outside))


class Net(nn.Module):
    """With all that a pass could change: running statistics, dropout, modes of its own."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.heads = nn.ModuleDict({"left": nn.Linear(8, 3), "right": nn.Linear(8, 4)})

    def forward(self, x, tasks):
        z = self.trunk(x)
        return {task: self.heads[task](z) for task in tasks}


@pytest.fixture
def net():
    torch.manual_seed(0)
    model = Net()
    model.heads["right"].eval()
    model.heads["left"].weight.grad = torch.ones(3, 8)
    return model


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(1)

    def batch(size):
        labels = {t: torch.randint(c, (size,), generator=generator) for t, c in (("left", 3), ("right", 4))}
        return torch.randn(size, 5, generator=generator), labels

    return [batch(6), batch(3)]


class TestModel:
    def test_it_is_that_of_the_softmax_in_eval_mode(self, net, batches):
        found = calibration(net, batches, ["left", "right"])
        entropies = predictive_entropies(net, batches, ["left", "right"])
        net.eval()
        inputs = torch.cat([inputs for inputs, _ in batches])
        for task in ("left", "right"):
            p = net(inputs, [task])[task].detach().double().softmax(dim=1)
            labels = torch.cat([targets[task] for _, targets in batches])
            expected = measured(p, labels)
            assert found[task].count.tolist() == expected.count.tolist()
            assert (found[task].ece, found[task].brier) == pytest.approx((expected.ece, expected.brier), rel=1e-6)
            assert entropies[task].tolist() == pytest.approx(
                (entropy(p.numpy(), axis=1) / p.shape[1]).tolist(), rel=1e-6
            )

    def test_entropies_do_not_read_labels(self, net, batches):
        without = [(inputs, {}) for inputs, _ in batches]
        found, expected = (predictive_entropies(net, some, ["left"])["left"] for some in (without, batches))
        assert torch.equal(found, expected)

    @pytest.mark.parametrize("analysis", [calibration, predictive_entropies])
    def test_it_leaves_the_model_and_the_random_streams_alone(self, net, batches, analysis):

        before = state(net)
        analysis(net, batches, ["left", "right"])
        assert state(net) == before

    @pytest.mark.parametrize("analysis", [calibration, predictive_entropies])
    def test_a_model_that_failed_is_an_error(self, net, batches, analysis):
        net.heads["left"].bias.data[0] = math.nan
        with pytest.raises(ValueError, match="NaN means that the model failed"):
            analysis(net, batches, ["left"])
