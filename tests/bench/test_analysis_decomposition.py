"""Premise and conclusion of the decomposition theorem against closed forms on quadratics."""

import numpy as np
import pytest
import torch
from tests.bench.state import state
from torch import nn

from flatmtl import TaskParameters
from flatmtl.aggregators import LS, MGDA, CAGrad, Mean
from flatmtl_bench.analysis.decomposition import decomposition

RHO, LR = 0.1, 1e-3


class Bowls(nn.Module):
    """Task ``i`` has the loss ``(theta - c_i)^T A_i (theta - c_i) / 2``."""

    def __init__(self, theta, bowls):
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(theta))
        self.bowls = [(torch.tensor(A), torch.tensor(c)) for A, c in bowls]

    def closure(self, tasks):
        losses = {}
        for i, (A, c) in enumerate(self.bowls):
            losses[str(i)] = (self.theta - c) @ A @ (self.theta - c) / 2
        return {task: losses[task] for task in tasks}

    @property
    def parameters_of(self):
        return TaskParameters([self.theta], {str(i): [] for i in range(len(self.bowls))}, self)


def compare(theta, bowls, aggregator, rho=RHO, lr=LR):
    model = Bowls(theta, bowls)
    (found,) = decomposition(model, [model.closure], model.parameters_of, aggregator, rho, lr)
    return found


def drawn(generator, n=3):
    """Return weights and two bowls, which curve down in some directions."""
    roots = generator.normal(size=(2, n, n))
    return generator.normal(size=n), [
        ((root + root.T) / 2, c) for root, c in zip(roots, generator.normal(size=(2, n)), strict=True)
    ]


def shortest(J):
    """Return the shortest convex combination of two rows: MGDA in closed form."""
    a, b = J
    w = np.clip((b - a) @ b / ((a - b) @ (a - b)), 0.0, 1.0)
    return w * a + (1 - w) * b


def exact(theta, bowls, aggregate, rho=RHO):
    """Return loss gradients, flat gradients and the two directions of bowls, with NumPy alone."""
    g = np.stack([A @ (theta - c) for A, c in bowls])
    f = np.stack([rho * A @ row / np.linalg.norm(row) for (A, _), row in zip(bowls, g, strict=True)])
    return g, f, aggregate(g), aggregate(f), aggregate(g + f)


def objective(theta, A, c, rho=RHO):
    """Return the loss plus rho times the norm of its gradient."""
    return (theta - c) @ A @ (theta - c) / 2 + rho * np.linalg.norm(A @ (theta - c))


class TestQuadratics:
    @pytest.mark.parametrize("seed", range(5))
    def test_products_changes_and_predictions_are_the_closed_forms(self, seed):
        theta, bowls = drawn(np.random.default_rng(seed))
        found = compare(theta, bowls, MGDA())
        g, f, loss, flat, direct = exact(theta, bowls, shortest)
        assert found.flat_on_loss == pytest.approx(g @ flat, rel=1e-9)
        assert found.loss_on_flat == pytest.approx(f @ loss, rel=1e-9)
        for d, change, predicted in (
            (loss + flat, found.decomposed, found.decomposed_predicted),
            (direct, found.direct, found.direct_predicted),
        ):
            expected = [objective(theta - LR * d, A, c) - objective(theta, A, c) for A, c in bowls]
            assert change == pytest.approx(expected, rel=1e-7, abs=1e-13)
            assert predicted == pytest.approx(-LR * (g + f) @ d, rel=1e-9)

    def test_a_small_step_changes_what_is_predicted(self):
        theta, bowls = drawn(np.random.default_rng(0))
        found = compare(theta, bowls, MGDA(), lr=1e-6)
        assert found.decomposed == pytest.approx(found.decomposed_predicted, rel=1e-4)
        assert found.direct == pytest.approx(found.direct_predicted, rel=1e-4)

    @pytest.mark.parametrize("aggregator", [MGDA(), CAGrad(c=0.4)], ids=repr)
    def test_where_the_premise_holds_the_conclusion_fails_more_often_than_not(self, aggregator):
        """On random two-task quadratics, to first order, it failed in 80% of thousands of cases."""
        generator = np.random.default_rng(0)
        held = [
            found for _ in range(200) if (found := compare(*drawn(generator), aggregator, rho=1.0, lr=1e-5)).premise
        ]
        assert len(held) > 20
        assert all(max(found.flat_on_loss + found.loss_on_flat) <= 0.0 for found in held)
        assert 0.6 < np.mean([not found.conclusion_predicted for found in held]) < 0.95
        assert np.mean([found.conclusion == found.conclusion_predicted for found in held]) > 0.9  # the step is small

    @pytest.mark.parametrize("aggregator", [Mean(), LS()], ids=repr)
    def test_an_aggregator_that_is_linear_makes_both_steps_one(self, aggregator):
        for seed in range(5):
            found = compare(*drawn(np.random.default_rng(seed)), aggregator)
            assert found.decomposed == pytest.approx(found.direct, rel=1e-9)
            assert found.conclusion
            assert found.conclusion_predicted

    def test_one_task_is_one_step_in_both_ways(self):
        theta, bowls = drawn(np.random.default_rng(0))
        found = compare(theta, bowls[:1], MGDA())
        assert found.decomposed == pytest.approx(found.direct, rel=1e-9)
        assert found.conclusion

    def test_an_aggregator_may_return_one_of_the_rows(self):
        theta, bowls = drawn(np.random.default_rng(0))
        found = compare(theta, bowls, lambda J: J[0])
        g, f, loss, flat, direct = exact(theta, bowls, lambda J: J[0])
        assert found.decomposed_predicted == pytest.approx(-LR * (g + f) @ (loss + flat), rel=1e-9)
        assert found.direct_predicted == pytest.approx(-LR * (g + f) @ direct, rel=1e-9)

    def test_an_aggregator_that_learns_is_left_as_it_was(self):
        theta, bowls = drawn(np.random.default_rng(0))
        aggregator = Counting()
        compare(theta, bowls, aggregator)
        assert aggregator.calls == 0


class Counting:
    """The mean, and how often it was taken."""

    def __init__(self):
        self.calls = 0

    def __call__(self, J):
        self.calls += 1
        return J.mean(dim=0)


def net():
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh())
    model = nn.ModuleDict({"trunk": trunk, "left": nn.Linear(8, 1), "right": nn.Linear(8, 1)})
    x = torch.randn(12, 5)

    def part(rows, absent=()):
        def closure(tasks):
            z = model["trunk"](x[rows])
            return {task: None if task in absent else (model[task](z) - 1).square().mean() for task in tasks}

        return closure

    heads = {task: list(model[task].parameters()) for task in ("left", "right")}
    return model, part, TaskParameters(trunk.parameters(), heads, model)


class TestMiniBatches:
    def test_each_is_compared_from_the_same_weights(self):
        model, part, parameters = net()
        parts = [part(slice(0, 6)), part(slice(6, 12))]
        both = decomposition(model, parts, parameters, MGDA(), RHO, LR)
        alone = [decomposition(model, [one], parameters, MGDA(), RHO, LR)[0] for one in parts]
        assert both == alone

    def test_heads_are_fixed(self):
        model, part, parameters = net()
        found = decomposition(model, [part(slice(None))], parameters, MGDA(), RHO, LR)
        frozen = TaskParameters(parameters.shared, {"left": [], "right": []}, model)
        assert decomposition(model, [part(slice(None))], frozen, MGDA(), RHO, LR) == found

    def test_tasks_without_labels_are_left_out_and_so_are_batches_without_any(self):
        model, part, parameters = net()
        parts = [part(slice(None), absent=("left",)), part(slice(None), absent=("left", "right"))]
        (found,) = decomposition(model, parts, parameters, MGDA(), RHO, LR)
        assert found.tasks == ("right",)
        assert len(found.direct) == len(found.holds) == 1

    def test_no_label_at_all_is_an_error(self):
        model, part, parameters = net()
        with pytest.raises(ValueError, match="none of 1 mini-batches has a label"):
            decomposition(model, [part(slice(None), absent=("left", "right"))], parameters, MGDA(), RHO, LR)

    @pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
    @pytest.mark.parametrize("name", ["rho", "lr"])
    def test_impossible_numbers_are_errors(self, name, value):
        model, part, parameters = net()
        with pytest.raises(ValueError, match=f"{name} must be a positive number, got {value}"):
            decomposition(model, [part(slice(None))], parameters, MGDA(), **{"rho": RHO, "lr": LR, name: value})

    def test_everything_is_left_as_it_was(self):
        model, part, parameters = net()
        model["right"].eval()
        model["left"].weight.grad = torch.ones(1, 8)

        before = state(model)
        decomposition(model, [part(slice(None))], parameters, CAGrad(), RHO, LR)
        assert state(model) == before
