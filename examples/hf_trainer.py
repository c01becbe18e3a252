"""Hugging Face: a Trainer that trains several heads by flatmtl. Run: ``python examples/hf_trainer.py``."""

from tempfile import TemporaryDirectory

import torch
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

from flatmtl import SAM, FlatMTL, Monitor, aggregators, split_parameters


class FlatTrainer(Trainer):
    def __init__(self, *args, mtl, tasks, **kwargs):
        super().__init__(*args, **kwargs)
        self.mtl, self.tasks, self.task_parameters = mtl, tasks, None
        self.closures, self.monitor = [], Monitor()

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        self.closures.append(lambda tasks: model(**inputs, tasks=tasks))
        if not self.accelerator.sync_gradients:  # more micro-batches follow before the Trainer clips and steps
            return torch.zeros((), device=self.args.device)
        closures, self.closures = self.closures, []
        self.task_parameters = self.task_parameters or split_parameters(model, closures, self.tasks)
        self.optimizer.zero_grad()  # the Trainer clears the model's gradients, not those of mtl.parameters()
        result = self.mtl.backward(closures, self.task_parameters, scaler=self.accelerator.scaler)
        self.optimizer._is_overflow = result.skipped  # so that the schedule waits, with a scaler or without
        self.monitor.update(result)
        return result.losses.nansum().to(self.args.device, torch.float32)  # of the whole batch: the Trainer adds up

    def log(self, logs, *args):
        if "loss" in logs:
            self.monitor.log(logs.update)
            self.monitor.reset()
        super().log(logs, *args)


class TwoHeads(torch.nn.Module):
    def __init__(self, size=16):
        super().__init__()
        options = {"vocab_size": 30, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 2 * size}
        self.encoder = BertModel(BertConfig(hidden_size=size, **options), add_pooling_layer=False)
        self.heads = torch.nn.ModuleDict({"first": torch.nn.Linear(size, 30), "even": torch.nn.Linear(size, 2)})

    def forward(self, input_ids, first, even, tasks=("first", "even")):
        z, targets = self.encoder(input_ids).last_hidden_state[:, 0], {"first": first, "even": even}
        losses = {t: torch.nn.functional.cross_entropy(self.heads[t](z), targets[t]) for t in tasks}
        return {"loss": sum(losses.values()), **losses}


if __name__ == "__main__":
    torch.manual_seed(0)
    words = torch.randint(30, (512, 8))
    data = [{"input_ids": w, "first": w[0], "even": w[1] % 2} for w in words]
    options = {"bf16": True, "use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    options |= {"max_steps": 60, "logging_steps": 20, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    options |= {"label_names": ["first", "even"]}  # for the loss of an evaluation
    with TemporaryDirectory() as folder:
        trainer = {"args": TrainingArguments(folder, **options), "train_dataset": data, "tasks": ["first", "even"]}
        FlatTrainer(TwoHeads(), **trainer, mtl=FlatMTL(aggregators.CAGrad(), SAM(rho=0.05))).train()
