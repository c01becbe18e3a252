"""A plain training loop: two tasks on one trunk, plain MGDA against its flat form.

Run it with ``python examples/plain_loop.py``; it needs nothing but flatmtl and takes a few seconds.
"""

import torch
from torch import nn
from torch.nn import functional

from flatmtl import SAM, FlatMTL, split_parameters
from flatmtl.aggregators import MGDA


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.heads = nn.ModuleDict({"sum": nn.Linear(64, 1), "sign": nn.Linear(64, 2)})


def batch(generator: torch.Generator, size: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    x = torch.randn(size, 10, generator=generator)
    return x, {"sum": x.sum(dim=1, keepdim=True), "sign": (x[:, 0] * x[:, 1] > 0).long()}


def train(perturbation: SAM | None, steps: int = 300) -> dict[str, float]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model, mtl, parameters = TwoHeads(), FlatMTL(MGDA(), perturbation), None
    loss_of = {"sum": functional.mse_loss, "sign": functional.cross_entropy}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def losses(tasks, x, y):
        z = model.encoder(x)
        return {t: loss_of[t](model.heads[t](z), y[t]) for t in tasks}

    for _ in range(steps):
        x, y = batch(generator, 64)
        closure = lambda tasks, x=x, y=y: losses(tasks, x, y)  # noqa: E731
        parameters = parameters or split_parameters(model, closure, ["sum", "sign"])
        optimizer.zero_grad()
        mtl.backward(closure, parameters)
        optimizer.step()

    with torch.no_grad():
        return {t: loss.item() for t, loss in losses(["sum", "sign"], *batch(generator, 4096)).items()}


if __name__ == "__main__":
    for name, perturbation in {"MGDA": None, "F-MGDA": SAM(rho=0.05)}.items():
        print(name, {task: round(loss, 4) for task, loss in train(perturbation).items()})
