"""Lightning: a mixin for any module, by manual optimisation. Run: ``python examples/lightning_module.py``."""

import lightning as L
from torch import nn, optim, randn, utils

from flatmtl import SAM, FlatMTL, Monitor, aggregators, split_parameters


class FlatTraining:  # trains by self.mtl the losses that self.losses(batch, tasks) returns for self.tasks
    automatic_optimization, accumulate, clip, task_parameters = False, 1, 0.0, None  # the Trainer clips no longer

    def on_train_epoch_start(self):
        self.mtl.start_epoch(self.current_epoch, self.trainer.max_epochs)
        self.closures, self.monitor = [], Monitor()

    def training_step(self, batch, batch_idx):
        self.closures.append(lambda tasks: self.losses(batch, tasks))
        if len(self.closures) == self.accumulate or self.trainer.is_last_batch:
            closures, self.closures, optimizer = self.closures, [], self.optimizers()
            self.task_parameters = self.task_parameters or split_parameters(self, closures, self.tasks)
            optimizer.zero_grad()
            self.monitor.update(result := self.mtl.backward(closures, self.task_parameters, scaler=self.trainer.scaler))
            if not result.empty:
                optimizer.step()  # Lightning unscales, calls the hook below, steps, and updates the scaler
            if not result.skipped:
                self.step_schedules("step")

    def on_before_optimizer_step(self, optimizer):
        self.clip_gradients(optimizer, self.clip, "norm")

    def on_train_epoch_end(self):
        self.monitor.log(self.log_dict)
        self.step_schedules("epoch")

    def step_schedules(self, interval):  # which manual optimisation leaves to the module
        for config in filter(lambda config: config.interval == interval, self.trainer.lr_scheduler_configs):
            config.scheduler.step()


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
        return optim.SGD(self.parameters(), lr=0.1, momentum=0.9)  # and schedules, as always


if __name__ == "__main__":
    samples = [{"x": x, "sum": x.sum(0, keepdim=True), "max": x.amax(0, keepdim=True)} for x in randn(1280, 10)]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = L.Trainer(max_epochs=5, precision="bf16-mixed", **quiet)
    trainer.fit(TwoHeads(FlatMTL(aggregators.CAGrad(), SAM(0.05))), utils.data.DataLoader(samples, 32, shuffle=True))
    print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})
