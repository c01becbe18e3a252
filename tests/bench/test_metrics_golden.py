"""The entries of ``tests/golden/metrics.json`` on segmentation, depth, normals and Delta m."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import one_hot

from flatmtl_bench.metrics import Depth, Normals, Segmentation
from flatmtl_bench.reports.delta import delta_m

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "metrics.json").read_text())
TABLES = GOLDEN["delta_m"]["tables"]
ROWS = [(table, row["row"]) for table in TABLES for row in TABLES[table]["rows"]]
OFF = {("tab:nyu", "IMTL")}  # whose printed Delta m does not follow from its printed metrics
ARC_COSINE = 1e-5
"""Degrees that the arc cosine of a product of vectors rounded to eight digits is off by, as the entries have it."""


def entries(name):
    return pytest.mark.parametrize("entry", GOLDEN[name], ids=[entry["name"] for entry in GOLDEN[name]])


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def dense(entry):
    return [(double(batch["pred"]), double(batch["target"])) for batch in entry["batches"]]


def labelled(entry):
    """Return batches of logits that are 1 for the class predicted, and of labels, each one row of pixels."""
    batches = [(torch.tensor(batch["pred"]), torch.tensor(batch["target"])) for batch in entry["batches"]]
    logits = [one_hot(predicted.reshape(1, 1, -1), entry["num_classes"]) for predicted, _ in batches]
    return [(z.movedim(-1, 1).double(), y.reshape(1, 1, -1)) for z, (_, y) in zip(logits, batches, strict=True)]


def computed(objective, averaging, batches):
    metrics = objective.metrics(averaging)
    for batch in batches:
        metrics.update(*batch)
    return {name: value.item() for name, value in metrics.compute().items()}


@entries("segmentation")
class TestSegmentation:
    @pytest.fixture
    def task(self, entry):
        return Segmentation(tuple(map(str, range(entry["num_classes"]))))

    @pytest.mark.parametrize("averaging", ["pooled", "batches"])
    def test_scores(self, entry, task, averaging):
        batches = [(z, y.where(y < entry["num_classes"], -1)) for z, y in labelled(entry)]
        expected = {
            "miou": entry["miou_mean_over_classes_with_nonempty_union"],
            "pixel_accuracy": entry["pixel_accuracy"],
            "valid": sum(map(sum, entry["confusion_rows_target_cols_pred"])),
        }
        known = {name: value for name, value in expected.items() if value is not None}
        assert computed(task, averaging, batches) == pytest.approx(known, rel=1e-12)

    def test_confusion(self, entry, task):
        metrics = task.metrics("pooled")
        for z, y in labelled(entry):
            metrics.update(z, y.where(y < entry["num_classes"], -1))
        assert metrics.confmat.tolist() == entry["confusion_rows_target_cols_pred"]

    def test_a_label_that_is_no_class_is_an_error(self, entry, task):
        """The authors' metrics leave such pixels out, their loss does not."""
        for z, y in labelled(entry):
            y[..., 0] = 255
            for judge in (task.loss, task.metrics("pooled").update):
                with pytest.raises(ValueError, match=f"label 255; expected -1 to {entry['num_classes'] - 1}"):
                    judge(z, y)


@entries("depth")
class TestDepth:
    @pytest.mark.parametrize(
        ("averaging", "key"), [("pooled", "pooled_over_pixels"), ("batches", "mean_of_batch_means")]
    )
    def test_errors(self, entry, averaging, key):
        expected = {name: entry[f"{name}_{key}"] for name in Depth.better}
        known = {name: value for name, value in expected.items() if value is not None}
        valid = sum(batch["valid"] for batch in entry["per_batch"])
        assert computed(Depth(), averaging, dense(entry)) == pytest.approx({**known, "valid": valid}, rel=1e-12)

    def test_loss_is_the_absolute_error_of_the_batch(self, entry):
        for batch, expected in zip(dense(entry), entry["per_batch"], strict=True):
            loss = Depth().loss(*batch)
            assert (loss is None) == (expected["abs_err"] is None)
            assert loss is None or loss.item() == pytest.approx(expected["abs_err"], rel=1e-12)


@entries("normals")
class TestNormals:
    def expected(self, entry, averaging):
        """Return the means with true normals whose components sum to 0 counted: the entry's own drop them."""
        batches = [batch for batch in entry["per_batch_mask_any_component_nonzero"] if batch]
        if entry["per_batch_reference_mask_sum_nonzero"] != entry["per_batch_mask_any_component_nonzero"]:
            assert len(batches) == 1  # of which both averages are those of the batch
            return batches[0]
        return (entry["pooled_over_pixels"] if averaging == "pooled" else entry["mean_over_batches"]) or {}

    @pytest.mark.parametrize("averaging", ["pooled", "batches"])
    def test_angles(self, entry, averaging):
        values = computed(Normals(), averaging, dense(entry))
        assert values.pop("valid") == sum(int((t != 0).any(dim=1).sum()) for _, t in dense(entry))
        assert values == pytest.approx(self.expected(entry, averaging), rel=1e-6, abs=ARC_COSINE)


@pytest.mark.parametrize("entry", GOLDEN["delta_m"]["toy"])
def test_delta_m(entry):
    better = {str(k): "higher" if higher else "lower" for k, higher in enumerate(entry["higher_is_better"])}
    values, baseline = (dict(zip(better, entry[key], strict=True)) for key in ("M", "S"))
    assert delta_m(values, baseline, better) == pytest.approx(
        entry["delta_m_table_sign_lower_is_better"], rel=1e-12, abs=1e-12
    )


class TestDeltaMOfThePaper:
    @pytest.fixture(params=ROWS, ids=" ".join)
    def printed(self, request):
        """A row of the paper's tables, and Delta m of the metrics printed in it."""
        table, name = request.param
        row = next(row for row in TABLES[table]["rows"] if row["row"] == name)
        directions = ("higher" if higher else "lower" for higher in TABLES[table]["higher_is_better"])
        better = {str(k): direction for k, direction in enumerate(directions)}
        values, baseline = (
            dict(zip(better, numbers, strict=True)) for numbers in (row["metrics"], TABLES[table]["stl"])
        )
        return request.param, row, delta_m(values, baseline, better)

    def test_recomputed(self, printed):
        _, row, value = printed
        assert value == pytest.approx(row["recomputed"], rel=1e-9)

    def test_printed_follows_but_for_rounding(self, printed):
        name, row, value = printed
        low, high = row["interval_allowed_by_rounding"]
        assert low <= value <= high
        assert (low <= row["printed"] + 0.005 and row["printed"] - 0.005 <= high) == (name not in OFF)
