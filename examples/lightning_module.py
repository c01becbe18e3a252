"""Lightning: a mixin for any module, by manual optimisation. Run: ``python examples/lightning_module.py``."""

import lightning as L
import torch
from torch import nn

from flatmtl import SAM, FlatMTL, Monitor, split_parameters
from flatmtl.aggregators import CAGrad


class FlatTraining:  # trains by self.mtl the losses that self.losses(batch, tasks) returns for self.tasks
    automatic_optimization = False  # then the Trainer refuses accumulation and clipping; they are here instead:
    accumulate, clip, task_parameters = 1, 0.0, None

    def on_train_epoch_start(self):
        self.mtl.start_epoch(self.current_epoch, self.trainer.max_epochs)
        self.closures, self.monitor = [], Monitor()

    def training_step(self, batch, batch_idx):
        self.closures.append(lambda tasks: self.losses(batch, tasks))
        if len(self.closures) == self.accumulate or self.trainer.is_last_batch:
            self.task_parameters = self.task_parameters or split_parameters(self, self.closures[0], self.tasks)
            optimizer, schedule = self.optimizers(), self.lr_schedulers()
            optimizer.zero_grad()
            result = self.mtl.backward(self.closures, self.task_parameters, scaler=self.trainer.scaler)
            optimizer.step()  # Lightning unscales, calls the hook below, steps, and updates the scaler
            if schedule is not None and not result.skipped:
                schedule.step()
            self.monitor.update(result)
            self.closures = []

    def on_before_optimizer_step(self, optimizer):
        self.clip_gradients(optimizer, self.clip, "norm")

    def on_train_epoch_end(self):
        self.monitor.log(self.log_dict)


class TwoHeads(FlatTraining, L.LightningModule):
    def __init__(self, mtl, accumulate=2, clip=1.0):
        super().__init__()
        self.mtl, self.tasks, self.accumulate, self.clip = mtl, ["sum", "max"], accumulate, clip
        self.trunk = nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1))
        self.heads = nn.ModuleDict({task: nn.Linear(64, 1) for task in self.tasks})

    def losses(self, batch, tasks):
        z = self.trunk(batch["x"])
        return {t: nn.functional.mse_loss(self.heads[t](z), batch[t]) for t in tasks}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)]


if __name__ == "__main__":
    samples = [{"x": x, "sum": x.sum(0, keepdim=True), "max": x.amax(0, keepdim=True)} for x in torch.randn(1280, 10)]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = L.Trainer(max_epochs=5, precision="bf16-mixed", **quiet)
    trainer.fit(TwoHeads(FlatMTL(CAGrad(), SAM(rho=0.05))), torch.utils.data.DataLoader(samples, 32, shuffle=True))
    print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})
