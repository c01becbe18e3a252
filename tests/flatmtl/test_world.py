"""Random streams and buffers: a perturbed pass finds what the clean one found, and leaves nothing behind."""

import copy
import pickle
import random
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.flatmtl.toys import TASKS, Toy, assert_same
from tests.reference import algorithm1
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torchvision.ops import StochasticDepth

from flatmtl import SAM, FlatMTL, TaskParameters
from flatmtl.aggregators import Mean
from flatmtl.world import Buffers, RandomStreams

DRAWS = {
    "torch": lambda: torch.rand(3),
    "one normal of torch": lambda: torch.randn(1),
    "python": lambda: torch.tensor(random.random()),
    "one normal of python": lambda: torch.tensor(random.gauss()),
    "numpy": lambda: torch.tensor(np.random.random()),
    "one normal of numpy": lambda: torch.tensor(np.random.randn()),
    "a seed of numpy": lambda: np.random.seed(5) or torch.tensor(np.random.random()),
}


@pytest.fixture
def another_generator():
    """NumPy's global stream is of another kind meanwhile."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    yield
    np.random.set_bit_generator(before)


def positions():
    """Where the streams are, in full."""
    return torch.get_rng_state().tolist(), random.getstate(), pickle.dumps(np.random.get_state(legacy=False))


class TestRandomStreams:
    @pytest.mark.parametrize("before", DRAWS)
    @pytest.mark.parametrize("draw", DRAWS)
    def test_a_stream_goes_back_to_where_it_stood(self, before, draw):
        DRAWS[before]()
        streams = RandomStreams([])
        first = DRAWS[draw]()
        streams.restore()
        assert_same(DRAWS[draw](), first)

    @pytest.mark.parametrize("before", DRAWS)
    @pytest.mark.parametrize("draw", DRAWS)
    def test_every_draw_is_noticed(self, before, draw):
        np.random.seed(1)
        DRAWS[before]()
        streams = RandomStreams([])
        assert streams.stand_still()
        DRAWS[draw]()
        assert not streams.stand_still() or (before == draw == "a seed of numpy")
        streams.restore()
        assert streams.stand_still()

    def test_one_normal_number_is_not_taken_for_two(self):
        """NumPy draws them in pairs and stores the second, so the generator itself stands at the same place."""
        np.random.seed(1)
        start = RandomStreams([])
        np.random.randn(2)
        end = RandomStreams([])
        start.restore()
        np.random.randn()
        assert not end.stand_still()
        np.random.randn()
        assert end.stand_still()

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.sampled_from([*DRAWS, "now", "restore"]), max_size=12), st.integers(0, 3))
    def test_after_any_course_of_draws_the_positions_are_the_true_ones(self, course, which):
        seen = [(RandomStreams([]), positions())]
        for action in course:
            streams, true = seen[which % len(seen)]
            if action == "now":
                seen.append((RandomStreams([]), positions()))
            elif action == "restore":
                streams.restore()
                assert positions() == true
            else:
                DRAWS[action]()
            assert [s.stand_still() for s, _ in seen] == [p == positions() for _, p in seen]

    @pytest.mark.usefixtures("another_generator")
    @pytest.mark.parametrize("draw", [np.random.random, np.random.randn])
    def test_another_generator_of_numpy_is_put_back_too(self, draw):
        streams = RandomStreams([])
        first = draw()
        assert not streams.stand_still()
        streams.restore()
        assert streams.stand_still()
        assert draw() == first

    def test_nothing_is_asked_of_a_numpy_that_nobody_imported(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "numpy")
        streams = RandomStreams([])
        streams.restore()
        assert streams.stand_still()
        assert "numpy" not in sys.modules


class Counts(nn.Linear):
    """Replaces a buffer in every pass, as caches do."""

    def __init__(self, *size: int) -> None:
        super().__init__(*size)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, z: Tensor) -> Tensor:
        self.passes = self.passes + 1.0
        return super().forward(z)


def test_buffers_made_in_inference_mode_are_put_back_too():
    toy = Toy(Counts(4, 5))
    with torch.inference_mode():
        toy.closure(TASKS)
    assert toy.trunk.passes.is_inference()
    parameters, before = toy.split(), toy.trunk.passes
    assert toy.trunk.passes is before
    FlatMTL(Mean(), SAM(0.1)).backward(toy.closure, parameters)
    assert float(toy.trunk.passes) == 2.0


class Noise(nn.Module):
    """An augmentation that draws from every global random stream."""

    def forward(self, z: Tensor) -> Tensor:
        return z * (torch.rand(z.shape) + random.gauss() + np.random.randn())


class DropoutHead(nn.Sequential):
    """A head with dropout before and after its weights."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Dropout(0.4), nn.Linear(inputs, outputs), nn.Dropout(0.2))


class Fixed(nn.Module):
    """Dropout with an explicit mask."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, z: Tensor) -> Tensor:
        return z * self.mask


def with_fixed_masks(toy: Toy) -> Toy:
    """Return a copy in which every dropout is replaced by the mask that it draws in the next forward pass."""
    masks: dict[str, Tensor] = {}
    fixed = copy.deepcopy(toy)
    for name, module in fixed.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(
                lambda m, inputs, out, name=name: masks.update({name: out.detach().ne(0).to(out) / (1 - m.p)})
            )
    fixed.closure(TASKS)
    for name, mask in masks.items():
        fixed.set_submodule(name, Fixed(mask))
    return fixed


class TestRandomness:
    @pytest.mark.parametrize("combine", ["individual", "direct"])
    def test_with_dropout_everywhere_the_step_is_that_with_fixed_masks(self, combine):
        toy = Toy(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 5)), head=DropoutHead)
        parameters = toy.split()
        torch.manual_seed(7)
        fixed = with_fixed_masks(toy)
        torch.manual_seed(7)
        result = FlatMTL(Mean(), SAM(0.3), combine=combine).backward(toy.closure, parameters)
        expected = algorithm1.step(
            fixed.closure,
            list(fixed.trunk.parameters()),
            {t: list(fixed.heads[t].parameters()) for t in TASKS},
            Mean(),
            rho_sh=0.3,
            rho_ns=0.3,
            combine=combine,
        )
        d = torch.cat([p.grad.reshape(-1) for p in toy.trunk.parameters()])
        torch.testing.assert_close(d / d.norm(), expected["direction"] / d.norm(), rtol=0.0, atol=1e-12)
        torch.testing.assert_close(result.perturbed_losses, expected["perturbed_losses"], rtol=1e-12, atol=0.0)

    @pytest.mark.parametrize(
        "trunk",
        [
            lambda: nn.Sequential(nn.Linear(4, 5), StochasticDepth(0.5, "row")),
            lambda: nn.Sequential(nn.Linear(4, 5), StochasticDepth(0.5, "batch"), nn.Tanh()),
            lambda: nn.Sequential(Noise(), nn.Linear(4, 5)),
            lambda: nn.Sequential(nn.Linear(4, 5), nn.RReLU(), nn.Dropout(), Noise()),
        ],
        ids=["stochastic depth", "of the batch", "augmentation", "everything"],
    )
    @pytest.mark.parametrize("head", [nn.Linear, DropoutHead], ids=["plain heads", "heads that draw"])
    def test_perturbed_passes_draw_the_same_numbers(self, trunk, head):
        toy = Toy(trunk(), head=head)
        parameters, drawn = toy.split(), []
        toy.trunk[-1].register_forward_hook(lambda m, inputs, out: drawn.append(out.detach()))
        FlatMTL(Mean(), SAM(1e-9)).backward(toy.closure, parameters)
        assert len(drawn) > len(TASKS)
        for z in drawn[1:]:
            torch.testing.assert_close(z, drawn[0], rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("where", ["start", "closure"])
    def test_only_a_generator_that_the_closure_makes_is_replayed(self, where):
        """One that outlives the closure goes on from pass to pass: nobody knows of it."""
        toy = Toy()
        parameters, kept = toy.split(), torch.Generator().manual_seed(0)

        def closure(tasks):
            seed = int(torch.randint(1 << 30, ()))
            generator = kept if where == "start" else torch.Generator().manual_seed(seed)
            z = toy.trunk(toy.x) + torch.randn((), generator=generator)
            return {t: toy.heads[t](z).square().mean() for t in tasks}

        result = FlatMTL(Mean(), SAM(1e-9)).backward(closure, parameters)
        assert bool((result.sharpness.abs() < 1e-6).all()) == (where == "closure")


class Average(nn.Module):
    """Keeps a running mean of features in a buffer, by writing it or by replacing it, and uses it."""

    def __init__(self, *, replace: bool) -> None:
        super().__init__()
        self.replace = replace
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, z: Tensor) -> Tensor:
        if self.training and self.replace:
            self.mean = 0.9 * self.mean + 0.1 * z.detach().mean(0)
        elif self.training:
            self.mean.mul_(0.9).add_(z.detach().mean(0), alpha=0.1)
        return z - self.mean


class Late(nn.Module):
    """Makes its buffers when it first runs: one out of nothing, one that was announced as ``None``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("announced", None)

    def forward(self, z: Tensor) -> Tensor:
        if self.announced is None:
            self.announced = z.detach().mean(0)
        if not hasattr(self, "first"):
            self.register_buffer("first", z.detach().std(0))
        return (z - self.announced) / self.first


class OwnBatchNorm(nn.BatchNorm1d):
    """A subclass with a buffer of its own."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.register_buffer("largest", torch.zeros(features))

    def forward(self, z: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, z.detach().abs().amax(0)))
        return super().forward(z)


def instance_norm() -> nn.Module:
    norm = nn.InstanceNorm1d(5, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Linear(4, 10), nn.Unflatten(1, (5, 2)), norm, nn.Flatten(), nn.Linear(10, 5))


NORMS = {
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)),
    "cumulative batch norm": lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=None)),
    "without statistics": lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False)),
    "synchronised batch norm": lambda: nn.Sequential(nn.Linear(4, 5), nn.SyncBatchNorm(5)),
    "a subclass of batch norm": lambda: nn.Sequential(nn.Linear(4, 5), OwnBatchNorm(5)),
    "instance norm": instance_norm,
    "a written average": lambda: nn.Sequential(nn.Linear(4, 5), Average(replace=False)),
    "a replaced average": lambda: nn.Sequential(nn.Linear(4, 5), Average(replace=True)),
    "late buffers": lambda: nn.Sequential(nn.Linear(4, 5), Late()),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 5)),
    "spectral norm by a hook": lambda: nn.utils.spectral_norm(nn.Linear(4, 5)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 5)),
    "weight norm by a hook": lambda: nn.utils.weight_norm(nn.Linear(4, 5)),
}


def flags(model: nn.Module) -> list[tuple]:
    """What a library that switches off statistics would switch."""
    names = ("training", "momentum", "track_running_stats", "affine", "eps")
    of_modules = [tuple(getattr(m, name, None) for name in names) for m in model.modules()]
    return [*of_modules, tuple(p.requires_grad for p in model.parameters())]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
@pytest.mark.parametrize("norm", NORMS)
class TestNorms:
    def test_buffers_are_those_of_one_clean_pass(self, norm, training):
        toy, once = Toy(NORMS[norm]()), Toy(NORMS[norm]())
        once.load_state_dict(toy.state_dict())
        for model in (toy, once):
            model.train(training)
        mtl, parameters = FlatMTL(Mean(), SAM(0.5)), toy.split()
        for _ in range(2):
            mtl.backward(toy.closure, parameters)
            once.closure(TASKS)
        assert_same(toy.contents(), once.contents())

    def test_perturbed_passes_start_from_the_buffers_of_the_clean_one(self, norm, training):
        toy, found = Toy(NORMS[norm]()).train(training), []
        parameters = toy.split()
        toy.trunk.register_forward_pre_hook(
            lambda m, inputs: found.append({name: b.clone() for name, b in m.named_buffers()}), prepend=True
        )
        FlatMTL(Mean(), SAM(0.5)).backward(toy.closure, parameters)
        assert len(found) == 1 + len(TASKS)
        for buffers in found[1:]:
            assert_same(buffers, found[0])

    def test_flags_are_the_same_at_every_moment(self, norm, training):
        toy, seen = Toy(NORMS[norm]()).train(training), []
        before, parameters = flags(toy), toy.split()
        toy.trunk.register_forward_hook(lambda m, inputs, out: seen.append(flags(toy)))
        FlatMTL(Mean(), SAM(0.5)).backward(toy.closure, parameters)
        assert seen == [before] * (1 + len(TASKS))
        assert flags(toy) == before


class TestBuffers:
    def test_a_trunk_that_evaluates_within_a_model_that_trains_keeps_its_statistics(self):
        toy = Toy(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)))
        toy.trunk.eval()
        before = toy.contents()
        result = FlatMTL(Mean(), SAM(1e-9)).backward(toy.closure, toy.split())
        assert_same(toy.contents(), before)
        assert toy.training
        assert not toy.trunk.training
        assert (result.sharpness.abs() < 1e-6).all()

    def test_late_buffers_are_made_anew_in_each_pass_and_gone_after_one_that_fails(self):
        toy = Toy(nn.Sequential(nn.Linear(4, 5), Late()))
        parameters = toy.split()
        assert dict(toy.named_buffers()) == {}

        def closure(tasks):
            losses = toy.closure(tasks)
            assert len(tasks) > 1
            return losses

        with pytest.raises(AssertionError):
            FlatMTL(Mean(), SAM(0.5)).backward(closure, parameters)
        assert dict(toy.named_buffers()) == {}
        FlatMTL(Mean(), SAM(0.5)).backward(toy.closure, parameters)
        assert set(dict(toy.named_buffers())) == {"trunk.1.announced", "trunk.1.first"}

    @pytest.mark.parametrize("norm", ["batch norm", "a replaced average", "late buffers", "spectral norm"])
    def test_without_a_model_modules_are_found_as_they_run(self, norm, monkeypatch):
        monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)  # as if nothing had been compiled
        toy, once = Toy(NORMS[norm]()), Toy(NORMS[norm]())
        once.load_state_dict(toy.state_dict())
        parameters = toy.split()
        FlatMTL(Mean(), SAM(0.5)).backward(toy.closure, TaskParameters(parameters.shared, parameters.heads))
        once.closure(TASKS)
        assert_same(toy.contents(), once.contents())

    def test_buffers_of_every_kind_come_back(self):
        module = nn.Module()
        kinds = {
            "floats": torch.ones(3),
            "integers": torch.ones(3, dtype=torch.long),
            "truths": torch.ones(3, dtype=torch.bool),
            "complex": torch.ones(3, dtype=torch.cfloat),
            "turned": torch.ones(2, 3).t(),
            "sparse": torch.eye(3).to_sparse(),
            "empty": torch.ones(0),
            "expanded": torch.ones(1).expand(3),
        }
        for name, buffer in kinds.items():
            module.register_buffer(name, buffer, persistent=name != "floats")
        before = {name: buffer.clone() for name, buffer in kinds.items()}
        buffers = Buffers([module])
        for name, buffer in kinds.items():
            if name != "expanded":
                buffer.zero_()
        module.integers = torch.zeros(7)
        buffers.restore()
        assert all(getattr(module, name) is buffer for name, buffer in kinds.items())
        assert_same({n: b.to_dense() for n, b in module.named_buffers()}, {n: b.to_dense() for n, b in before.items()})
