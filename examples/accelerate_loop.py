"""Accelerate: its precision, scaler, clipping and schedule. Run: ``python examples/accelerate_loop.py``."""

from functools import partial
from itertools import islice

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

from flatmtl import SAM, FlatMTL, Monitor, split_parameters
from flatmtl.aggregators import CAGrad

LOSS = {"sum": F.mse_loss, "sign": F.cross_entropy}


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1))
        self.heads = nn.ModuleDict({"sum": nn.Linear(64, 1), "sign": nn.Linear(64, 2)})

    def forward(self, x, tasks):
        z = self.encoder(x)
        return {t: self.heads[t](z) for t in tasks}


def losses(model, batch, tasks):
    out = model(batch["x"], tasks)  # the model that prepare() returned: its forward pass runs in autocast
    return {t: LOSS[t](out[t], batch[t]) for t in tasks}


def train_epoch(accelerator, mtl, parameters, model, loader, optimizer, schedule, accumulate=2, clip=1.0) -> Monitor:
    monitor, batches = Monitor(), iter(loader)
    while chunk := list(islice(batches, accumulate)):  # in place of accelerator.accumulate
        closures = [partial(losses, model, batch) for batch in chunk]
        optimizer.zero_grad()
        result = mtl.backward(closures, parameters, scaler=accelerator.scaler)  # in place of accelerator.backward
        accelerator.clip_grad_norm_(model.parameters(), clip)  # unscales
        optimizer.step()  # unless the scaler skips it; updates the scaler
        if not result.skipped:
            schedule.step()
        monitor.update(result)
    return monitor


if __name__ == "__main__":
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="fp16" if torch.cuda.is_available() else "bf16")
    inputs = torch.randn(1280, 10)
    samples = [{"x": x, "sum": x.sum(0, keepdim=True), "sign": (x[0] * x[1] > 0).long()} for x in inputs]
    model, loader = TwoHeads(), torch.utils.data.DataLoader(samples, 32, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5 * 20)
    model, loader, optimizer, schedule = accelerator.prepare(model, loader, optimizer, schedule)
    parameters = split_parameters(model, partial(losses, model, next(iter(loader))), list(LOSS))
    mtl = FlatMTL(CAGrad(), SAM(rho=0.05))
    for _ in range(5):
        train_epoch(accelerator, mtl, parameters, model, loader, optimizer, schedule).log(accelerator.print)
