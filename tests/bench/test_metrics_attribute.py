"""Attributes: loss and metrics against those of torchmetrics and of NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.classification import BinaryAccuracy, BinaryF1Score

from flatmtl_bench.metrics import Attribute

every_kind = pytest.mark.parametrize("logits", [1, 2])


def items(count, seed=0, logits=1):
    """Return outputs that say the same with one logit as with two, and targets."""
    rng = np.random.default_rng(seed)
    yes, targets = torch.from_numpy(rng.standard_normal((count, 1))), torch.from_numpy(rng.integers(0, 2, count))
    return yes if logits == 1 else torch.cat([torch.full_like(yes, 0.5), yes + 0.5], dim=1), targets


def computed(logits, *batches):
    metrics = Attribute(logits).metrics("pooled")
    for batch in batches:
        metrics.update(*batch)
    return {name: value.item() for name, value in metrics.compute().items()}


@every_kind
class TestAttribute:
    def test_the_loss_is_the_mean_log_likelihood(self, logits):
        outputs, targets = items(9, logits=logits)
        yes = 1 / (1 + np.exp(-items(9)[0][:, 0].numpy()))
        likelihoods = np.where(targets.numpy() == 1, yes, 1 - yes)
        assert Attribute(logits).loss(outputs, targets).item() == pytest.approx(-np.log(likelihoods).mean())

    def test_a_loss_of_reduced_precision_is_taken_in_float32(self, logits):
        outputs, targets = items(9, logits=logits)
        outputs = outputs.to(torch.bfloat16)
        loss = Attribute(logits).loss(outputs, targets)
        assert loss.dtype == torch.float32
        assert loss.item() == Attribute(logits).loss(outputs.float(), targets).item()

    @settings(max_examples=20)
    @given(seed=st.integers(0, 2**32 - 1), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3))
    def test_metrics_are_those_of_torchmetrics_however_cut_into_batches(self, logits, seed, sizes):
        outputs, targets = items(sum(sizes), seed, logits)
        yes = (items(sum(sizes), seed)[0][:, 0] > 0).long()
        accuracy = BinaryAccuracy()(yes, targets).item()
        want = {"error": 100 * (1 - accuracy), "accuracy": accuracy, "f1": BinaryF1Score()(yes, targets).item()}
        batches = zip(outputs.split(sizes), targets.split(sizes), strict=True)
        assert computed(logits, *batches) == pytest.approx(want, rel=1e-6, abs=1e-5)

    def test_f1_is_0_where_there_is_no_yes(self, logits):
        outputs = torch.tensor([[-1.0]] if logits == 1 else [[1.0, 0.0]])
        assert computed(logits, (outputs, torch.tensor([0]))) == {"error": 0.0, "accuracy": 1.0, "f1": 0.0}

    @pytest.mark.parametrize("label", [-1, 2])
    def test_a_label_that_is_neither_yes_nor_no_is_an_error(self, logits, label):
        """As -1 for no, which the files of CelebA have."""
        outputs, targets = items(4, logits=logits)
        targets[2] = label
        for judge in (Attribute(logits).loss, Attribute(logits).metrics("pooled").update):
            with pytest.raises(ValueError, match=f"the label {label}; expected 0 to 1"):
                judge(outputs, targets)

    def test_a_head_of_the_other_kind_is_an_error(self, logits):
        outputs, targets = items(4, logits=3 - logits)
        for judge in (Attribute(logits).loss, Attribute(logits).metrics("pooled").update):
            with pytest.raises(ValueError, match=rf"shape \(4, {3 - logits}\) .* expected \(B, {logits}\) and \(B\)"):
                judge(outputs, targets)

    def test_the_score_is_the_accuracy_and_the_error_counts_in_tables(self, logits):
        task = Attribute(logits)
        assert task.score({"accuracy": 0.75, "error": 25.0}) == 0.75
        assert task.better == {"error": "lower"}
        assert task.outputs == logits


@pytest.mark.parametrize("logits", [0, 3, True])
def test_other_numbers_of_logits_are_an_error(logits):
    with pytest.raises(ValueError, match="logits must be a whole number from 1 to 2"):
        Attribute(logits)
