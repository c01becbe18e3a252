"""Operators that are known to break engines of many gradients: all of them, each against the same written plainly."""

import gc
import weakref
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from tests.flatmtl.toys import TASKS, Toy, aggregator, assert_same
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flatmtl import SAM, FlatMTL, TaskParameters, split_parameters


class Operator(nn.Module):
    """A trunk whose ``forward`` uses the operator and whose ``plainly`` is the same function without it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.special(self.first(x)))

    def plainly(self, x: Tensor) -> Tensor:
        return self.last(self.plain(self.first(x)))

    def special(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def plain(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class ThroughMemory(torch.autograd.Function):
    """Tanh whose backward pass needs real memory: no batched, wrapped or fake tensor has it."""

    @staticmethod
    def forward(ctx, x):
        y = torch.from_numpy(np.tanh(x.detach().numpy()))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        assert g.data_ptr()
        return torch.from_numpy(g.numpy() * (1 - y.numpy() ** 2))


class Memory(Operator):
    """Nothing batches this: neither forward nor backward pass is one of :mod:`torch.func`."""

    def special(self, x):
        return ThroughMemory.apply(x)

    def plain(self, x):
        return x.tanh()


class InPlace(Operator):
    def special(self, x):
        return F.relu_(x.add_(1.0))

    def plain(self, x):
        return (x + 1.0).clamp(min=0.0)


class Fourier(Operator):
    """A circular convolution with a kernel of parameters, as a product of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(6))

    def special(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(self.kernel), n=6).tanh()

    def plain(self, x):
        return torch.stack([x.roll(-k, -1) @ self.kernel.flip(0).roll(1) for k in range(6)], -1).tanh()


class Attention(Operator):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def special(self, x):
        tokens = x.view(2, 4, 6)
        return self.attention(tokens, tokens, tokens, need_weights=False)[0].reshape(8, 6)

    def plain(self, x):
        own = self.attention
        q, k, v = (
            (x @ w.T + b).view(2, 4, 2, 3).transpose(1, 2)
            for w, b in zip(own.in_proj_weight.chunk(3), own.in_proj_bias.chunk(3), strict=True)
        )
        z = (q @ k.transpose(-1, -2) / 3**0.5).softmax(-1) @ v
        return own.out_proj(z.transpose(1, 2).reshape(8, 6))


class Recurrent(Operator):
    """Two tokens of three numbers each."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(3, 3, batch_first=True), nn.GRU(3, 3, batch_first=True)

    def special(self, x):
        z = self.lstm(x.view(8, 2, 3))[0]
        return self.gru(z)[0].reshape(8, 6)

    def plain(self, x):
        h = c = s = x.new_zeros(8, 3)
        out = []
        for token in x.view(8, 2, 3).unbind(1):
            i, f, g, o = _gates(self.lstm, token, h).sum(0).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            (r, z, n), (r_h, z_h, n_h) = (gates.chunk(3, -1) for gates in _gates(self.gru, h, s))
            z = (z + z_h).sigmoid()
            s = (1 - z) * (n + (r + r_h).sigmoid() * n_h).tanh() + z * s
            out.append(s)
        return torch.stack(out, 1).reshape(8, 6)


def _gates(rnn, x, h):
    return torch.stack([F.linear(x, rnn.weight_ih_l0, rnn.bias_ih_l0), F.linear(h, rnn.weight_hh_l0, rnn.bias_hh_l0)])


class Lookup(Operator):
    """Rows of a table, once with a sparse gradient; which rows, the batch says."""

    sparse = False

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 6, sparse=self.sparse)

    def special(self, x):
        return x.tanh() + self.table(torch.arange(8) % 3)

    def plain(self, x):
        return x.tanh() + F.one_hot(torch.arange(8) % 3, 3).to(x) @ self.table.weight


class SparseLookup(Lookup):
    sparse = True


class Views(Operator):
    def special(self, x):
        return x.view(2, 4, 6).transpose(0, 1).expand(3, 4, 2, 6)[1].unflatten(-1, (2, 3)).reshape(8, 6).tanh()

    def plain(self, x):
        return torch.stack([x[i] for i in (0, 4, 1, 5, 2, 6, 3, 7)]).tanh()


class BatchNorm(Operator):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def special(self, x):
        return self.norm(x).tanh()

    def plain(self, x):
        x = (x - x.mean(0)) / (x.var(0, unbiased=False) + self.norm.eps).sqrt()
        return (x * self.norm.weight + self.norm.bias).tanh()


class ChannelsLast(Operator):
    """Pictures of 3 channels and 2 by 1 pixels; weights of the convolutions are in that format too."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)

    def special(self, x):
        z = self.convolution(x.view(8, 3, 2, 1).to(memory_format=torch.channels_last))
        assert z.is_contiguous(memory_format=torch.channels_last)
        return F.max_pool2d(z.tanh(), 1).reshape(8, 6)

    def plain(self, x):
        z = F.pad(x.view(8, 3, 2, 1), (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
        z = torch.einsum("bihwkl,oikl->bohw", z, self.convolution.weight) + self.convolution.bias[:, None, None]
        return z.tanh().reshape(8, 6)


class Checkpointed(Operator):
    """The last layer's weight works in two blocks that are computed twice."""

    def special(self, x):
        block = lambda z: F.linear(z, self.last.weight).tanh() @ self.last.weight  # noqa: E731
        return checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False)

    def plain(self, x):
        for _ in range(2):
            x = (x @ self.last.weight.T).tanh() @ self.last.weight
        return x


OPERATORS = [
    Memory,
    InPlace,
    Fourier,
    Attention,
    Recurrent,
    Lookup,
    SparseLookup,
    Views,
    BatchNorm,
    ChannelsLast,
    Checkpointed,
]


def step(toy: Toy, mtl: FlatMTL, closure=None):
    """Take a step; return its result with all gradients."""
    result = mtl.backward(closure or toy.closure, toy.split())
    return result, toy.gradients()


def assert_equal(actual, expected) -> None:
    """Equal up to rounding, relative to the largest entry of all."""
    size = max(value.abs().max() for value in expected.values() if value is not None)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0.0, atol=1e-9 * float(size))


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.__name__)
class TestOperators:
    @pytest.mark.parametrize("name", ["cagrad", "uw"])
    @pytest.mark.parametrize("perturbation", [None, SAM(0.3)], ids=["plain", "flat"])
    def test_a_step_through_it_is_that_through_the_same_function(self, operator, perturbation, name):
        toy, twin = Toy(operator()), Toy(operator())
        twin.trunk.forward = twin.trunk.plainly
        result, gradients = step(toy, FlatMTL(aggregator(name), perturbation))
        expected, expected_gradients = step(twin, FlatMTL(aggregator(name), perturbation))
        torch.testing.assert_close(result.losses, expected.losses, rtol=1e-12, atol=0.0)
        assert_equal(gradients, expected_gradients)


class TestNumbers:
    """What operators may count on in every pass."""

    def test_dropout_takes_no_slow_path(self):
        """A batched backward pass would warn of one, and warnings are errors here."""
        toy = Toy(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.FeatureAlphaDropout(0.2)))
        result, _ = step(toy, FlatMTL(aggregator("cagrad"), SAM(1e-7)))
        assert (result.norms_flat < 1e-5 * result.norms).all()

    def test_losses_may_share_all_of_their_graph(self):
        """One loss that is twice another, and one that is the very same."""
        toy = Toy()

        def closure(tasks):
            loss = toy.closure(["left"])["left"]
            return {"left": loss, "right": 2 * loss, "third": loss}

        parameters = TaskParameters(toy.trunk.parameters(), {t: [] for t in TASKS})
        expected = torch.autograd.grad(closure(TASKS)["left"], parameters.shared)
        FlatMTL(aggregator("sum")).backward(closure, parameters)
        assert_equal(dict(enumerate(p.grad for p in parameters.shared)), dict(enumerate(4 * g for g in expected)))

    def test_weights_of_a_channels_last_model_get_gradients_in_that_format(self):
        toy = Toy(ChannelsLast())
        step(toy, FlatMTL(aggregator("cagrad"), SAM(0.3)))
        assert toy.trunk.convolution.weight.grad.is_contiguous(memory_format=torch.channels_last)


class Watch:
    """What of the graphs is alive: in each part of a graph that passes through ``see`` lives a token."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Token] = weakref.WeakSet()
        self.backwards: list[tuple[str, list[str], bool]] = []

    def see(self, x: Tensor, part: str) -> Tensor:
        return Seen.apply(x, self, part)

    def parts(self) -> list[str]:
        return sorted(token.part for token in self.alive)


@dataclass(eq=False)
class Token:
    part: str


class Seen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, watch, part):
        ctx.watch, ctx.token = watch, Token(part)
        watch.alive.add(ctx.token)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        ctx.watch.backwards.append((ctx.token.part, ctx.watch.parts(), kept))
        return g, None, None


class TestGraphs:
    """Activations of one forward pass at a time, and only as long as a task needs them."""

    @pytest.fixture
    def watch(self):
        """A cycle of references would free graphs too, but late."""
        gc.collect()
        gc.disable()
        yield Watch()
        gc.enable()

    @staticmethod
    def run(watch, name, perturbation, tasks=15):
        names = [f"{i:02}" for i in range(tasks)]
        trunk, heads = nn.Linear(3, 4), nn.ModuleDict({t: nn.Linear(4, 1) for t in names})
        x = torch.ones(2, 3)

        def closure(asked):
            assert watch.parts() == []
            z = watch.see(trunk(x), "trunk")
            return {t: watch.see(heads[t](z).square().mean(), t) for t in asked}

        parameters = TaskParameters(trunk.parameters(), {t: heads[t].parameters() for t in names})
        mtl = FlatMTL(aggregator(name, tasks), perturbation)
        mtl.backward([closure, closure], parameters)
        watch.backwards.clear()
        mtl.backward(closure, parameters)
        return names

    @pytest.mark.parametrize("name", ["mgda", "ls", "uw"])
    @pytest.mark.parametrize(
        "perturbation",
        [None, SAM(0.1), SAM(0.1, local=0.5), SAM(0.1, local=0.0)],
        ids=["plain", "own", "half", "common"],
    )
    def test_none_is_alive_when_the_next_is_made_nor_after_the_step(self, watch, name, perturbation):
        self.run(watch, name, perturbation)
        assert watch.parts() == []

    def test_a_head_s_is_freed_once_its_task_is_done(self, watch):
        names = self.run(watch, "mgda", None)
        own = [(part, alive) for part, alive, _ in watch.backwards if part != "trunk"]
        assert own == [(names[i], [*names[i:], "trunk"]) for i in range(15)]

    def test_the_trunk_s_is_freed_while_the_last_task_passes_through_it(self, watch):
        self.run(watch, "mgda", SAM(0.1), tasks=3)
        assert [kept for part, _, kept in watch.backwards if part == "trunk"] == [True, True, False, *[False] * 3]

    def test_nothing_holds_one_that_all_tasks_passed_through_with_common_weights(self, watch):
        self.run(watch, "mgda", SAM(0.1, local=0.0), tasks=3)
        assert [kept for part, _, kept in watch.backwards if part == "trunk"] == [True, True, False] * 2


class TestCheckpointing:
    """Activations that are computed twice change nothing, if the way is not the reentrant one."""

    @staticmethod
    def toy(*layers: nn.Module, **options) -> Toy:
        """Return a toy whose second half is checkpointed, or all of it."""
        whole = options.pop("whole", False)
        toy = Toy(nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Sequential(*layers, nn.Linear(6, 5))))
        first, second = toy.trunk
        if options:
            forward = toy.trunk.forward
            toy.trunk.forward = (
                (lambda x: checkpoint(forward, x, **options))
                if whole
                else (lambda x: checkpoint(second, first(x), **options))
            )
        return toy

    @pytest.mark.parametrize(
        "layer", [nn.Tanh, nn.Dropout, lambda: nn.BatchNorm1d(6)], ids=["plain", "dropout", "norm"]
    )
    @pytest.mark.parametrize("batches", [1, 2])
    @pytest.mark.parametrize("name", ["cagrad", "uw"])
    def test_the_step_is_that_without_it(self, name, batches, layer):
        made = []
        for options in ({}, {"use_reentrant": False}):
            toy = self.toy(layer(), **options)
            parameters, mtl = toy.split(), FlatMTL(aggregator(name), SAM(0.3))
            torch.manual_seed(0)
            closures = [partial(toy.closure, rows=slice(i, None, batches)) for i in range(batches)]
            for _ in range(2):
                mtl.backward(closures, parameters)
            made.append((toy.gradients(), toy.contents(), torch.rand(2)))
        assert_same(made[1], made[0])

    def test_the_step_is_that_without_it_under_autocast(self):
        made = []
        for options in ({}, {"use_reentrant": False}):
            toy = self.toy(**options).float()

            def closure(tasks, toy=toy):
                with torch.autocast("cpu", torch.bfloat16):
                    return toy.closure(tasks)

            FlatMTL(aggregator("cagrad"), SAM(0.3)).backward(closure, toy.split())
            made.append(toy.gradients())
        assert_same(made[1], made[0])

    def test_adapters_on_a_frozen_base_learn(self):
        """Their input needs no gradient, which is what reentrant checkpointing looks at."""
        made = []
        for options in ({}, {"use_reentrant": False, "whole": True}):
            toy = self.toy(**options)
            for p in toy.trunk[0].parameters():
                p.requires_grad_(False)
            made.append(step(toy, FlatMTL(aggregator("cagrad"), SAM(0.3)))[1])
        assert made[1]["trunk.1.0.weight"].any()
        assert_same(made[1], made[0])

    @pytest.mark.parametrize("name", ["cagrad", "ls"])
    @pytest.mark.parametrize("whole", [False, True], ids=["with a graph", "detached"])
    @pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
    def test_the_reentrant_way_is_refused(self, whole, name):
        """Where its input needs no gradient it detaches; elsewhere PyTorch refuses gradients on chosen parameters."""
        toy, remedy = self.toy(use_reentrant=True, whole=whole), r"use_reentrant=True.*(pass False|Pass use_reentrant=)"
        parameters = TaskParameters(toy.trunk.parameters(), {t: toy.heads[t].parameters() for t in TASKS}, toy)
        with pytest.raises((RuntimeError, ValueError), match=remedy):
            FlatMTL(aggregator(name)).backward(toy.closure, parameters)
        with pytest.raises(ValueError, match=remedy):
            split_parameters(toy, toy.closure, TASKS)
