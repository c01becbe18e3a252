"""timm: its model, optimizer, scaler, clipping, schedule and EMA. Run: ``python examples/timm_loop.py``."""

from functools import partial
from itertools import islice

import timm
import torch
from timm import optim, scheduler, utils
from torch import nn

from flatmtl import SAM, FlatMTL, Monitor, split_parameters
from flatmtl.aggregators import CAGrad

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class FlatScaler(utils.NativeScaler):  # timm's, with flatmtl's backward pass
    def __call__(self, mtl, closures, parameters, optimizer, clip_grad=None, clip_mode="norm"):
        result = mtl.backward(closures, parameters, scaler=self._scaler)
        self._scaler.unscale_(optimizer)
        if clip_grad is not None:
            utils.dispatch_clip_grad(parameters.everything, clip_grad, mode=clip_mode)
        self._scaler.step(optimizer)
        self._scaler.update()
        return result


def losses(model, batch, tasks):
    with torch.autocast(DEVICE):
        z = model["trunk"](batch["x"])
        return {t: nn.functional.cross_entropy(model[t](z), batch[t]) for t in tasks}


def train_epoch(model, loader, mtl, parameters, optimizer, schedule, scaler, ema, updates=0, accumulate=2, clip=1.0):
    monitor, batches = Monitor(), iter(loader)
    while chunk := list(islice(batches, accumulate)):
        optimizer.zero_grad()
        result = scaler(mtl, [partial(losses, model, batch) for batch in chunk], parameters, optimizer, clip_grad=clip)
        monitor.update(result)
        if not result.skipped:
            updates += 1
            schedule.step_update(updates)
            ema.update(model, step=updates)
    return updates, monitor


if __name__ == "__main__":
    torch.manual_seed(0)
    trunk = timm.create_model("test_efficientnet", pretrained=False, num_classes=0, drop_path_rate=0.1)
    model = nn.ModuleDict({"trunk": trunk, "red": nn.Linear(256, 2), "green": nn.Linear(256, 2)}).to(DEVICE)
    colours, x = torch.randint(2, (192, 3), device=DEVICE), torch.rand(192, 3, 32, 32, device=DEVICE)
    x += colours[:, :, None, None]
    loader = [{"x": x[i::12], "red": colours[i::12, 0], "green": colours[i::12, 1]} for i in range(12)]
    parameters, updates = split_parameters(model, partial(losses, model, loader[0]), ["red", "green"]), 0
    mtl, scaler, ema = FlatMTL(CAGrad(), SAM(rho=0.05)), FlatScaler(DEVICE), utils.ModelEmaV3(model, decay=0.9)
    optimizer = optim.create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    schedule, _ = scheduler.create_scheduler_v2(optimizer, num_epochs=3, step_on_epochs=False, updates_per_epoch=6)
    for _ in range(3):
        updates, monitor = train_epoch(model, loader, mtl, parameters, optimizer, schedule, scaler, ema, updates)
        monitor.log(print)
