"""Dynamic weight average, by hand."""

import copy
import math

import pytest
import torch

from flatmtl.aggregators.context import Context
from flatmtl.aggregators.weightings import DWA


def weigh(dwa: DWA, values: list[float], rows: tuple[int, ...] | None = None) -> list[float]:
    losses = torch.tensor(values, dtype=torch.float64)
    return dwa.weights(losses, None if rows is None else Context(rows, losses)).tolist()


def softmax(*ratios: float, temperature: float = 2.0) -> object:
    """Return what the weights must be for these ratios."""
    e = [math.exp(r / temperature) for r in ratios]
    return pytest.approx([len(e) * x / sum(e) for x in e], rel=1e-12)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_five_epochs_by_hand(temperature):
    dwa = DWA(temperature)
    epochs = [  # means: (3, 4), (1.5, 3), (1.5, 1), (3, 2), ...
        ([[2.0, 4.0], [4.0, 4.0]], (1.0, 1.0)),
        ([[1.0, 5.0], [2.0, 1.0]], (1.0, 1.0)),
        ([[1.5, 0.5], [1.0, 1.5], [2.0, 1.0]], (0.5, 0.75)),
        ([[3.0, 2.0]], (1.0, 1.0 / 3.0)),
        ([[9.0, 9.0]], (2.0, 2.0)),
    ]
    for epoch, (batches, ratios) in enumerate(epochs, start=1):
        dwa.start_epoch(epoch, total=5)
        for batch in batches:
            assert weigh(dwa, batch) == softmax(*ratios, temperature=temperature)


def test_the_scale_of_a_loss_does_not_matter():
    plain, scaled = DWA(), DWA()
    for epoch in range(4):
        plain.start_epoch(epoch)
        scaled.start_epoch(epoch)
        L = [2.0 / (1 + epoch), 3.0 - 0.5 * epoch]
        assert weigh(scaled, [1e-12 * L[0], 1e12 * L[1]]) == pytest.approx(weigh(plain, L))


def test_the_same_epoch_again_changes_nothing():
    dwa = DWA()
    for epoch in (0, 1, 2):
        dwa.start_epoch(epoch)
        weigh(dwa, [4.0 - epoch, 1.0])
    state = dwa.state_dict()
    dwa.start_epoch(2)
    assert dwa.state_dict() == state
    assert weigh(dwa, [1.0, 1.0]) == softmax(0.75, 1.0)


def test_an_earlier_epoch_starts_a_new_history():
    dwa, fresh = DWA(), DWA()
    for epoch in (5, 6, 7):
        dwa.start_epoch(epoch)
        weigh(dwa, [8.0 - epoch, 1.0])
    dwa.start_epoch(0)
    fresh.start_epoch(0)
    assert dwa.state_dict() == fresh.state_dict()


def test_a_run_saved_between_epochs_goes_on_exactly():
    dwa = DWA()
    for epoch in range(3):
        dwa.start_epoch(epoch)
        weigh(dwa, [4.0 / (1 + epoch), 1.0])
    restored = DWA()
    restored.load_state_dict(copy.deepcopy(dwa.state_dict()))
    for either in (dwa, restored):
        either.start_epoch(3)
    assert weigh(restored, [1.0, 1.0]) == weigh(dwa, [1.0, 1.0]) == softmax(2.0 / 3.0, 1.0)


def test_without_epochs_it_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"DWA\(temperature=2.0\) has not .* Call mtl.start_epoch\(epoch\)"):
        weigh(DWA(), [1.0, 2.0])


def test_absent_tasks_are_left_out_of_the_softmax():
    dwa = DWA()
    for epoch, L in enumerate([[4.0, 4.0, 4.0], [1.0, 2.0, 3.0]]):
        dwa.start_epoch(epoch)
        weigh(dwa, L)
    dwa.start_epoch(2)
    assert weigh(dwa, [1.0, 1.0], rows=(0, 2)) == softmax(0.25, 0.75)
    assert weigh(dwa, [1.0], rows=(1,)) == [1.0]


def test_a_mean_is_over_the_steps_in_which_the_task_is_present():
    dwa = DWA()
    dwa.start_epoch(0)
    weigh(dwa, [2.0, 2.0])
    weigh(dwa, [6.0], rows=(0,))  # means 4 and 2
    dwa.start_epoch(1)
    weigh(dwa, [1.0, 1.0])
    dwa.start_epoch(2)
    assert weigh(dwa, [1.0, 1.0]) == softmax(0.25, 0.5)


def test_a_task_absent_for_an_epoch_keeps_its_ratio():
    dwa = DWA()
    epochs = [
        ([4.0, 4.0], (0, 1)),
        ([2.0, 1.0], (0, 1)),
        ([2.0], (0,)),  # the ratio of task 1 stays 1/4
        ([1.0, 3.0], (0, 1)),
        ([1.0, 1.0], (0, 1)),
    ]
    ratios = [(1.0, 1.0), (1.0, 1.0), (0.5,), (1.0, 0.25), (0.5, 3.0)]
    for epoch, ((L, rows), expected) in enumerate(zip(epochs, ratios, strict=True)):
        dwa.start_epoch(epoch)
        assert weigh(dwa, L, rows) == softmax(*expected)


def test_a_task_that_comes_late_has_ratio_one_at_first():
    dwa = DWA()
    epochs = [
        ([4.0], (1.0,)),
        ([2.0], (1.0,)),
        ([1.0, 2.0], (0.5, 1.0)),
        ([1.0, 1.5], (0.5, 1.0)),
        ([1.0, 1.0], (1.0, 0.75)),
    ]
    for epoch, (L, ratios) in enumerate(epochs):
        dwa.start_epoch(epoch)
        assert weigh(dwa, L) == softmax(*ratios)


def test_an_epoch_without_steps_changes_no_ratio():
    dwa = DWA()
    for epoch, L in enumerate([4.0, 2.0]):
        dwa.start_epoch(epoch)
        weigh(dwa, [L, 1.0])
    dwa.start_epoch(2)
    dwa.start_epoch(3)
    assert weigh(dwa, [1.0, 1.0]) == softmax(0.5, 1.0)


def test_losses_that_reach_zero_and_leave_it():
    dwa = DWA()
    means, ratios = [2.0, 1.0, 0.0, 0.0, 0.5, 1.0], [1.0, 1.0, 0.5, 0.0, 0.0, 0.5]
    for epoch, (mean, ratio) in enumerate(zip(means, ratios, strict=True)):
        dwa.start_epoch(epoch)
        assert weigh(dwa, [mean, 1.0]) == softmax(ratio, 1.0)


def test_a_refused_loss_is_not_counted():
    dwa = DWA()
    dwa.start_epoch(0)
    state = dwa.state_dict()
    with pytest.raises(ValueError, match="are negative"):
        weigh(dwa, [1.0, -1.0])
    assert dwa.state_dict() == state


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_temperature_must_be_positive(temperature):
    with pytest.raises(ValueError, match=r"temperature must be above 0 and finite, got .* use LS"):
        DWA(temperature)
