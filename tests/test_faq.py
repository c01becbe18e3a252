"""What the questions page says, run as it stands."""

import itertools
import math

import pytest
import torch
from tests.flatmtl.toys import TASKS, Toy
from tests.test_project import example_in
from torch import Tensor

from flatmtl import SAM, FlatMTL
from flatmtl.aggregators import UW, CAGrad, PCGrad


def run(name: str, **names) -> dict:
    exec(example_in("docs/faq.md", name), names)
    return names


def test_the_next_step_reads_the_radius():
    radii, toy = [], Toy()
    parameters = toy.split()

    def train(epoch: int) -> None:
        weights: list[Tensor] = []

        def closure(tasks):
            weights.append(torch.cat([p.detach().reshape(-1) for p in parameters.shared]))
            return toy.closure(tasks)

        names["mtl"].backward(closure, parameters)
        radii.append(float((weights[1] - weights[0]).norm()))

    names = {"SAM": SAM, "FlatMTL": FlatMTL, "CAGrad": CAGrad, "epochs": 4, "warm_up": 3, "train": train}
    exec(example_in("docs/faq.md", "rho"), names)
    assert radii == pytest.approx([0.05 / 3, 0.1 / 3, 0.05, 0.05])


def test_a_masked_loss_is_the_mean_over_what_is_known():
    output = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    nan = math.nan
    loss = run("mask", output=output, target=torch.tensor([nan, 0.0, 1.0]))["loss"]
    loss.backward()
    assert loss == (4.0 + 4.0) / 2
    assert output.grad.tolist() == [0.0, 2.0, 2.0]
    assert run("mask", output=output, target=torch.full((3,), nan))["loss"] is None


def test_a_fixed_weight_beside_a_balanced_rest():
    toy = Toy()
    names = run("fixed", CAGrad=CAGrad, FlatMTL=FlatMTL, SAM=SAM)
    rows = []
    FlatMTL(lambda J: rows.append(J.clone()) or J[0], SAM(0.05)).backward(toy.closure, toy.split())
    toy.zero_grad()
    names["mtl"].backward(toy.closure, toy.split())
    expected = sum(CAGrad()(J[:2]) + 0.1 * J[2] for J in rows)
    d = torch.cat([p.grad.reshape(-1) for p in toy.trunk.parameters()])
    torch.testing.assert_close(d, expected)


def test_clipping_before_the_perturbation_would_change_nothing():
    """The perturbation does not depend on the length of the gradient."""
    toy = Toy()
    parameters = toy.split()
    sharpness = [
        FlatMTL(CAGrad(), SAM(0.05))
        .backward(lambda tasks, s=scale: {t: s * v for t, v in toy.closure(tasks).items()}, parameters)
        .sharpness
        / scale
        for scale in (1.0, 1e-3)
    ]
    torch.testing.assert_close(*sharpness)


def test_losses_of_a_result_are_never_weighted():
    toy = Toy()
    result = FlatMTL(UW(tasks=3), SAM(0.05)).backward(toy.closure, toy.split())
    torch.testing.assert_close(result.losses, torch.stack(list(toy.closure(TASKS).values())).detach())


def test_projecting_a_running_sum_is_not_pcgrad():
    """Each row in turn against the sum of those before it, as one would stream."""
    J = torch.tensor([[1.0, 0.0, 0.0], [-0.5, 1.0, 0.0], [-0.5, -1.0, 1.0]], dtype=torch.float64)
    total = torch.zeros(3, dtype=torch.float64)
    for g in J:
        dot = total @ g
        if dot < 0.0:
            total, g = total - dot / (g @ g) * g, g - dot / (total @ total) * total
        total = total + g
    orders = itertools.product(*(itertools.permutations(set(range(3)) - {i}) for i in range(3)))
    assert all((PCGrad(order=order)(J) - total).norm() > 0.1 for order in orders)
