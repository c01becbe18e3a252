"""What only a CUDA device shows; skipped where there is none."""

from functools import partial

import pytest
import torch
from tests.flatmtl.test_memory import GRAMIAN, Wide
from tests.flatmtl.test_operators import Recurrent
from tests.flatmtl.toys import Toy, aggregator
from torch import nn

from flatmtl import ASAM, SAM, FlatMTL

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
every_perturbation = pytest.mark.parametrize("perturbation", [None, SAM(0.3), ASAM(0.5, norm="joint")], ids=repr)


def there(toy: Toy) -> Toy:
    toy.cuda()
    toy.x, toy.y = toy.x.cuda(), {t: y.cuda() for t, y in toy.y.items()}
    return toy


def step(toy: Toy, mtl: FlatMTL):
    result = mtl.backward(toy.closure, toy.split())
    return result, {name: p.grad.cpu() for name, p in toy.named_parameters()}


class Halves(nn.Sequential):
    """The first layer on the host and the others on the device."""

    def forward(self, x):
        first, *others = self
        z = first(x.cpu()).cuda()
        for layer in others:
            z = layer(z)
        return z


@every_perturbation
@pytest.mark.parametrize("name", ["cagrad", "graddrop", "uw"])
def test_recurrent_networks_need_no_batching_rule(name, perturbation):
    found = [step(move(Toy(Recurrent())), FlatMTL(aggregator(name), perturbation))[1] for move in (Toy.cpu, there)]
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-9)


@every_perturbation
@pytest.mark.parametrize("name", ["cagrad", "graddrop", "uw"])
def test_a_trunk_may_be_on_two_devices(name, perturbation):
    found = []
    for halves in (False, True):
        toy = Toy(Halves(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)))
        if halves:
            there(toy).trunk[0].cpu()
        else:
            toy.trunk.forward = partial(nn.Sequential.forward, toy.trunk)
        found.append(step(toy, FlatMTL(aggregator(name), perturbation))[1])
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    "trunk",
    [
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5)),
        lambda: Halves(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5)), nn.Dropout(0.5)),
        lambda: nn.Sequential(nn.Linear(4, 5), nn.LSTM(5, 5, 2, dropout=0.5), First()),
    ],
    ids=["dropout", "on two devices", "within cuDNN"],
)
def test_masks_are_replayed(trunk):
    toy = there(Toy(trunk()))
    if isinstance(toy.trunk, Halves):
        toy.trunk[0].cpu()
    toy.train()
    result, _ = step(toy, FlatMTL(aggregator("mean"), SAM(1e-7)))
    assert (result.norms_flat < 1e-5 * result.norms).all()


class First(nn.Module):
    def forward(self, pair):
        return pair[0]


@pytest.mark.parametrize("name", GRAMIAN)
@every_perturbation
def test_nothing_waits_but_for_the_transfers(name, perturbation):
    """These are events, which the debug mode does not count."""
    toy = there(Toy().float())
    toy.x, toy.y = toy.x.float(), {t: y.float() for t, y in toy.y.items()}
    parameters, mtl = toy.split(), FlatMTL(aggregator(name), perturbation)
    mtl.backward(toy.closure, parameters)
    torch.cuda.set_sync_debug_mode("error")
    try:
        mtl.backward(toy.closure, parameters)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("tf32")
def test_gramians_and_directions_do_without_tf32():
    model = Wide(3)
    model.cuda()
    model.x, rows = model.x.cuda(), []
    model.step(FlatMTL(lambda J: rows.append(J.double()) or J[0]))
    model.zero_grad()
    result = FlatMTL(aggregator("mgda")).backward(model.closure, model.parameters_of)
    J = rows[0]
    torch.testing.assert_close(result.gramian_loss, (J @ J.T).cpu(), rtol=1e-9, atol=0.0)
    d = model.trunk.weight.grad.double().reshape(-1)
    torch.testing.assert_close(d, result.weights_loss.cuda() @ J, rtol=1e-5, atol=1e-7 * float(J.abs().max()))
