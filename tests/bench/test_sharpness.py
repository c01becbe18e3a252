"""Sharpness against the closed form on quadratics, and what it must leave alone."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from flatmtl import TaskParameters, split_parameters
from flatmtl_bench.analysis.sharpness import sharpness

RHO = 0.3


class Quadratic(nn.Module):
    """Task ``i`` has the loss ``(theta^T A_i theta + h_i^T B_i h_i) / 2`` with shared theta and a head h_i."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def positive(size):
            root = normal(size, size)
            return root @ root.T

        self.theta = nn.Parameter(normal(4))
        self.heads = nn.ParameterDict({task: nn.Parameter(normal(3)) for task in ("left", "right")})
        self.A = {task: positive(4) for task in self.heads}
        self.B = {task: positive(3) for task in self.heads}

    def closure(self, tasks):
        theta, h = self.theta, self.heads
        return {t: (theta @ self.A[t] @ theta + h[t] @ self.B[t] @ h[t]) / 2 for t in tasks}


def rise(H, x, rho):
    """The rise of x^T H x / 2 along its gradient: rho |g| + rho^2 g^T H g / (2 |g|^2)."""
    g = H @ x
    return rho * g.norm() + rho**2 * (g @ H @ g) / (2 * g @ g)


def test_it_is_the_closed_form_on_a_quadratic():
    model = Quadratic()
    heads = {task: [head] for task, head in model.heads.items()}
    found = sharpness(model, [model.closure], TaskParameters([model.theta], heads, model), RHO)
    with torch.no_grad():
        expected = {
            t: float(rise(model.A[t], model.theta, RHO) + rise(model.B[t], model.heads[t], RHO)) for t in model.heads
        }
    assert found == pytest.approx(expected, rel=1e-12)


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


def streams():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def test_equal_parts_give_the_sharpness_of_the_whole(net):
    model, parts, parameters, whole = net
    assert sharpness(model, parts, parameters, RHO) == pytest.approx(
        sharpness(model, [whole], parameters, RHO), rel=1e-5
    )


def test_it_is_of_the_model_in_eval_mode(net):
    model, parts, parameters, _ = net
    assert sharpness(model, parts, parameters, RHO) == sharpness(model.eval(), parts, parameters, RHO)


def test_it_leaves_the_model_and_the_random_streams_alone(net):
    model, parts, parameters, _ = net
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes, stood = {name: m.training for name, m in model.named_modules()}, streams()
    sharpness(model, parts, parameters, RHO)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {name: m.training for name, m in model.named_modules()} == modes
    assert streams() == stood


def test_it_leaves_gradients_alone(net):
    model, parts, parameters, _ = net
    sharpness(model, parts, parameters, RHO)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert list(gradients) == ["left.weight"]
    assert torch.equal(gradients["left.weight"], torch.ones(2, 8))
