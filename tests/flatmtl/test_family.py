"""The engine equals the plain reference on a family of models that hypothesis draws from.

Differences are relative to the norm of what is compared; where that is a sum that may cancel, such as the direction of
an aggregator of degree 1, to the norm of what is summed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reference import algorithm1
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F

from flatmtl import ASAM, SAM, FlatMTL, StepResult, TaskParameters, split_parameters
from flatmtl.aggregators import AGGREGATORS, Aggregator, Fixed, LossWeighting, PCGrad, build

ACTIVATIONS = {"tanh": torch.tanh, "softplus": F.softplus, "sin": torch.sin}
DRAWING = ["random", "gradvac", "graddrop"]
GRADIENT_AGGREGATORS = [n for n, a in AGGREGATORS.items() if not issubclass(a, LossWeighting) and n not in DRAWING]


@dataclass(frozen=True)
class Case:
    """A model with its data, in a form that reads well where a test fails.

    Attributes:
        heads: depth of each task's head; 0: the loss is on the features themselves.
        branch: tasks that pass through a branch after the trunk.
        attention: the task with a gate of its own from early features to late ones.
        tied: what shares one weight: two "layers" of the trunk, "trunk+head", or two "heads".
        frozen: what does not require a gradient, of "first", "biases" and "head".
        batches: for each micro-batch the tasks that have labels in it.
    """

    seed: int
    width: int
    depth: int
    heads: tuple[int, ...]
    activation: str
    skip: bool
    branch: str
    attention: str
    tied: str
    frozen: tuple[str, ...]
    batches: tuple[str, ...]

    @property
    def tasks(self) -> str:
        return "abcde"[: len(self.heads)]

    @property
    def present(self) -> list[str]:
        return [task for task in self.tasks if any(task in batch for batch in self.batches)]

    @cached_property
    def model(self) -> "Model":
        return Model(self)


class Model(nn.Module):
    """The model of a case, with what is known of it by construction."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        generator, w = torch.Generator().manual_seed(case.seed), case.width
        self.case = case
        self.trunk = nn.ModuleList(nn.Linear(w if i else 3, w) for i in range(case.depth))
        self.branch, self.gate, self.unreached = nn.Linear(w, w), nn.Linear(w, w), nn.Linear(w, w)
        heads = {
            t: [nn.Linear(w, w), nn.Linear(w, 2)][2 - depth :] for t, depth in zip(case.tasks, case.heads, strict=True)
        }
        self.heads = nn.ModuleDict({t: nn.ModuleList(layers) for t, layers in heads.items()})
        self.tie()
        self.double()
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / p.shape[-1] ** 0.5)
        self.freeze()
        count = 4 * len(case.batches)
        self.x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
        widths = {t: 2 if depth else w for t, depth in zip(case.tasks, case.heads, strict=True)}
        self.y = {t: torch.randn(count, widths[t], generator=generator, dtype=torch.float64) for t in case.tasks}

    def tie(self) -> None:
        ends = [layers[-1] for layers in self.heads.values() if len(layers)]
        if self.case.tied == "layers":
            self.trunk[-1].weight = self.trunk[1].weight
        elif self.case.tied == "trunk+head":
            next(layers[0] for layers in self.heads.values() if len(layers) == 2).weight = self.trunk[1].weight
        elif self.case.tied == "heads":
            ends[0].weight = ends[-1].weight

    def freeze(self) -> None:
        kinds = {
            "first": self.trunk[0].parameters(),
            "biases": [p for p in self.parameters() if p.ndim == 1],
            "head": self.heads[self.case.tasks[0]].parameters(),
        }
        for kind in self.case.frozen:
            for p in kinds[kind]:
                p.requires_grad_(False)

    def layers(self, task: str) -> list[nn.Module]:
        """Return the layers that a task's output passes through."""
        own = [
            *([self.branch] if task in self.case.branch else []),
            *([self.gate] if task == self.case.attention else []),
        ]
        return [*self.trunk, *own, *self.heads[task]]

    def users(self, parameter: Parameter, tasks: Iterable[str]) -> list[str]:
        """Return the tasks whose layers hold a parameter that requires a gradient."""
        return [
            t
            for t in tasks
            if parameter.requires_grad and any(parameter is p for m in self.layers(t) for p in m.parameters())
        ]

    @cached_property
    def shared(self) -> list[Parameter]:
        enough = min(2, len(self.case.tasks))  # a single task shares everything
        return [p for p in self.parameters() if len(self.users(p, self.case.tasks)) >= enough]

    @cached_property
    def own(self) -> dict[str, list[Parameter]]:
        known = {id(p) for p in self.shared}
        return {t: [p for p in self.parameters() if self.users(p, [t]) and id(p) not in known] for t in self.case.tasks}

    def outputs(self, x: Tensor, tasks: Iterable[str]) -> dict[str, Tensor]:
        act, z, features = ACTIVATIONS[self.case.activation], x, []
        for i, layer in enumerate(self.trunk):
            z = act(layer(z)) + (z if self.case.skip and i else 0.0)
            features.append(z)
        branch = z + act(self.branch(z)) if self.case.branch else z
        found = {}
        for task in tasks:
            h = branch if task in self.case.branch else z
            if task == self.case.attention:
                h = h * torch.sigmoid(self.gate(features[0]))
            for i, layer in enumerate(self.heads[task]):
                h = layer(act(h) if i else h)
            found[task] = h
        return found

    def losses(self, tasks: Iterable[str], rows: slice = slice(None)) -> dict[str, Tensor]:
        return {t: (z - self.y[t][rows]).square().mean() for t, z in self.outputs(self.x[rows], tasks).items()}

    def micro_batch(self, number: int) -> Callable[[Sequence[str]], dict[str, Tensor | None]]:
        """Return the closure of one micro-batch, of one row more or less than the next."""
        labelled = self.case.batches[number]
        rows = slice(4 * number, 4 * number + 3 + number % 2)
        return lambda tasks: {**dict.fromkeys(tasks), **self.losses([t for t in tasks if t in labelled], rows)}

    def whole_batch(self, tasks: Sequence[str]) -> dict[str, Tensor]:
        """Return the losses of present tasks as the reference sees them: means over their micro-batches."""
        found = {}
        for t in tasks:
            losses = [self.micro_batch(i)([t])[t] for i, labelled in enumerate(self.case.batches) if t in labelled]
            found[t] = sum(losses) / len(losses)
        return found

    def step(self, mtl: FlatMTL) -> StepResult:
        self.zero_grad()
        closures = [self.micro_batch(i) for i in range(len(self.case.batches))]
        parameters = TaskParameters(self.shared, self.own, model=self)
        return mtl.backward(closures if len(closures) > 1 else closures[0], parameters)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    depth, heads = draw(st.integers(1, 4)), draw(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple))
    tasks = "abcde"[: len(heads)]
    tied = [""] + ["layers"] * (depth > 2) + ["trunk+head"] * (depth > 1 and 2 in heads)
    tied += ["heads"] * (sum(h > 0 for h in heads) > 1)
    frozen = [(), ("biases",), ("head",)] + [("first",), ("first", "biases")] * (depth > 1)
    some = st.lists(st.sampled_from(tasks), unique=True).map(sorted).map("".join)
    batches = st.lists(some, min_size=1, max_size=3).map(tuple).filter(any)
    return Case(
        seed=draw(st.integers(0, 10_000)),
        width=draw(st.integers(1, 8)),
        depth=depth,
        heads=heads,
        activation=draw(st.sampled_from(list(ACTIVATIONS))),
        skip=draw(st.booleans()),
        branch=draw(some),
        attention=draw(st.sampled_from(["", *tasks])),
        tied=draw(st.sampled_from(tied)),
        frozen=draw(st.sampled_from(frozen)),
        batches=draw(st.just((tasks,)) | batches),
    )


@st.composite
def perturbations(draw: st.DrawFn) -> SAM:
    options = {
        "rho_heads": draw(st.none() | st.floats(0.0, 1.0)),
        "norm": draw(st.sampled_from(["separate", "joint"])),
        "local": draw(st.sampled_from([None, 0.0, 0.3, 1.0])),
    }
    adapt = draw(st.sampled_from([None, "all", "matrices"]))
    rho = draw(st.floats(0.01, 1.0))
    return SAM(rho, **options) if adapt is None else ASAM(rho, adapt=adapt, **options)


def reference(model: Model, perturbation: SAM, aggregate=lambda J: J[0], **options) -> dict:
    return algorithm1.step(
        model.whole_batch,
        model.shared,
        {t: model.own[t] for t in model.case.present},
        aggregate,
        rho_sh=perturbation.rho,
        rho_ns=perturbation.rho_heads,
        adaptive=isinstance(perturbation, ASAM),
        matrices_only=getattr(perturbation, "adapt", "all") == "matrices",
        joint=perturbation.norm == "joint",
        local=1.0 if perturbation.local is None else perturbation.local,
        **options,
    )


def flat(tensors: Iterable[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    return algorithm1.flatten(list(tensors), like)


def assert_close(actual: Tensor, expected: Tensor, size: Tensor, tolerance: float = 1e-9) -> None:
    """Equal up to a share of ``size``."""
    unit = size if size > 0 else torch.ones_like(size)
    torch.testing.assert_close(actual / unit, expected / unit, rtol=0.0, atol=tolerance)


def functions(name: str, case: Case) -> tuple[Aggregator, Callable[[Tensor], Tensor]]:
    """Return an aggregator for all tasks, and what it is to the rows of those present."""

    def others(count: int) -> list[list[int]]:
        return [[j for j in range(count) if j != i] for i in range(count)]

    if name == "fixed":
        weights = torch.arange(1.0, 1.0 + len(case.tasks), dtype=torch.float64)
        present = [case.tasks.index(t) for t in case.present]
        return Fixed(weights.tolist()), lambda J: weights[present] @ J
    if name == "pcgrad":
        return PCGrad(order=others(len(case.tasks))), lambda J: PCGrad(order=others(len(J)))(J)
    return build(name), build(name)


class TestSplit:
    @pytest.mark.filterwarnings("ignore:no loss reaches")
    @settings(max_examples=100, deadline=None)
    @given(case=cases())
    def test_the_split_is_that_of_the_construction(self, case):
        model = case.model
        found = split_parameters(model, model.losses, list(case.tasks))
        assert list(map(id, found.shared)) == list(map(id, model.shared))
        assert {t: list(map(id, own)) for t, own in found.heads.items()} == {
            t: list(map(id, own)) for t, own in model.own.items()
        }


class TestReference:
    @settings(max_examples=100, deadline=None)
    @given(case=cases(), perturbation=perturbations())
    def test_rows_heads_and_losses_are_those_of_the_reference(self, case, perturbation):
        model, rows = case.model, []
        result = model.step(FlatMTL(lambda J: rows.append(J.clone()) or J[0], perturbation))
        expected = reference(model, perturbation)
        g, f = expected["loss_gradients"], expected["flat_gradients"]
        for i, t in enumerate(case.present):
            size = g[i].norm()
            assert_close(rows[0][i], g[i], size)
            assert_close(rows[1][i], f[i], size)
            own = expected["heads"][t]
            assert_close(flat((p.grad for p in model.own[t]), model.own[t]), own, own.norm())
        places = [case.tasks.index(t) for t in case.present]
        for name, value in {
            "losses": expected["losses"],
            "perturbed_losses": expected["perturbed_losses"],
            "gramian_loss": g @ g.T,
            "gramian_flat": f @ f.T,
            "intra": (g * f).sum(1),
            "inter": f @ g[0],
        }.items():
            found = getattr(result, name)
            there = found[places] if found.ndim == 1 else found[places][:, places]
            assert_close(there, value, g.norm() ** 2 if name in ("gramian_flat", "intra", "inter") else value.norm())
            assert found.isfinite().sum() == value.numel()

    @settings(max_examples=100, deadline=None)
    @given(case=cases(), perturbation=perturbations())
    def test_only_parameters_that_a_present_task_reaches_get_a_gradient(self, case, perturbation):
        model = case.model
        model.step(FlatMTL(build("mean"), perturbation))
        has = {name for name, p in model.named_parameters() if p.grad is not None}
        assert has == {name for name, p in model.named_parameters() if model.users(p, case.present)}

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("name", GRADIENT_AGGREGATORS)
    @settings(max_examples=15, deadline=None)
    @given(
        case=cases(),
        perturbation=perturbations(),
        combine=st.sampled_from(["individual", "direct", "second", "each"]),
        flat_scale=st.sampled_from(["linear", "raw"]),
    )
    def test_the_direction_is_that_of_the_reference(self, name, case, perturbation, combine, flat_scale):
        if name == "fixed" and combine in ("second", "each"):
            combine = "individual"
        model = case.model
        method, aggregate = functions(name, case)
        model.step(FlatMTL(method, perturbation, combine=combine, flat_scale=flat_scale))
        direction = flat((p.grad for p in model.shared), model.shared)
        degree = method.degree if flat_scale == "linear" else 1.0
        expected = reference(model, perturbation, aggregate, combine=combine, degree=degree)
        size = expected["loss_gradients"].norm() + expected["flat_gradients"].norm()
        assert_close(direction, expected["direction"], size if method.degree == 1.0 else expected["direction"].norm())
