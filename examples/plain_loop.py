"""A plain training loop: two tasks on one trunk, F-MGDA, with clipping and a schedule.

Run it with ``python examples/plain_loop.py``; it needs nothing but flatmtl and takes a few seconds.
"""

import torch
from torch import nn
from torch.nn import functional as F

from flatmtl import SAM, FlatMTL, Monitor, split_parameters
from flatmtl.aggregators import MGDA

TASKS = ["sum", "sign"]
LOSS = {"sum": F.mse_loss, "sign": F.cross_entropy}


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1))
        self.heads = nn.ModuleDict({"sum": nn.Linear(64, 1), "sign": nn.Linear(64, 2)})


def batches(count: int, size: int = 64) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    inputs = [torch.randn(size, 10) for _ in range(count)]
    return [(x, {"sum": x.sum(dim=1, keepdim=True), "sign": (x[:, 0] * x[:, 1] > 0).long()}) for x in inputs]


def main(epochs: int = 10) -> None:
    torch.manual_seed(0)
    model, loader = TwoHeads(), batches(20)
    mtl, parameters, monitor = FlatMTL(MGDA(), SAM(rho=0.05)), None, Monitor()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for epoch in range(1, epochs + 1):
        for x, y in loader:

            def closure(tasks, x=x, y=y):
                z = model.encoder(x)
                return {t: LOSS[t](model.heads[t](z), y[t]) for t in tasks}

            if parameters is None:
                parameters = split_parameters(model, closure, TASKS)
            optimizer.zero_grad()
            monitor.update(mtl.backward(closure, parameters))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        schedule.step()
        means = monitor.compute()
        shown = [f"loss/{t}" for t in TASKS] + [f"sharpness/{t}" for t in TASKS] + ["conflict"]
        print(f"epoch {epoch:2}  " + "  ".join(f"{name} {means[name]:.3f}" for name in shown))
        monitor.reset()


if __name__ == "__main__":
    main()
