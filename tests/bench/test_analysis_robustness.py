"""Random perturbations of the weights against closed forms on quadratics, and what they must leave alone."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.bench.state import state
from tests.bench.test_analysis_landscape import Quadratic, measure_of, peculiar_net
from torch import nn

from flatmtl_bench.analysis.robustness import robustness


class Vector(nn.Module):
    """The loss theta^T H theta / 2 of a vector theta at zero."""

    def __init__(self, H):
        super().__init__()
        self.H = torch.as_tensor(H, dtype=torch.float64)
        self.theta = nn.Parameter(torch.zeros(len(self.H), dtype=torch.float64))

    def measure(self):
        return {"loss": float(self.theta.detach() @ self.H @ self.theta.detach()) / 2}


def losses(found):
    return {radius: [numbers["loss"] for numbers in draws] for radius, draws in found.items()}


class TestSphere:
    @given(n=st.integers(1, 30), radius=st.floats(0, 1000), seed=st.integers(0, 1000))
    def test_under_the_identity_the_rise_is_half_the_square_of_the_radius(self, n, radius, seed):
        model = Vector(np.eye(n))
        (found,) = losses(robustness(model, model.measure, [radius], draws=3, seed=seed)).values()
        assert found == pytest.approx([radius**2 / 2] * 3, rel=1e-12)

    def test_the_expected_rise_is_that_of_the_mean_curvature(self):
        """E[eps^T H eps] / 2 = r^2 tr(H) / 2n, since E[eps eps^T] = r^2 I / n on the sphere."""
        H = np.diag([1.0, 2.0, 3.0, 10.0]) + 0.5
        model = Vector(H)
        (found,) = losses(robustness(model, model.measure, [3.0], draws=2000)).values()
        standard_error = np.std(found) / math.sqrt(len(found))
        assert np.mean(found) == pytest.approx(9 * np.trace(H) / 8, abs=4 * standard_error)
        assert standard_error < 0.02 * np.mean(found)

    def test_all_parameters_move_and_no_buffer(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        seen = []

        def measure():
            seen.append({name: value.clone() for name, value in model.state_dict().items()})
            return {}

        robustness(model, measure, [0.0, 2.0], draws=1)
        moved = {name for name, value in seen[0].items() if (value != seen[1][name]).all()}
        assert moved == {name for name, _ in model.named_parameters()}
        assert all(torch.equal(value, seen[1][name]) for name, value in seen[0].items() if name not in moved)


class TestScales:
    def moves(self, model, scale, radii):
        """Return the perturbation of each radius, by parameter."""
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        seen = []

        def measure():
            seen.append({name: (p - start[name]).detach() for name, p in model.named_parameters()})
            return {}

        robustness(model, measure, radii, draws=1, scale=scale)
        return seen

    @pytest.mark.parametrize("scale", ["absolute", "relative"])
    def test_a_radius_is_the_norm_of_the_step_or_its_share_of_that_of_the_weights(self, scale):
        model = nn.Linear(30, 20).double()
        weights = np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])
        of_one = {"absolute": 1.0, "relative": np.linalg.norm(weights)}[scale]
        for radius, step in zip([0.1, 7.0], self.moves(model, scale, [0.1, 7.0]), strict=True):
            together = np.concatenate([part.numpy().ravel() for part in step.values()])
            assert np.linalg.norm(together) == pytest.approx(radius * of_one, rel=1e-9)

    def test_filters_change_by_their_own_norm_and_biases_rest(self):
        model = nn.Conv2d(2, 3, 3).double()
        (step,) = self.moves(model, "filter", [0.25])
        norms, steps = (x.flatten(1).norm(dim=1).tolist() for x in (model.weight, step["weight"]))
        assert steps == pytest.approx([norm / 4 for norm in norms], rel=1e-9)
        assert step["bias"].tolist() == [0.0] * 3

    def test_relative_and_filter_radii_do_not_depend_on_the_scale_of_the_weights(self):
        """The loss of theta / 1000 at a model a thousand times as large is that of the model; absolutely it is not."""
        model, large = Quadratic(), Quadratic()
        with torch.no_grad():
            large.weight.mul_(1000)
            large.bias.mul_(1000)
        same = {}
        for scale in ("absolute", "relative", "filter"):
            found = losses(robustness(model, model.measure, [0.3], scale=scale))
            of_large = losses(robustness(large, lambda: large.at(large.weight / 1000), [0.3], scale=scale))
            same[scale] = of_large[0.3] == pytest.approx(found[0.3], rel=1e-9)
        assert same == {"absolute": False, "relative": True, "filter": True}


class TestDraws:
    @pytest.mark.parametrize("scale", ["absolute", "relative", "filter"])
    def test_radius_zero_is_exactly_the_model_and_so_it_is_after_a_step_far_away(self, scale):
        model = Quadratic(dtype=torch.float32)
        exact = model.measure()["loss"]
        found = losses(robustness(model, model.measure, [1e6, 0.0, 1e-3], draws=3, scale=scale))
        assert found[0.0] == [exact] * 3
        assert exact not in found[1e-3]

    def test_draws_differ_and_are_those_of_the_seed(self):
        model = Quadratic()
        first, again, other = (losses(robustness(model, model.measure, [1.0], seed=seed))[1.0] for seed in (4, 4, 5))
        assert first == again
        assert len({*first, *other}) == 20

    def test_more_draws_and_other_radii_leave_those_there_were(self):
        model = Quadratic()
        few = losses(robustness(model, model.measure, [1.0], draws=2))
        many = losses(robustness(model, model.measure, [0.5, 1.0, 2.0], draws=5))
        assert many[1.0][:2] == few[1.0]

    def test_what_is_not_finite_is_said(self):
        model = nn.Linear(2, 1)
        found = robustness(model, lambda: {"loss": float("nan")}, [0.0, 1.0], draws=1)
        assert [math.isnan(draws[0]["loss"]) for draws in found.values()] == [True, True]

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"radii": [-1.0]}, r"got the radii \[-1.0\]; expected finite numbers of at least 0"),
            ({"radii": [0.0, float("nan")]}, "expected finite numbers of at least 0"),
            ({"radii": [float("inf")]}, "expected finite numbers of at least 0"),
            ({"radii": []}, "expected finite numbers of at least 0"),
            ({"draws": 0}, "draws must be a whole number from 1, got 0"),
            ({"seed": -1}, "seed must be a whole number from 0, got -1"),
            ({"scale": "relativ"}, "unknown scale 'relativ'. Did you mean 'relative'?"),
        ],
    )
    def test_bad_options_are_refused(self, options, said):
        model = Quadratic()
        with pytest.raises(ValueError, match=said):
            robustness(model, model.measure, **{"radii": [1.0], **options})


def test_it_leaves_the_model_and_the_random_streams_alone():
    model, x = peculiar_net()
    before = state(model)
    found = robustness(model, measure_of(model, x), [0.0, 5.0], draws=3)
    assert state(model) == before
    assert {numbers["mode"] for draws in found.values() for numbers in draws} == {0.0}  # it was measured in eval mode
    assert len({numbers["size"] for numbers in found[5.0]}) == 3


def test_everything_comes_back_after_an_error():
    model, _ = peculiar_net()
    before = state(model)

    def fails():
        raise KeyError

    with pytest.raises(KeyError):
        robustness(model, fails, [5.0])
    assert state(model) == before
