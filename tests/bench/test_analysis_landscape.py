"""The loss surface against closed forms on quadratics, and what it must leave alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.bench.state import state
from torch import nn
from torch.optim.swa_utils import update_bn

from flatmtl_bench.analysis.directions import filter_normalised, move, norm, on_sphere, random_direction
from flatmtl_bench.analysis.landscape import landscape

POSITIONS = [-1.0, -0.25, 0.0, 0.5]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class Quadratic(nn.Module):
    """The loss theta^T H theta / 2 of a matrix theta of three filters, with a known positive Hessian; and a bias."""

    def __init__(self, seed=0, dtype=torch.float64):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, generator=generator(seed), dtype=torch.float64).to(dtype))
        self.bias = nn.Parameter(torch.ones(3, dtype=dtype))
        root = torch.randn(12, 12, generator=generator(7), dtype=torch.float64)
        self.H = root @ root.T

    def at(self, weight):
        flat = weight.detach().double().flatten()
        return {"loss": float(flat @ self.H @ flat) / 2}

    def measure(self):
        return self.at(self.weight)


class TestDirections:
    @given(st.integers(0, 100), st.sampled_from([(3, 4), (2, 3, 2, 2), (5, 1)]))
    def test_each_filter_has_the_norm_of_the_models_filter(self, seed, shape):
        weight = torch.randn(shape, generator=generator(seed))
        (found,) = filter_normalised(random_direction([weight], generator(1)), [weight])
        for k in range(shape[0]):
            assert np.linalg.norm(found[k].numpy()) == pytest.approx(np.linalg.norm(weight[k].numpy()), rel=1e-5)

    def test_normalising_scales_each_filter_and_does_not_turn_it(self):
        weight, direction = torch.ones(2, 4), torch.tensor([[1.0, 0.0, 0.0, 0.0], [3.0, 0.0, 4.0, 0.0]])
        (found,) = filter_normalised([direction], [weight])
        assert found.tolist() == [[2.0, 0.0, 0.0, 0.0], pytest.approx([1.2, 0.0, 1.6, 0.0])]

    def test_biases_and_filters_of_zeros_rest(self):
        parameters = [torch.zeros(2, 3), torch.ones(4), torch.tensor(2.0)]
        found = filter_normalised(random_direction(parameters, generator()), parameters)
        assert [part.abs().sum().item() for part in found] == [0.0, 0.0, 0.0]

    @pytest.mark.parametrize("radius", [0.0, 1e-3, 50.0, 1e30])
    def test_the_norm_over_all_parameters_is_the_radius(self, radius):
        parameters = [torch.zeros(20, 30), torch.zeros(7), torch.zeros(2, 2, 2)]
        found = on_sphere(random_direction(parameters, generator()), radius)
        together = np.concatenate([part.double().numpy().ravel() for part in found])
        assert np.linalg.norm(together) == pytest.approx(radius, rel=1e-6)
        assert norm(found) == pytest.approx(radius, rel=1e-6)

    def test_numbers_are_standard_normal_and_the_same_in_any_precision(self):
        parameters = [torch.zeros(300, 300), torch.zeros(5)]
        (weight, bias), (double, _) = (
            random_direction([p.to(dtype) for p in parameters], generator()) for dtype in (torch.float32, torch.float64)
        )
        assert torch.equal(weight, double.float())
        assert bias.shape == (5,)
        assert double.mean().item() == pytest.approx(0.0, abs=0.02)
        assert double.std().item() == pytest.approx(1.0, abs=0.02)

    @pytest.mark.parametrize("parameters", [[], [torch.zeros(2), torch.zeros(2, dtype=torch.int64)]])
    def test_without_real_parameters_there_is_no_direction(self, parameters):
        with pytest.raises(ValueError, match="a direction needs parameters of real numbers, got"):
            random_direction(parameters, generator())

    def test_steps_of_no_length_leave_the_start_exactly(self):
        start = torch.randn(50)
        weight = torch.zeros(50)
        move([weight], [start], (0.0, [torch.full((50,), 1e30)]), (0.0, [torch.randn(50)]))
        assert torch.equal(weight, start)


class TestSurface:
    def test_it_is_the_closed_form_on_a_quadratic(self):
        """L(theta + x d + y e) = L + x g.d + y g.e + (x^2 d.Hd + 2 x y d.He + y^2 e.He) / 2."""
        model = Quadratic()
        found = landscape(model, model.measure, POSITIONS, seed=3)["loss"]
        stream, parameters = generator(3), list(model.parameters())
        d, e = (filter_normalised(random_direction(parameters, stream), parameters)[0].flatten() for _ in range(2))
        theta, H = model.weight.detach().flatten(), model.H
        g, L = H @ theta, theta @ H @ theta / 2
        for i, x in enumerate(POSITIONS):
            for j, y in enumerate(POSITIONS):
                rise = x * (g @ d) + y * (g @ e) + (x * x * d @ H @ d + 2 * x * y * d @ H @ e + y * y * e @ H @ e) / 2
                assert float(found[i, j]) == pytest.approx(float(L + rise), rel=1e-12)

    def test_the_model_itself_is_exactly_at_the_origin(self):
        model = Quadratic(dtype=torch.float32)
        found = landscape(model, model.measure, POSITIONS)["loss"]
        assert float(found[2, 2]) == model.measure()["loss"]

    def test_equal_seeds_give_equal_surfaces_and_others_others(self):
        model = Quadratic()
        first, again, other = (landscape(model, model.measure, POSITIONS, seed=seed)["loss"] for seed in (5, 5, 6))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_models_of_one_architecture_are_shown_along_one_draw(self):
        """A model with twice the filters has twice the step: the loss of theta / 2 is the same at every point."""
        model, twice = Quadratic(), Quadratic()
        with torch.no_grad():
            twice.weight.mul_(2)
        found = landscape(model, model.measure, POSITIONS)["loss"]
        of_twice = landscape(twice, lambda: twice.at(twice.weight / 2), POSITIONS)["loss"]
        torch.testing.assert_close(found, of_twice, rtol=1e-12, atol=0)

    def test_what_is_not_finite_is_said_where_it_is(self):
        model = nn.Linear(2, 1, bias=False)
        start = model.weight.detach().clone()
        found = landscape(
            model, lambda: {"loss": 1.0 if torch.equal(model.weight, start) else float("nan")}, [0.0, 1.0]
        )
        assert found["loss"].isnan().tolist() == [[False, True], [True, True]]

    @pytest.mark.parametrize("positions", [[], [0.0, float("nan")], [float("inf")]])
    def test_positions_must_be_finite(self, positions):
        model = Quadratic()
        with pytest.raises(ValueError, match="expected finite numbers, e.g. "):
            landscape(model, model.measure, positions)

    def test_the_names_must_be_the_same_everywhere(self):
        model, names = Quadratic(), iter(["left", "right"] * 2)
        with pytest.raises(ValueError, match=r"returned \['left', 'right'\] at some points and not at others"):
            landscape(model, lambda: {next(names): 1.0}, [0.0, 1.0])

    def test_a_negative_seed_is_refused(self):
        model = Quadratic()
        with pytest.raises(ValueError, match="seed must be a whole number from 0, got -1"):
            landscape(model, model.measure, POSITIONS, seed=-1)


def peculiar_net():
    """Return a model with BatchNorm and Dropout, whose state is peculiar in every way, and its data."""
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(64, 5)
    model(x)
    model[4].eval()
    model[4].bias.requires_grad_(False)
    model[0].weight.grad = torch.ones(8, 5)
    return model, x


@pytest.fixture
def net():
    return peculiar_net()


def measure_of(model, x):
    @torch.no_grad()
    def measure():
        return {"size": float(model(x).square().mean()), "mode": float(model.training)}

    return measure


class TestBatchNorm:
    def test_frozen_statistics_are_those_of_the_model(self, net):
        model, _ = net
        seen = []
        landscape(model, lambda: seen.append(model[1].running_mean.tolist()) or {"loss": 0.0}, [0.0, 1.0])
        assert seen == [model[1].running_mean.tolist()] * 4

    def test_estimated_ones_are_those_of_the_moved_weights(self, net):
        """They are mean and variance of what comes into the layer, over the data."""
        model, x = net
        found = []

        @torch.no_grad()
        def compare():
            z = model[0](x).double()
            found.append((model[1].running_mean.double() - z.mean(0)).abs().max().item())
            found.append((model[1].running_var.double() - z.var(0)).abs().max().item())
            return {"loss": 0.0}

        landscape(model, compare, [-1.0, 0.0, 1.0], reestimate=lambda: update_bn([x], model))
        assert len(found) == 18
        assert max(found) < 1e-5

    def test_the_masks_of_dropout_are_the_same_at_each_point(self, net):
        model, x = net
        masks = []

        def reestimate():
            model[2].train()
            masks.append((model[2](torch.ones(100)) > 0).tolist())
            model[2].eval()

        landscape(model, measure_of(model, x), [0.0, 1.0], reestimate=reestimate)
        assert masks == [masks[0]] * 4
        assert {True, False} == set(masks[0])


@pytest.mark.parametrize("frozen", [True, False])
def test_it_leaves_the_model_and_the_random_streams_alone(net, frozen):
    model, x = net
    before = state(model)
    reestimate = None if frozen else lambda: update_bn(x.split(16), model)
    found = landscape(model, measure_of(model, x), [-1.0, 0.0, 1.0], reestimate=reestimate)
    assert state(model) == before
    assert found["mode"].tolist() == [[0.0] * 3] * 3  # it was measured in eval mode
    assert len(set(found["size"].flatten().tolist())) == 9
