"""State of aggregators from elsewhere that are modules: put back after a step that fails, saved and loaded."""

import io
from collections import deque

import numpy as np
import pytest
import torch
from tests.flatmtl.toys import Toy, assert_same, spoilt
from torch import nn

from flatmtl import SAM, FlatMTL


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, J):
        self.mean = J.mean(0) if self.mean is None else 0.5 * self.mean + 0.5 * J.mean(0)
        return self.mean


class Averaging(nn.Module):
    """A direction that follows the mean of all steps; what it holds is not there before the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.calls = 0
        self.history = np.zeros(2)
        self.solver = object()  # machinery, made once
        self.recent = deque([0.0], maxlen=2)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, J):
        self.calls += 1
        self.history[self.calls % 2] += 1.0
        self.recent.append(float(torch.rand((), generator=self.generator)))
        self.last = float(J.norm())  # not there at first
        return self.scale.detach() * self.inner(J)


def contents(aggregator: Averaging) -> list:
    mean = aggregator.inner.mean
    values = [aggregator.calls, aggregator.history.tolist(), hasattr(aggregator, "last"), list(aggregator.recent)]
    values += [aggregator.generator.get_state().tolist(), aggregator.solver]
    return [*values, None if mean is None else mean.tolist(), aggregator.scale.item()]


def step(toy: Toy, mtl: FlatMTL, closure=None):
    toy.zero_grad()
    result = mtl.backward(closure or toy.closure, toy.split())
    return result, toy.gradients()


@pytest.mark.parametrize("steps_before", [0, 2])
class TestSnapshot:
    def test_a_step_that_fails_after_the_aggregation_leaves_it_as_it_was(self, steps_before):
        toy, aggregator = Toy(), Averaging()
        mtl = FlatMTL(aggregator, SAM(0.1))
        for _ in range(steps_before):
            step(toy, mtl)
        before, inner, scale = contents(aggregator), aggregator.inner, aggregator.scale
        with pytest.raises(FloatingPointError, match="'right'"):
            step(toy, mtl, spoilt(toy, "right", torch.nan, calls=(3,)))
        assert contents(aggregator) == before
        assert aggregator.inner is inner
        assert aggregator.scale is scale

    def test_a_step_that_is_skipped_too(self, steps_before):
        toy, aggregator = Toy(), Averaging()
        mtl = FlatMTL(aggregator, SAM(0.1), on_nonfinite="skip_step")
        for _ in range(steps_before):
            step(toy, mtl)
        before = contents(aggregator)
        assert step(toy, mtl, spoilt(toy, "right", torch.nan, calls=(3,)))[0].skipped
        assert contents(aggregator) == before


def through_a_file(state: dict) -> dict:
    stored = io.BytesIO()
    torch.save(state, stored)
    stored.seek(0)
    return torch.load(stored, weights_only=True)


@pytest.mark.parametrize("perturbation", [None, SAM(0.1)], ids=repr)
def test_a_fresh_one_goes_on_from_a_checkpoint(perturbation):
    toy, first, second = Toy(), FlatMTL(Averaging(), perturbation), FlatMTL(Averaging(), perturbation)
    step(toy, first)
    second.load_state_dict(through_a_file(first.state_dict()))
    assert contents(second.aggregator)[:-3] == contents(first.aggregator)[:-3]
    fresh = FlatMTL(Averaging(), perturbation)
    with torch.no_grad():
        for p in toy.parameters():
            p.mul_(1.1)
    expected = step(toy, first)[1]
    assert_same(step(toy, second)[1], expected)
    assert not torch.equal(step(toy, fresh)[1]["trunk.0.weight"], expected["trunk.0.weight"])


class Lazy(nn.Module):
    """Registers its buffer when it is first called."""

    def forward(self, J):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", J.mean(0).clone())
        self.mean = 0.5 * self.mean + 0.5 * J.mean(0)
        return self.mean.clone()


def test_a_buffer_that_is_registered_late():
    toy, mtl = Toy(), FlatMTL(Lazy(), SAM(0.1))
    with pytest.raises(FloatingPointError, match="'right'"):
        step(toy, mtl, spoilt(toy, "right", torch.nan, calls=(3,)))
    assert not hasattr(mtl.aggregator, "mean")
    step(toy, mtl)
    other = FlatMTL(Lazy(), SAM(0.1))
    other.load_state_dict(through_a_file(mtl.state_dict()))
    assert_same(step(toy, other)[1], step(toy, mtl)[1])


def test_a_state_that_cannot_be_loaded_is_none():
    class Half:
        def __call__(self, J):
            return J.mean(0)

        def state_dict(self):
            return {"what": 1}

    toy, mtl = Toy(), FlatMTL(Half(), on_nonfinite="skip_step")
    assert mtl.state_dict()["branches"] == {}
    assert step(toy, mtl, spoilt(toy, "right", torch.nan))[0].skipped


def test_one_that_made_itself_machinery_begins_anew_and_says_so():
    class WithSolver(Averaging):
        def forward(self, J):
            self.problem = object()
            return super().forward(J)

    toy, first, second = Toy(), FlatMTL(WithSolver()), FlatMTL(WithSolver())
    step(toy, first)
    with pytest.warns(UserWarning, match="the state of WithSolver cannot be put into a new one, which begins anew"):
        second.load_state_dict(through_a_file(first.state_dict()))
    assert second.aggregator.calls == 0
    step(toy, second)


def test_the_state_of_another_module_is_refused():
    mtl = FlatMTL(Averaging())
    state = mtl.state_dict()
    with pytest.raises(ValueError, match="expected what FlatMTL.state_dict"):
        mtl.load_state_dict({**state, "branches": {"loss": {}, "flat": {}}})
    del state["branches"]["loss"]["tensors"]["inner.mean"]
    with pytest.raises(ValueError, match=r"the state of Averaging has no \['inner.mean'\]. Load the state of the same"):
        mtl.load_state_dict(state)


@pytest.mark.parametrize("perturbation", [None, SAM(0.1)], ids=repr)
def test_what_an_aggregator_draws_is_drawn_once_and_not_undone(perturbation):
    """With dropout in the trunk: the passes see the same masks, and each aggregation its own numbers."""
    drawn: list[float] = []

    def drawing(J):
        drawn.append(float(torch.rand(())))
        return J.mean(0)

    toy = Toy(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5)))
    parameters, mtl = toy.split(), FlatMTL(drawing, perturbation)
    torch.manual_seed(0)
    for _ in range(3):
        mtl.backward(toy.closure, parameters)
    assert len(set(drawn)) == len(drawn) == (3 if perturbation is None else 6)
    torch.manual_seed(0)
    expected = []
    for _ in range(3):
        toy.closure(parameters.tasks)
        expected += [float(torch.rand(())) for _ in range(1 if perturbation is None else 2)]
    assert drawn == expected
