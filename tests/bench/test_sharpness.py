"""Sharpness against closed forms and exact maxima on quadratics, and what it must leave alone."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from tests.bench.state import state
from torch import nn

from flatmtl import TaskParameters, split_parameters
from flatmtl_bench.analysis.sharpness import sharpness

RHO = 0.3
TASKS = ("left", "right")


class Quadratic(nn.Module):
    """Task ``i`` has the loss ``(theta^T A_i theta + h_i^T B_i h_i) / 2`` with shared theta and a head h_i."""

    def __init__(self, seed=0, *, convex=True):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def hessian(size):
            root = normal(size, size)
            return root @ root.T if convex else (root + root.T) / 2

        self.theta = nn.Parameter(normal(4))
        self.heads = nn.ParameterDict({task: nn.Parameter(normal(3)) for task in TASKS})
        self.A = {task: hessian(4) for task in self.heads}
        self.B = {task: hessian(3) for task in self.heads}

    def closure(self, tasks):
        theta, h = self.theta, self.heads
        return {t: (theta @ self.A[t] @ theta + h[t] @ self.B[t] @ h[t]) / 2 for t in tasks}

    def sharpness(self, rho, **options):
        heads = {task: [head] for task, head in self.heads.items()}
        return sharpness(self, [self.closure], TaskParameters([self.theta], heads, self), rho, **options)

    def summed(self, rise, rho, rho_heads=None):
        """Return for each task what a rise in the ball of theta and one in that of its head come to."""
        own = rho if rho_heads is None else rho_heads
        with torch.no_grad():
            pairs = {t: ((self.A[t], self.theta, rho), (self.B[t], self.heads[t], own)) for t in TASKS}
            return {t: sum(float(rise(H, x, radius)) for H, x, radius in both) for t, both in pairs.items()}


def along_the_gradient(H, x, rho):
    """The rise of x^T H x / 2 along its gradient: rho |g| + rho^2 g^T H g / (2 |g|^2)."""
    g = H @ x
    return rho * g.norm() + rho**2 * (g @ H @ g) / (2 * g @ g)


def highest(H, x, rho):
    """The highest rise of x^T H x / 2 in a ball: at e with (s I - H) e = g and |e| = rho, or where the gradient is 0.

    The multiplier s is the root of the secular equation of the trust-region problem (Moré and Sorensen, 1983).
    """
    h, V = np.linalg.eigh(H.numpy())
    g = V.T @ (H @ x).numpy()
    if h[-1] < 0 and np.linalg.norm(g / h) < rho:
        e = -g / h
    else:
        low = max(h[-1], 0.0)
        bounds = low + 1e-14 * max(abs(h)), low + np.linalg.norm(g) / rho + 1.0
        s = brentq(lambda s: 1 / np.linalg.norm(g / (s - h)) - 1 / rho, *bounds, xtol=1e-14)
        e = g / (s - h)
    return g @ e + e @ (h * e) / 2


class TestOneStep:
    def test_it_is_the_closed_form_on_a_quadratic(self):
        model = Quadratic()
        assert model.sharpness(RHO) == pytest.approx(model.summed(along_the_gradient, RHO), rel=1e-12)

    @pytest.mark.parametrize("rho_heads", [0.0, 2.0])
    def test_heads_may_have_a_radius_of_their_own(self, rho_heads):
        model = Quadratic()
        expected = model.summed(along_the_gradient, RHO, rho_heads)
        assert model.sharpness(RHO, rho_heads=rho_heads) == pytest.approx(expected, rel=1e-12)


class TestManySteps:
    @pytest.mark.parametrize("rho", [0.005, 0.05, 0.5, 5.0])
    @pytest.mark.parametrize("seed", range(4))
    def test_on_convex_quadratics_it_is_the_maximum_over_both_balls(self, seed, rho):
        model = Quadratic(seed)
        assert model.sharpness(rho, steps=300) == pytest.approx(model.summed(highest, rho), rel=1e-9)

    def test_heads_may_have_a_radius_of_their_own(self):
        model = Quadratic()
        found = model.sharpness(RHO, rho_heads=2.0, steps=300)
        assert found == pytest.approx(model.summed(highest, RHO, 2.0), rel=1e-9)
        alone = {t: float(highest(model.A[t], model.theta.detach(), RHO)) for t in TASKS}
        assert model.sharpness(RHO, rho_heads=0.0, steps=300) == pytest.approx(alone, rel=1e-9)

    @settings(deadline=None, max_examples=30)
    @given(seed=st.integers(0, 2**32), rho=st.floats(0.01, 10.0), steps=st.integers(2, 8), more=st.integers(1, 8))
    def test_more_steps_never_find_less_and_never_more_than_there_is(self, seed, rho, steps, more):
        model = Quadratic(seed, convex=False)
        highest_rise = model.summed(highest, rho)
        found = [model.sharpness(rho, steps=k) for k in (1, steps, steps + more)]
        for task, most in highest_rise.items():
            one, some, many = (rises[task] for rises in found)
            margin = 1e-9 * (abs(one) + most)
            assert one - margin <= some <= many <= most + margin

    def test_it_finds_a_peak_that_the_first_step_goes_beyond(self):
        x = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        model = nn.ParameterDict({"x": x})
        parameters = TaskParameters([x], {"hill": []}, model)

        def closure(tasks):
            return {task: -(x - 0.1).square().sum() for task in tasks}

        assert sharpness(model, [closure], parameters, 1.0) == pytest.approx({"hill": 0.1**2 - 0.9**2})
        assert sharpness(model, [closure], parameters, 1.0, steps=40) == pytest.approx({"hill": 0.1**2}, rel=1e-3)

    def test_a_point_without_slope_is_not_left(self):
        model = Quadratic()
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()
        assert model.sharpness(RHO, steps=3) == dict.fromkeys(TASKS, 0.0)

    def test_weights_in_single_precision_stay_within_the_balls(self):
        model = Quadratic()
        seen = []

        def closure(tasks):
            parts = model.theta, *(model.heads[task] for task in tasks)
            seen.append([weight.detach().clone() for weight in parts])
            return {task: loss.float() for task, loss in model.closure(tasks).items()}

        model.float()
        model.A, model.B = ({t: H.float() for t, H in some.items()} for some in (model.A, model.B))
        parameters = TaskParameters([model.theta], {t: [h] for t, h in model.heads.items()}, model)
        sharpness(model, [closure], parameters, RHO, steps=20)
        of_left = seen[:21]
        for where in of_left[1:]:
            for weight, centre in zip(where, of_left[0], strict=True):
                assert float((weight - centre).norm()) <= RHO * (1 + 1e-5)


@pytest.fixture
def net():
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU())
    model = nn.ModuleDict({"trunk": trunk, "left": nn.Linear(8, 2), "right": nn.Linear(8, 2)})
    model["right"].eval()
    x = torch.randn(12, 5)

    def part(rows):
        def closure(tasks):
            z = model["trunk"](x[rows])
            return {task: model[task](z).square().mean() for task in tasks}

        return closure

    closures = [part(slice(0, 6)), part(slice(6, 12))]
    model["left"].weight.grad = torch.ones(2, 8)
    return model, closures, split_parameters(model, part(slice(None)), ["left", "right"]), part(slice(None))


@pytest.mark.parametrize("steps", [1, 3])
class TestAnyNumberOfSteps:
    def test_equal_parts_give_the_sharpness_of_the_whole(self, net, steps):
        model, parts, parameters, whole = net
        of_parts, of_whole = (sharpness(model, some, parameters, RHO, steps=steps) for some in (parts, [whole]))
        assert of_parts == pytest.approx(of_whole, rel=1e-5)

    def test_it_is_of_the_model_in_eval_mode(self, net, steps):
        model, parts, parameters, _ = net
        in_training = sharpness(model, parts, parameters, RHO, steps=steps)
        assert in_training == sharpness(model.eval(), parts, parameters, RHO, steps=steps)

    def test_it_leaves_the_model_and_the_random_streams_alone(self, net, steps):
        model, parts, parameters, _ = net
        before = state(model)
        sharpness(model, parts, parameters, RHO, steps=steps)
        assert state(model) == before

    def test_it_leaves_gradients_alone(self, net, steps):
        model, parts, parameters, _ = net
        sharpness(model, parts, parameters, RHO, steps=steps)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert list(gradients) == ["left.weight"]
        assert torch.equal(gradients["left.weight"], torch.ones(2, 8))

    def test_a_task_without_labels_has_none(self, net, steps):
        model, (first, second), parameters, _ = net
        unlabelled = [lambda tasks, part=part: {**part(tasks), "right": None} for part in (first, second)]
        found = sharpness(model, unlabelled, parameters, RHO, steps=steps)
        assert math.isnan(found["right"])
        assert found["left"] == pytest.approx(sharpness(model, [first, second], parameters, RHO, steps=steps)["left"])

    def test_a_task_is_measured_on_the_parts_that_have_its_labels(self, net, steps):
        model, (first, second), parameters, _ = net
        parts = [first, lambda tasks: {**second(tasks), "right": None}]
        found = sharpness(model, parts, parameters, RHO, steps=steps)
        assert found["right"] == pytest.approx(sharpness(model, [first], parameters, RHO, steps=steps)["right"])

    def test_no_labels_at_all_are_refused(self, net, steps):
        model, _, parameters, _ = net
        with pytest.raises(ValueError, match="no closure has a loss of any task: left, right. Give data with labels"):
            sharpness(model, [dict.fromkeys], parameters, RHO, steps=steps)

    def test_a_loss_that_is_not_finite_is_named_and_the_weights_come_back(self, net, steps):
        model, _, parameters, whole = net
        before = {name: value.clone() for name, value in model.state_dict().items()}

        def closure(tasks):
            moved = not torch.equal(model["right"].weight, before["right.weight"])
            return {t: loss * (math.nan if moved and t == "right" else 1.0) for t, loss in whole(tasks).items()}

        with pytest.raises(FloatingPointError, match="loss of task 'right' is nan"):
            sharpness(model, [closure], parameters, RHO, steps=steps)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("rho", "options", "message"),
    [
        (0.0, {}, "got rho=0.0 and steps=1; expected a radius above 0 and at least one step of ascent"),
        (0.1, {"steps": 0}, "got rho=0.1 and steps=0; expected a radius above 0"),
        (-0.1, {"steps": 5}, "rho must not be negative, got -0.1"),
        (0.1, {"steps": 2, "process_group": object()}, "2 steps are of one process. Give no process_group"),
    ],
)
def test_what_has_no_sharpness_is_refused(rho, options, message):
    with pytest.raises(ValueError, match=message):
        Quadratic().sharpness(rho, **options)
