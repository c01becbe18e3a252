"""Eigenvalues and traces of Hessians against those of quadratics, and of small nets whose whole Hessian is formed."""

import numpy as np
import pytest
import torch
from tests.bench.state import state
from torch import nn
from torch.func import functional_call

from flatmtl import TaskParameters
from flatmtl_bench.analysis.spectrum import spectrum
from flatmtl_bench.metrics import Depth, Normals, Segmentation
from flatmtl_bench.models import MultiHead

TASKS = ("left", "right")


def half_square(output, target):
    return ((output - target) ** 2).sum(dim=1).mean() / 2


def four_halves(output, target):
    return 4.0 * half_square(output, target)


class Quadratic:
    """Two tasks on one linear map without bias: the Hessian of the left loss is X^T X / N, of the right one 4 times."""

    def __init__(self, X, dtype=torch.float64):
        self.X = torch.as_tensor(X, dtype=dtype)
        self.model = MultiHead(nn.Linear(self.X.shape[1], 1, bias=False), {task: nn.Identity() for task in TASKS})
        self.model.to(dtype)
        self.losses = {"left": half_square, "right": four_halves}
        self.parameters = TaskParameters(self.model.encoder.parameters(), {task: [] for task in TASKS}, self.model)
        self.hessian = (self.X.T @ self.X / len(self.X)).double().numpy()

    def batches(self, *sizes):
        parts = self.X.split(list(sizes) or len(self.X))
        return [(x, {task: torch.ones(len(x), 1, dtype=x.dtype) for task in TASKS}) for x in parts]

    def spectrum(self, *sizes, **options):
        return spectrum(self.model, self.batches(*sizes), self.losses, self.parameters, **options)


@pytest.fixture(name="X")
def inputs():
    return np.random.default_rng(0).normal(size=(30, 8)) * np.arange(1, 9)


class TestQuadratics:
    @pytest.mark.parametrize("sizes", [(), (10, 10, 10), (17, 13)])
    def test_the_largest_eigenvalues_are_those_of_the_whole_data_however_it_is_cut(self, X, sizes):
        quadratic = Quadratic(X)
        found = quadratic.spectrum(*sizes, eigenvalues=4)
        expected = np.linalg.eigvalsh(quadratic.hessian)[::-1][:4]
        assert found["left"].eigenvalues == pytest.approx(expected, rel=1e-7)
        assert found["right"].eigenvalues == pytest.approx(4 * expected, rel=1e-7)

    def test_a_trace_without_entries_off_the_diagonal_has_no_error(self):
        found = Quadratic(np.diag([3.0, 0.0, 6.0])).spectrum(eigenvalues=1, draws=2)["left"]
        assert (found.trace, found.trace_error) == (pytest.approx(15.0), pytest.approx(0.0, abs=1e-12))

    def test_the_error_of_a_trace_is_that_of_hutchinsons_estimate(self, X):
        quadratic = Quadratic(X)
        found = quadratic.spectrum(eigenvalues=1, draws=60)["left"]
        off = quadratic.hessian - np.diag(np.diag(quadratic.hessian))
        assert found.trace_error == pytest.approx(np.sqrt(2 * (off**2).sum() / 60), rel=0.3)
        assert abs(found.trace - np.trace(quadratic.hessian)) < 4 * found.trace_error

    def test_float32_is_as_precise_as_it_says(self, X):
        quadratic = Quadratic(X, torch.float32)
        expected = np.linalg.eigvalsh(quadratic.hessian)[::-1][:3]
        assert quadratic.spectrum(eigenvalues=3)["left"].eigenvalues == pytest.approx(expected, rel=4e-4)

    def test_a_negative_eigenvalue_is_not_a_large_one(self):
        quadratic = Quadratic(np.eye(4))
        quadratic.losses["left"] = lambda output, target: -half_square(output, target)
        assert quadratic.spectrum(eigenvalues=1)["left"].eigenvalues == pytest.approx([-0.25])

    def test_no_curvature_is_no_error(self):
        quadratic = Quadratic(np.eye(4))
        quadratic.losses["left"] = lambda output, target: output.mean()
        found = quadratic.spectrum(eigenvalues=2)["left"]
        assert (found.eigenvalues, found.trace, found.trace_error) == ((0.0, 0.0), 0.0, 0.0)

    def test_batches_without_a_label_of_a_task_take_no_part_for_it(self, X):
        quadratic = Quadratic(X)
        batches = quadratic.batches(10, 20)
        batches[0][1]["left"].fill_(torch.nan)
        quadratic.losses["left"] = lambda output, target: None if target.isnan().all() else half_square(output, target)
        found = spectrum(quadratic.model, batches, quadratic.losses, quadratic.parameters, eigenvalues=2)
        own = Quadratic(X[10:]).spectrum(eigenvalues=2)
        assert found["left"] == own["left"]
        assert found["right"] == quadratic.spectrum(10, 20, eigenvalues=2)["right"]

    def test_a_seed_decides_the_numbers(self, X):
        quadratic = Quadratic(X)
        assert quadratic.spectrum(seed=1) == quadratic.spectrum(seed=1)
        assert quadratic.spectrum(seed=1)["left"].trace != quadratic.spectrum(seed=2)["left"].trace


def net():
    """A net with two heads, two batches of different sizes, and who owns what."""
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh())
    model = MultiHead(trunk, {task: nn.Linear(4, 3) for task in TASKS}).double()
    model.encoder[1].running_mean.normal_()
    batches = [
        (torch.randn(n, 3, dtype=torch.float64), {task: torch.randint(0, 3, (n,)) for task in TASKS}) for n in (5, 9)
    ]
    heads = {task: list(model.heads[task].parameters()) for task in TASKS}
    losses = dict.fromkeys(TASKS, nn.functional.cross_entropy)
    return model, batches, losses, TaskParameters(trunk.parameters(), heads, model)


def whole_hessian(model, batches, task, names):
    """Return the Hessian by double backward passes over all data at once."""
    inputs = torch.cat([x for x, _ in batches])
    targets = torch.cat([t[task] for _, t in batches])
    values = {name: p.detach() for name, p in model.named_parameters() if name in names}
    sizes = [value.numel() for value in values.values()]

    def loss(vector):
        parts = vector.split(sizes)
        given = {name: part.view_as(values[name]) for name, part in zip(values, parts, strict=True)}
        return nn.functional.cross_entropy(functional_call(model, given, (inputs, [task]))[task], targets)

    return torch.autograd.functional.hessian(loss, torch.cat([v.flatten() for v in values.values()])).numpy()


@pytest.mark.parametrize("heads", [False, True])
def test_it_is_the_spectrum_of_the_whole_hessian_in_eval_mode(heads):
    model, batches, losses, parameters = net()
    every = spectrum(model, batches, losses, parameters, eigenvalues=3, draws=12, heads=heads)
    model.eval()
    for task, found in every.items():
        own = ("encoder.", f"heads.{task}.") if heads else ("encoder.",)
        names = [name for name, _ in model.named_parameters() if name.startswith(own)]
        hessian = whole_hessian(model, batches, task, names)
        assert found.size == len(hessian)
        assert found.eigenvalues == pytest.approx(np.linalg.eigvalsh(hessian)[::-1][:3], rel=1e-6)
        off = hessian - np.diag(np.diag(hessian))
        assert found.trace_error == pytest.approx(np.sqrt(2 * (off**2).sum() / 12), rel=0.6)
        assert abs(found.trace - np.trace(hessian)) < 4 * found.trace_error


def test_it_leaves_everything_as_it_was():
    model, batches, losses, parameters = net()
    model.heads["left"].eval()
    model.heads["left"].weight.grad = torch.ones(3, 4, dtype=torch.float64)

    before = state(model)
    spectrum(model, batches, losses, parameters, eigenvalues=1, draws=2)
    assert state(model) == before


class Unpooling(nn.Module):
    """What segmentation networks are made of: places of maxima are remembered, and a pixel has outputs of its own."""

    def __init__(self):
        super().__init__()
        self.conv, self.pool, self.unpool = (
            nn.Conv2d(1, 2, 3, padding=1),
            nn.MaxPool2d(2, return_indices=True),
            nn.MaxUnpool2d(2),
        )

    def forward(self, x):
        return self.unpool(*self.pool(torch.tanh(self.conv(x))))


def test_networks_and_objectives_of_pixels_can_be_differentiated_twice():
    objectives = {"segmentation": Segmentation(("wall", "floor")), "depth": Depth(), "normals": Normals()}
    model = MultiHead(Unpooling(), {task: nn.Conv2d(2, o.outputs, 1) for task, o in objectives.items()})
    targets = {
        "segmentation": torch.randint(-1, 2, (2, 4, 4)),
        "depth": torch.rand(2, 1, 4, 4).round(decimals=0),
        "normals": nn.functional.normalize(torch.randn(2, 3, 4, 4), dim=1),
    }
    parameters = TaskParameters(model.encoder.parameters(), {task: [] for task in objectives}, model)
    losses = {task: objective.loss for task, objective in objectives.items()}
    found = spectrum(model, [(torch.rand(2, 1, 4, 4), targets)], losses, parameters, eigenvalues=1, draws=2)
    assert all(np.isfinite([*s.eigenvalues, s.trace, s.trace_error]).all() for s in found.values())
    assert found["segmentation"].eigenvalues[0] > 0.0
    assert found["normals"].trace != 0.0


class TestMistakes:
    @pytest.mark.parametrize("eigenvalues", [0, -1, 8, 9])
    def test_as_many_eigenvalues_as_parameters_or_none(self, X, eigenvalues):
        with pytest.raises(ValueError, match=f"got {eigenvalues} eigenvalues of 8 parameters; expected at least 1"):
            Quadratic(X).spectrum(eigenvalues=eigenvalues)

    def test_one_draw(self, X):
        with pytest.raises(ValueError, match="got 1 draws for the trace; expected at least 2"):
            Quadratic(X).spectrum(draws=1)

    def test_parameters_of_another_model(self, X):
        quadratic, other = Quadratic(X), Quadratic(X)
        with pytest.raises(ValueError, match="none of the model's"):
            spectrum(quadratic.model, quadratic.batches(), quadratic.losses, other.parameters)

    def test_losses_that_are_no_numbers(self, X):
        X[3, 2] = np.nan
        with pytest.raises(FloatingPointError, match="the loss of task 'left' is nan on batch 0"):
            Quadratic(X).spectrum(10, 20)

    def test_losses_with_an_infinite_slope(self):
        quadratic = Quadratic(np.eye(4))
        nn.init.zeros_(quadratic.model.encoder.weight)
        quadratic.losses["left"] = lambda output, target: output.abs().sqrt().mean()
        with pytest.raises(FloatingPointError, match="the Hessian is not finite"):
            quadratic.spectrum(eigenvalues=1)

    def test_a_task_without_labels(self, X):
        quadratic = Quadratic(X)
        quadratic.losses["right"] = lambda output, target: None
        with pytest.raises(ValueError, match=r"no batch has a label for \['right'\]"):
            quadratic.spectrum()
