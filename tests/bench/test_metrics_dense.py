"""What holds for segmentation, depth and normals: their losses and metrics against those of ``pixel_metrics``."""

import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bench.pixels import CLASSES, HEIGHT, TASKS, VOID, WIDTH, computed, cut, one_of_three, pictures, shares
from tests.reference import pixel_metrics
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

from flatmtl_bench.metrics import Meter
from flatmtl_bench.metrics.normals import angles_between

every_task = pytest.mark.parametrize("task", TASKS)
every_average = pytest.mark.parametrize("averaging", ["pooled", "batches"])


def expected(task, outputs, targets):
    """Return loss and metrics of the reference, or None."""
    return getattr(pixel_metrics, task)(outputs.double().numpy(), targets.numpy())


def metrics_only(values):
    return {name: value for name, value in values.items() if name != "loss"}


def same(values):
    return pytest.approx(values, rel=1e-6, abs=1e-9)  # the angles of which the median is taken are kept in float32


@every_task
class TestLoss:
    def test_it_is_that_of_the_reference(self, task):
        outputs, targets = pictures(task, 3)
        loss = TASKS[task].loss(outputs, targets)
        assert loss.item() == pytest.approx(expected(task, outputs, targets)["loss"], rel=1e-12)

    def test_its_gradient_is_right(self, task):
        outputs, targets = pictures(task, 2)
        assert torch.autograd.gradcheck(lambda z: TASKS[task].loss(z, targets), outputs.requires_grad_())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_reduced_precision_is_taken_in_float32(self, task, dtype):
        outputs, targets = pictures(task, 3, dtype=torch.float32)
        outputs = outputs.to(dtype)
        loss = TASKS[task].loss(outputs, targets)
        assert loss.dtype == torch.float32
        assert loss.item() == TASKS[task].loss(outputs.float(), targets).item()
        for averaging in ("pooled", "batches"):
            assert computed(task, averaging, [(outputs, targets)]) == computed(
                task, averaging, [(outputs.float(), targets)]
            )

    def test_there_is_none_without_a_label(self, task):
        outputs, targets = pictures(task, 2)
        assert TASKS[task].loss(outputs, torch.full_like(targets, VOID[task])) is None

    def test_outputs_without_label_have_no_gradient(self, task):
        outputs, targets = pictures(task, 2)
        targets[0] = VOID[task]
        TASKS[task].loss(outputs.requires_grad_(), targets).backward()
        assert outputs.grad[0].abs().max() == 0
        assert outputs.grad[1].abs().max() > 0


@every_task
@every_average
class TestMetrics:
    @settings(max_examples=20)
    @given(
        seed=st.integers(0, 2**32 - 1),
        sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
        missing=st.sampled_from([0.0, 0.3, 0.95]),
    )
    def test_they_are_those_of_the_reference(self, task, averaging, seed, sizes, missing):
        outputs, targets = pictures(task, sum(sizes), seed, missing)
        batches = cut(outputs, targets, sizes)
        want = expected(task, outputs, targets)
        if averaging == "batches" and task != "segmentation":
            known = [values for batch in batches if (values := expected(task, *batch)) is not None]
            want = {**{name: fmean(values[name] for values in known) for name in known[0]}, "valid": want["valid"]}
        assert computed(task, averaging, batches) == same(metrics_only(want))

    def test_the_order_of_pixels_does_not_matter(self, task, averaging):
        outputs, targets = pictures(task, 2)
        order = torch.randperm(HEIGHT * WIDTH, generator=torch.Generator().manual_seed(0))
        mixed = [z.flatten(-2)[..., order].reshape(z.shape) for z in (outputs, targets)]
        assert computed(task, averaging, [mixed]) == same(computed(task, averaging, [(outputs, targets)]))

    def test_what_is_said_where_there_is_no_label_does_not_matter(self, task, averaging):
        outputs, targets = pictures(task, 2)
        void = (targets == VOID[task]).reshape(2, -1, HEIGHT, WIDTH)[:, :1]
        other = outputs.masked_fill(void, 1e30)
        assert computed(task, averaging, [(other, targets)]) == computed(task, averaging, [(outputs, targets)])

    def test_the_truth_has_the_best_values(self, task, averaging):
        outputs, targets = pictures(task, 2)
        if task == "segmentation":
            outputs = torch.nn.functional.one_hot(targets.clamp(min=0), CLASSES).movedim(-1, 1).double()
        else:
            outputs = targets * (3 if task == "normals" else 1)
        values = computed(task, averaging, [(outputs, targets)])
        best = {"higher": 1.0, "lower": 0.0}
        for name, direction in TASKS[task].better.items():
            assert values[name] == pytest.approx(best[direction], abs=2e-6)

    def test_batches_without_a_label_take_no_part(self, task, averaging):
        outputs, targets = pictures(task, 2)
        nothing = (outputs, torch.full_like(targets, VOID[task]))
        some = computed(task, averaging, [(outputs, targets)])
        assert computed(task, averaging, [nothing, (outputs, targets), nothing]) == some

    def test_without_a_label_there_is_no_number_but_how_many(self, task, averaging):
        outputs, targets = pictures(task, 2)
        targets = torch.full_like(targets, VOID[task])
        assert computed(task, averaging, [(outputs, targets)] * 2) == {"valid": 0}

    def test_after_a_reset_they_start_anew(self, task, averaging):
        metrics = TASKS[task].metrics(averaging)
        metrics.update(*pictures(task, 2, seed=1))
        metrics.reset()
        batch = pictures(task, 2, seed=2)
        metrics.update(*batch)
        assert {name: v.item() for name, v in metrics.compute().items()} == computed(task, averaging, [batch])

    def test_those_of_a_result_table_have_a_direction(self, task, averaging):
        assert {*TASKS[task].better, "valid"} == set(computed(task, averaging, [pictures(task, 2)]))

    def test_a_meter_shows_loss_metrics_and_score(self, task, averaging):
        batch = pictures(task, 2)
        meter = Meter(TASKS[task], averaging)
        meter.update(*batch)
        values = meter.compute()
        assert values.pop("score") == TASKS[task].score(values)
        assert values == same(expected(task, *batch))


@pytest.mark.parametrize("task", ["depth", "normals"])
def test_sums_over_a_large_set_lose_nothing(task):
    """In float32, a sum of 2^30 would not change by what a few pixels add."""
    few, many = (TASKS[task].metrics("pooled") for _ in range(2))
    many.totals += 2.0**30
    for metrics in (few, many):
        metrics.update(*pictures(task, 2, dtype=torch.float32))
    torch.testing.assert_close(many.totals - 2.0**30, few.totals, rtol=1e-6, atol=1e-6)


@every_task
@every_average
def test_only_the_pooled_median_keeps_anything_of_each_pixel(task, averaging):
    metrics = TASKS[task].metrics(averaging)
    sizes, counts = [], []
    for _ in range(2):
        metrics.update(*pictures(task, 3, dtype=torch.float64))
        states = [metrics.metric_state[name] for name in metrics.metric_state]
        tensors = [t for state in states for t in (state if isinstance(state, list) else [state])]
        sizes.append(sum(t.nbytes for t in tensors))
        counts.append(metrics.compute()["valid"].item())
    kept = 4 * (counts[1] - counts[0]) if (task, averaging) == ("normals", "pooled") else 0
    assert sizes[1] - sizes[0] == kept


@pytest.mark.parametrize("task", ["depth", "normals"])
def test_an_unknown_averaging_is_an_error(task):
    with pytest.raises(ValueError, match="unknown averaging 'batch'. Did you mean 'batches'?"):
        TASKS[task].metrics("batch")


@every_task
@pytest.mark.parametrize("change", ["channels", "sides", "items", "axes"])
def test_shapes_that_do_not_fit_are_an_error(task, change):
    """By broadcasting, some of them would give a number."""
    outputs, targets = pictures(task, 2)
    outputs = {
        "channels": outputs[:, :1].expand(-1, TASKS[task].outputs + 1, -1, -1),
        "sides": outputs[..., :1],
        "items": outputs[:1],
        "axes": outputs[0],
    }[change]
    given_shape = rf"\({', '.join(map(str, outputs.shape))}\)"
    for judge in (TASKS[task].loss, TASKS[task].metrics("pooled").update):
        with pytest.raises(
            ValueError, match=rf"output of shape {given_shape} .* expected \(B, {TASKS[task].outputs}, H"
        ):
            judge(outputs, targets)


@every_task
class TestScore:
    VALUES = st.floats(1e-6, 1e6)

    @given(data=st.data(), units=st.floats(1e-3, 1e3))
    def test_units_do_not_decide_which_epoch_is_better(self, task, data, units):
        names = list(TASKS[task].better)
        first, second = ({name: data.draw(self.VALUES) for name in names} for _ in range(2))
        scaled = [TASKS[task].score({**values, names[0]: values[names[0]] * units}) for values in (first, second)]
        difference = TASKS[task].score(first) - TASKS[task].score(second)
        assert scaled[0] - scaled[1] == pytest.approx(difference, abs=1e-9)

    def test_better_values_score_higher(self, task):
        values = dict.fromkeys(TASKS[task].better, 0.5)
        for name, direction in TASKS[task].better.items():
            better = {**values, name: 0.6 if direction == "higher" else 0.4}
            assert TASKS[task].score(better) > TASKS[task].score(values)

    def test_it_is_the_mean_log_ratio(self, task):
        first, second = dict.fromkeys(TASKS[task].better, 0.5), dict.fromkeys(TASKS[task].better, 0.25)
        signs = [1 if direction == "higher" else -1 for direction in TASKS[task].better.values()]
        difference = TASKS[task].score(first) - TASKS[task].score(second)
        assert difference == pytest.approx(fmean(signs) * math.log(2))

    def test_it_is_the_lowest_without_a_label(self, task):
        assert TASKS[task].score({"valid": 0.0}) == -math.inf

    def test_a_metric_that_is_missing_is_an_error(self, task):
        with pytest.raises(KeyError):
            TASKS[task].score({"valid": 1.0})


@pytest.mark.parametrize("task", ["segmentation", "normals"])
def test_the_score_is_the_lowest_where_nothing_is_right(task):
    values = {name: 0.0 if direction == "higher" else 1.0 for name, direction in TASKS[task].better.items()}
    assert TASKS[task].score(values) == -math.inf


class TestSegmentation:
    @settings(max_examples=20)
    @given(seed=st.integers(0, 2**32 - 1))
    def test_scores_are_those_of_torchmetrics(self, seed):
        outputs, targets = pictures("segmentation", 2, seed)
        targets = targets.where(targets != 3, 0)  # a class may occur as neither label nor prediction
        outputs[:, 3] = -9.0
        oracles = {
            "miou": MulticlassJaccardIndex(CLASSES, average="macro", ignore_index=-1),
            "pixel_accuracy": MulticlassAccuracy(CLASSES, average="micro", ignore_index=-1),
        }
        values = computed("segmentation", "pooled", [(outputs, targets)])
        for name, oracle in oracles.items():
            assert values[name] == pytest.approx(oracle(outputs, targets).item(), rel=1e-6)

    @pytest.mark.parametrize("label", [-2, CLASSES, 255])
    def test_a_label_that_is_no_class_is_an_error(self, label):
        outputs, targets = pictures("segmentation", 2)
        targets[1, 2, 3] = label
        for judge in (TASKS["segmentation"].loss, TASKS["segmentation"].metrics("pooled").update):
            with pytest.raises(ValueError, match=f"the label {label}; expected -1 to 3. Correct the labels"):
                judge(outputs, targets)


class TestNormals:
    ANGLES = (0.0, 1e-4, 0.01, 1.0, 45.0, 90.0, 179.0, 179.99, 179.9999, 180.0)

    @pytest.mark.parametrize("degrees", ANGLES)
    @pytest.mark.parametrize("length", [1e-30, 1.0, 1e30])
    def test_angles_are_accurate_in_float32(self, degrees, length):
        """The arc cosine of a product in float32 is off by a thousand times as much near 0 and 180."""
        rng = np.random.default_rng(0)
        first, other = rng.standard_normal((2, 1000, 3))
        second = np.cross(first, other)
        first, second = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (first, second))
        turned = np.cos(np.radians(degrees)) * first + np.sin(np.radians(degrees)) * second
        found = angles_between(torch.tensor(length * first).float(), torch.tensor(turned).float())
        assert float((found.double() - degrees).abs().max()) < 3e-5

    def test_an_output_without_direction_is_at_right_angles(self):
        _, targets = pictures("normals", 2)
        outputs = torch.zeros_like(targets, requires_grad=True)
        loss = TASKS["normals"].loss(outputs, targets)
        loss.backward()
        assert loss.item() == 1
        assert outputs.grad.isfinite().all()
        assert computed("normals", "pooled", [(outputs.detach(), targets)])["mean"] == pytest.approx(90)

    @every_average
    def test_the_length_of_outputs_does_not_matter(self, averaging):
        outputs, targets = pictures("normals", 2, dtype=torch.float32)
        scale = torch.logspace(-30, 30, HEIGHT * WIDTH).reshape(HEIGHT, WIDTH)
        assert TASKS["normals"].loss(outputs * scale, targets).item() == pytest.approx(
            TASKS["normals"].loss(outputs, targets).item(), rel=1e-6
        )
        assert computed("normals", averaging, [(outputs * scale, targets)]) == pytest.approx(
            computed("normals", averaging, [(outputs, targets)]), rel=1e-5
        )

    def test_a_true_normal_whose_components_sum_to_zero_counts(self):
        targets = torch.tensor([1.0, -1.0, 0.0]).div(math.sqrt(2)).reshape(1, 3, 1, 1)
        assert TASKS["normals"].loss(-targets, targets).item() == pytest.approx(2)
        assert computed("normals", "pooled", [(-targets, targets)])["mean"] == pytest.approx(180)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of three processes finds, of which one has batches, one few labels, and one nothing at all."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flatmtl_bench.metrics"])  # once for all three
    with ProcessPoolExecutor(3, mp_context=context) as pool:
        return list(pool.map(one_of_three, range(3), [store] * 3, timeout=300))


@every_task
@every_average
def test_all_processes_find_what_one_finds_with_their_slices_as_batches(ranks, task, averaging):
    alone = computed(task, averaging, [batch for share in shares(task) for batch in share])
    for found in ranks:
        assert found[task, averaging] == same(alone)
