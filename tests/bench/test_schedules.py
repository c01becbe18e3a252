"""Learning rates against closed forms, with warm-up and without, and over an interruption."""

import io
import math

import pytest
import torch

from flatmtl_bench import schedules
from flatmtl_bench.recipes.config import Schedule

STEPS, EPOCHS = 4, 5
TOTAL = STEPS * EPOCHS
CLOSED_FORMS = {
    "constant": lambda _step, _total: 1.0,
    "cosine": lambda step, total: (1 + math.cos(math.pi * step / total)) / 2,
    "linear": lambda step, total: 1 - step / total,
    "step": lambda step, _total: 0.5 ** (step // (2 * STEPS)),
}


def optimizer_and_schedule(name, warmup=0):
    parameters = [torch.nn.Parameter(torch.zeros(())) for _ in range(2)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=2.0)
    made = Schedule(name, warmup_steps=warmup, every=2, factor=0.5)
    return optimizer, schedules.build(made, optimizer, steps=STEPS, epochs=EPOCHS)


def rates(optimizer, schedule, count):
    """Return the learning rates that so many steps are made with."""
    found = []
    for _ in range(count):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return found


def expected(name, warmup):
    rise = [(step + 1) / (warmup + 1) for step in range(warmup)]
    factors = rise + [CLOSED_FORMS[name](step, TOTAL - warmup) for step in range(TOTAL - warmup)]
    return [[2.0 * factor, 0.5 * factor] for factor in factors]


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("name", CLOSED_FORMS)
class TestEverySchedule:
    def test_it_follows_its_closed_form_in_every_group(self, name, warmup):
        found = torch.tensor(rates(*optimizer_and_schedule(name, warmup), TOTAL), dtype=torch.float64)
        torch.testing.assert_close(found, torch.tensor(expected(name, warmup), dtype=torch.float64), atol=1e-12, rtol=0)

    def test_it_goes_on_from_its_state_bit_for_bit(self, name, warmup):
        whole = rates(*optimizer_and_schedule(name, warmup), TOTAL)
        for done in (1, warmup + 1, TOTAL - 1):
            optimizer, schedule = optimizer_and_schedule(name, warmup)
            rates(optimizer, schedule, done)
            file = io.BytesIO()
            torch.save((optimizer.state_dict(), schedule.state_dict()), file)
            file.seek(0)
            states = torch.load(file, weights_only=True)
            optimizer, schedule = optimizer_and_schedule(name, warmup)
            optimizer.load_state_dict(states[0])
            schedule.load_state_dict(states[1])
            assert rates(optimizer, schedule, TOTAL - done) == whole[done:]


def test_a_constant_rate_is_untouched_bit_for_bit():
    assert rates(*optimizer_and_schedule("constant"), TOTAL) == [[2.0, 0.5]] * TOTAL


def test_a_warm_up_as_long_as_the_run_is_refused():
    with pytest.raises(ValueError, match=r"warm-up takes 20 steps, and the whole run has 20 \(5 epochs of 4\)"):
        optimizer_and_schedule("cosine", warmup=TOTAL)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"warmup_steps": -1}, "schedule.warmup_steps must be at least 0, got -1"),
        ({"every": 0}, "schedule.every must be at least 1, got 0"),
        ({"factor": 0.0}, "schedule.factor must be above 0 and at most 1, got 0.0"),
        ({"factor": math.nan}, "schedule.factor must be above 0 and at most 1, got nan"),
        ({"factor": 2.0}, "schedule.factor must be above 0 and at most 1, got 2.0"),
    ],
)
def test_values_that_make_no_schedule_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Schedule("step", **values)
