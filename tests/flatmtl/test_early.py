"""Gradients that are taken as soon as a backward pass finds them, which is done with large parameters."""

import pytest
import torch
from tests.flatmtl.test_step import COMBINE
from tests.flatmtl.toys import TASKS, Toy, assert_same
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from flatmtl import ASAM, SAM, FlatMTL, TaskParameters, gradients
from flatmtl.aggregators import LS, MGDA
from flatmtl.gradients import Rows

PERTURBATIONS = [None, SAM(0.1), ASAM(0.5), SAM(0.1, local=0.0), SAM(0.1, norm="joint")]


@pytest.fixture
def always(monkeypatch):
    """Let gradients be taken early whatever their size."""
    monkeypatch.setattr(gradients, "SMALL", 0)
    monkeypatch.setattr(gradients, "SHORT", 0)


class Skips(Toy):
    """The task "left" passes by the second layer."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Tanh()))

    def closure(self, tasks):
        losses = super().closure(tasks)
        if "left" in tasks:
            losses["left"] = self.heads["left"](self.trunk[0](self.x)).square().mean()
        return losses


class TestStep:
    """When a gradient is taken changes nothing."""

    @pytest.mark.parametrize("scale", [None, 1024.0])
    @pytest.mark.parametrize("closures", [1, 2])
    @pytest.mark.parametrize("combine", COMBINE)
    @pytest.mark.parametrize("perturbation", PERTURBATIONS, ids=repr)
    def test_the_step_is_the_same_bit_for_bit(self, perturbation, combine, closures, scale, request):
        late = self.after_two_steps(MGDA(), perturbation, combine, closures, scale)
        request.getfixturevalue("always")
        assert_same(self.after_two_steps(MGDA(), perturbation, combine, closures, scale), late)

    @pytest.mark.parametrize("perturbation", [None, SAM(0.1)], ids=repr)
    def test_nor_does_it_change_the_step_on_a_weighted_sum(self, perturbation, request):
        late = self.after_two_steps(LS(), perturbation, "individual", 1, None)
        request.getfixturevalue("always")
        assert_same(self.after_two_steps(LS(), perturbation, "individual", 1, None), late)

    def after_two_steps(self, method, perturbation, combine, closures, scale):
        toy = Skips()
        mtl, parameters = FlatMTL(method, perturbation, combine=combine), toy.split()
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        for _ in range(2):
            result = mtl.backward([toy.closure] * closures, parameters, scaler=scaler)
        return {**toy.gradients(), "losses": result.losses, "gramian": result.gramian_loss}

    def test_inner_products_of_loss_and_flat_gradients_are_the_same(self, request):
        found = []
        for _ in range(2):
            toy = Skips()
            found.append(FlatMTL(MGDA(), SAM(0.1)).backward(toy.closure, toy.split()).intra)
            request.getfixturevalue("always")
        torch.testing.assert_close(*found, rtol=1e-12, atol=0.0)

    @pytest.mark.usefixtures("always")
    @pytest.mark.parametrize("fails", [False, True])
    def test_no_hook_is_left_on_a_parameter(self, fails):
        toy = Toy()
        parameters = toy.split()
        if fails:
            toy.trunk[0].bias.register_hook(raise_interrupt)
            with pytest.raises(KeyboardInterrupt):
                FlatMTL(MGDA(), SAM(0.1)).backward(toy.closure, parameters)
        else:
            FlatMTL(MGDA(), SAM(0.1)).backward(toy.closure, parameters)
        left = [len(p._backward_hooks or ()) for p in toy.parameters()]
        assert sum(left) == fails

    def test_a_large_gradient_is_gone_before_the_next_one_is_found(self):
        layers = [nn.Linear(400, 400, bias=False) for _ in range(4)]
        trunk, heads = nn.Sequential(*layers), {task: nn.Linear(400, 1) for task in TASKS}
        parameters = TaskParameters(trunk.parameters(), {task: head.parameters() for task, head in heads.items()})
        x, alive, seen = torch.randn(2, 400), [], []

        def note(g):
            alive.append(sum(not storage.expired() for storage in seen))
            seen.append(StorageWeakRef(g.untyped_storage()))

        for layer in layers:
            layer.weight.register_hook(note)
        FlatMTL(MGDA(), SAM(0.1)).backward(
            lambda tasks: {t: heads[t](trunk(x)).square().mean() for t in tasks}, parameters
        )
        assert len(seen) == 2 * len(TASKS) * len(layers)
        assert set(alive) == {0}


def raise_interrupt(g):
    raise KeyboardInterrupt


class TestRows:
    @pytest.mark.usefixtures("always")
    def test_a_gradient_that_a_repeated_pass_finds_again_is_subtracted_once(self):
        toy = Toy()
        rows = Rows(toy.split(), 1)
        g, f = ([torch.randn_like(p) for p in toy.trunk.parameters()] for _ in range(2))
        rows.write(0, [*g])
        early = rows.subtracting(0)
        early[0](f[0])
        part = [early[j](f[j]) for j in range(3)]
        product = rows.subtract_from(0, [*part, f[3]])
        expected = [b - a for a, b in zip(g, f, strict=True)]
        assert_same(rows.views(0), expected)
        torch.testing.assert_close(product, sum((d * b).sum() for d, b in zip(expected, f, strict=True)))

    @pytest.mark.usefixtures("always")
    def test_what_a_pass_that_failed_subtracted_does_not_count_in_the_next(self):
        toy = Toy()
        rows = Rows(toy.split(), 1)
        g = [torch.randn_like(p) for p in toy.trunk.parameters()]
        rows.write(0, [*g])
        rows.subtracting(0)[0](g[0])
        rows.write(0, [torch.zeros_like(one) for one in g])
        torch.testing.assert_close(rows.subtract_from(0, [*g]), sum(one.square().sum() for one in g))
