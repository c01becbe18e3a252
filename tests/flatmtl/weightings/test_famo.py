"""FAMO, against the formulas of its paper in plain Python."""

import math

import pytest
import torch
from torch import Tensor

from flatmtl.aggregators.context import Context
from flatmtl.aggregators.weightings import FAMO


class PlainAdam:
    """Adam with L2 decay on one number (Kingma and Ba, 2015, algorithm 1)."""

    def __init__(self, lr: float, decay: float) -> None:
        self.lr, self.decay, self.t, self.mean, self.square = lr, decay, 0, 0.0, 0.0

    def step(self, x: float, g: float) -> float:
        g += self.decay * x
        self.t += 1
        self.mean = 0.9 * self.mean + 0.1 * g
        self.square = 0.999 * self.square + 0.001 * g * g
        mean, square = self.mean / (1.0 - 0.9**self.t), self.square / (1.0 - 0.999**self.t)
        return x - self.lr * mean / (math.sqrt(square) + 1e-8)


class PlainFAMO:
    """The paper's algorithm 1 with the softmax's Jacobian written out, all sums over the tasks given."""

    def __init__(self, tasks: int, lr: float = 0.025, decay: float = 0.001) -> None:
        self.z = [0.0] * tasks
        self.adam = [PlainAdam(lr, decay) for _ in range(tasks)]

    def softmax(self, tasks: list[int]) -> dict[int, float]:
        total = sum(math.exp(self.z[j]) for j in tasks)
        return {i: math.exp(self.z[i]) / total for i in tasks}

    def weights(self, L: dict[int, float]) -> list[float]:
        p = self.softmax(list(L))
        c = 1.0 / sum(p[j] / L[j] for j in L)
        return [c * p[i] / L[i] for i in L]

    def learn(self, before: dict[int, float], after: dict[int, float]) -> None:
        both = [i for i in after if i in before]
        p = self.softmax(both)
        delta = {i: math.log(before[i]) - math.log(after[i]) for i in both}
        g = {i: sum(p[j] * ((i == j) - p[i]) * delta[j] for j in both) for i in both}
        for i in both:
            self.z[i] = self.adam[i].step(self.z[i], g[i])


def batch(step: int, tasks: list[int]) -> dict[int, float]:
    generator = torch.Generator().manual_seed(step)
    values = 0.1 + 3.0 * torch.rand(4, dtype=torch.float64, generator=generator)
    return {i: float(values[i]) for i in tasks}


def given(L: dict[int, float]) -> tuple[Tensor, Context]:
    losses = torch.tensor(list(L.values()), dtype=torch.float64)
    return losses, Context(tuple(L), losses)


def logits(famo: FAMO) -> Tensor:
    return famo.state_dict()["logits"]


def assert_same(famo: FAMO, plain: PlainFAMO) -> None:
    torch.testing.assert_close(logits(famo), torch.tensor(plain.z, dtype=torch.float64), rtol=1e-10, atol=1e-14)


def test_two_losses_by_hand():
    """At equal logits c = 1 / (0.5 / 1 + 0.5 / 3) = 1.5: it multiplies, and the weights sum to 1."""
    famo = FAMO(2)
    w = famo.weights(torch.tensor([1.0, 3.0], dtype=torch.float64))
    assert w.tolist() == pytest.approx([0.75, 0.25], rel=1e-14)
    famo.after_step(torch.tensor([0.5, 3.0], dtype=torch.float64))  # only the first fell: it gets less weight
    assert logits(famo).tolist() == pytest.approx([-0.025, 0.025], rel=1e-6)  # Adam's first step is lr long
    p = math.exp(-0.025) / (math.exp(-0.025) + math.exp(0.025))
    first = p / 0.5 / (p / 0.5 + (1.0 - p) / 3.0)
    w = famo.weights(torch.tensor([0.5, 3.0], dtype=torch.float64))
    assert w.tolist() == pytest.approx([first, 1.0 - first], rel=1e-7)


@pytest.mark.parametrize(("lr", "decay"), [(0.025, 0.001), (0.1, 0.5), (0.025, 0.0)])
@pytest.mark.parametrize("partly", [False, True], ids=["all tasks", "absent tasks"])
def test_with_losses_after_the_step_it_is_the_algorithm_of_the_paper(lr, decay, partly):
    famo, plain = FAMO(4, lr, decay), PlainFAMO(4, lr, decay)
    for step in range(12):
        tasks = [0, 1, 3] if partly and step % 3 else [0, 1, 2, 3]
        before, after = batch(step, tasks), batch(100 + step, tasks[1:] if partly and step % 4 == 2 else tasks)
        assert famo.weights(*given(before)).tolist() == pytest.approx(plain.weights(before), rel=1e-12)
        famo.after_step(*given(after))
        plain.learn(before, after)
        assert_same(famo, plain)


@pytest.mark.parametrize("partly", [False, True], ids=["all tasks", "absent tasks"])
def test_without_them_the_next_losses_stand_in(partly):
    famo, plain = FAMO(4), PlainFAMO(4)
    former: dict[int, float] = {}
    for step in range(12):
        losses = batch(step, [0, 1, 3] if partly and step % 3 else [0, 1, 2, 3])
        plain.learn(former, losses)
        assert famo.weights(*given(losses)).tolist() == pytest.approx(plain.weights(losses), rel=1e-12)
        assert_same(famo, plain)
        former = losses


def test_with_no_task_in_common_nothing_is_learnt():
    famo = FAMO(4)
    famo.weights(*given(batch(0, [0, 1])))
    famo.after_step(*given(batch(1, [2, 3])))
    famo.weights(*given(batch(2, [0, 1])))
    famo.weights(*given(batch(3, [2, 3])))
    assert logits(famo).tolist() == [0.0] * 4


def test_an_absent_task_keeps_its_logit_whatever_its_momentum():
    famo = FAMO(3)
    for step in range(3):
        famo.weights(*given(batch(step, [0, 1, 2])))
        famo.after_step(*given(batch(50 + step, [0, 1, 2])))
    before = logits(famo)
    for step in range(3):
        famo.weights(*given(batch(step, [0, 2])))
        famo.after_step(*given(batch(70 + step, [0, 2])))
    assert (logits(famo) == before).tolist() == [False, True, False]


def test_after_step_learns_once():
    famo = FAMO(2)
    famo.after_step(torch.tensor([1.0, 2.0]))  # there were no weights yet
    assert logits(famo).tolist() == [0.0, 0.0]
    famo.weights(torch.tensor([1.0, 2.0]))
    famo.after_step(torch.tensor([0.5, 2.0]))
    once = logits(famo)
    famo.after_step(torch.tensor([0.1, 2.0]))
    famo.weights(torch.tensor([0.1, 9.0]))
    assert torch.equal(logits(famo), once)


def test_the_scale_of_the_losses_changes_no_logit():
    famo, scaled = FAMO(2), FAMO(2)
    for step in range(5):
        L = torch.tensor(list(batch(step, [0, 1]).values()), dtype=torch.float64)
        a = torch.tensor([1e-12, 1e9], dtype=torch.float64)
        famo.weights(L)
        scaled.weights(a * L)
    torch.testing.assert_close(logits(scaled), logits(famo), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("seed", range(5))
def test_weights_sum_to_one(seed):
    famo = FAMO(4)
    for step in range(5):
        assert float(famo.weights(*given(batch(10 * seed + step, [0, 1, 2, 3]))).sum()) == pytest.approx(1.0)


def test_the_task_that_falls_less_gets_more_weight():
    """Where relative rates are proportional to the share of a task, the rates become equal."""
    famo, log = FAMO(2, lr=0.05, decay=0.0), torch.zeros(2, dtype=torch.float64)
    speed = torch.tensor([1.0, 10.0], dtype=torch.float64)
    for _ in range(400):
        p = famo.weights(log.exp()) * log.exp()
        log = log - 0.01 * speed * p / p.sum()
        famo.after_step(log.exp())
    p = logits(famo).softmax(dim=0)
    torch.testing.assert_close(p * speed, (p * speed).flip(0), rtol=0.1, atol=0.0)


def test_the_logits_are_its_own():
    assert list(FAMO(2).parameters()) == []
    assert FAMO.learns_from_step


def test_a_loss_of_zero_after_the_step_is_passed_over():
    """Where the optimizer has stepped an error would come too late."""
    famo, other = FAMO(3), FAMO(3)
    for f in (famo, other):
        f.weights(torch.ones(3))
    famo.after_step(torch.tensor([0.9, 0.0, 0.5]))
    other.after_step(torch.tensor([0.9, 0.5]), Context((0, 2), torch.ones(2)))
    torch.testing.assert_close(famo.weights(torch.ones(3)), other.weights(torch.ones(3)), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_losses_after_the_step_are_checked(bad):
    famo = FAMO(2)
    famo.weights(torch.ones(2))
    with pytest.raises(ValueError, match=r"rows \[1\] \(from 0\) are (not finite|negative)"):
        famo.after_step(torch.tensor([1.0, bad]))


@pytest.mark.parametrize("option", ["lr", "decay"])
@pytest.mark.parametrize("value", [-0.1, math.inf, math.nan])
def test_rates_must_not_be_negative(option, value):
    with pytest.raises(ValueError, match=rf"{option} must be finite and not negative, got"):
        FAMO(2, **{option: value})
