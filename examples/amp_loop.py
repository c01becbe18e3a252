"""All of a plain loop: mixed precision, accumulation, clipping, a schedule. Run: ``python examples/amp_loop.py``."""

from functools import partial
from itertools import islice

import torch
from torch import nn

from flatmtl import SAM, FlatMTL, Monitor, split_parameters
from flatmtl.aggregators import CAGrad

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.float16 if DEVICE.type == "cuda" else torch.bfloat16  # bfloat16 has float32's range and needs no scaler
LOSS = {"sum": nn.functional.mse_loss, "sign": nn.functional.cross_entropy}


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 64), nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.1))
        self.heads = nn.ModuleDict({"sum": nn.Linear(64, 1), "sign": nn.Linear(64, 2)})


def losses(model, batch, tasks):
    with torch.autocast(DEVICE.type, HALF):  # around forward pass and loss only
        z = model.encoder(batch["x"])
        return {t: LOSS[t](model.heads[t](z), batch[t]) for t in tasks}


def train_epoch(model, loader, mtl, parameters, optimizer, schedule, scaler, accumulate=2, clip=1.0) -> Monitor:
    monitor, batches = Monitor(), iter(loader)
    while chunk := list(islice(batches, accumulate)):
        closures = [partial(losses, model, batch) for batch in chunk]  # neither scaled nor divided
        optimizer.zero_grad()
        result = mtl.backward(closures, parameters, scaler=scaler)
        monitor.update(result)
        if result.empty:  # no task has labels: there is nothing to unscale
            continue
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        if not result.skipped:
            schedule.step()
    return monitor


if __name__ == "__main__":
    torch.manual_seed(0)
    inputs = [torch.randn(32, 10, device=DEVICE) for _ in range(40)]
    loader = [{"x": x, "sum": x.sum(1, keepdim=True), "sign": (x[:, 0] * x[:, 1] > 0).long()} for x in inputs]
    model = TwoHeads().to(DEVICE)
    parameters = split_parameters(model, partial(losses, model, loader[0]), list(LOSS))
    mtl = FlatMTL(CAGrad(), SAM(rho=0.05))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=5 * 20)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=torch.float16 == HALF)
    for epoch in range(1, 6):
        means = train_epoch(model, loader, mtl, parameters, optimizer, schedule, scaler).compute()
        print(f"epoch {epoch}", *(f"{name} {means[name]:.3f}" for name in ("loss/sum", "loss/sign", "skipped")))
