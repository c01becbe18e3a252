"""The training loop: one for every data set and every method, on Lightning Fabric."""

import inspect
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
from lightning.fabric import Fabric, seed_everything
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.data import DataLoader, default_collate

from flatmtl import ASAM, SAM, FlatMTL, Monitor, StepResult, aggregators, split_parameters
from flatmtl.aggregators import AGGREGATORS
from flatmtl_bench import data, models
from flatmtl_bench.analysis.sharpness import Closure, sharpness
from flatmtl_bench.environment import environment
from flatmtl_bench.metrics import Classification
from flatmtl_bench.protocols import Row, outcome
from flatmtl_bench.randomness import derived_seed, random_state, set_random_state
from flatmtl_bench.recipes.config import Config, Split
from flatmtl_bench.runs import RunError, RunFolder

Targets = Mapping[str, Tensor]
Watch = Callable[[int, int, Row | None], None]
"""Is told the steps done, all steps of the run, and the metrics of an epoch that has just ended, else None."""


def unwatched(_done: int, _total: int, _row: Row | None) -> None:
    """Do nothing: the run shows in its folder only."""


class Trainer:
    """Everything that a run needs, made from its config: data, model, optimizer and the multi-task step.

    Making it does not write anything, and it is where a bad value of the config is found.

    Attributes:
        config: as given, but with the source of the data that ``auto`` came to.
        data: the data set of each split.
        tasks: names of the tasks.

    Raises:
        ValueError, OSError: the config is wrong, or the data are missing or broken.
    """

    def __init__(self, config: Config) -> None:
        self.fabric = _fabric(config)
        seed_everything(config.seed, verbose=False)
        splits: list[Split] = ["train", "validation", "test"] if config.data.validation_share else ["train", "test"]
        self.data: dict[str, Any] = {split: _dataset(config, split) for split in splits}
        self.config = replace(config, source=self.data["train"].source)
        self.classes = _classes(config, self.data["train"].classes)
        self.tasks = tuple(self.classes)
        self.mtl = _mtl(self.config, len(self.tasks))
        self._make_model()
        self.parameters = split_parameters(self.model, self._sample(2)[0], self.tasks)

    def _make_model(self) -> None:
        channels = self.data["train"][0][0].shape[0]
        model = models.build(self.config.model, self.classes, in_channels=channels)
        optimizer = _optimizer(self.config, model.parameters(), self.mtl.parameters())
        wrapped, self.optimizer = self.fabric.setup(model, optimizer)
        self.model: nn.Module = wrapped.module
        self.precision = self.fabric.strategy.precision
        self.scaler = getattr(self.precision, "scaler", None)

    def fit(self, folder: RunFolder, watch: Watch = unwatched) -> dict[str, Any]:
        """Train from where the folder's checkpoint stands, if there is one, to the end; return the summary.

        The folder gets metrics and checkpoint after each epoch, and the summary in the end.

        Raises:
            FloatingPointError: naming task, step and epoch at which a loss or gradient is not finite.
        """
        start, steps = self._restore(folder), len(self._loader("train"))
        folder.write_environment(environment())
        for epoch in range(start + 1, self.config.epochs + 1):
            row = self._epoch(epoch, watch)
            folder.append(row)
            folder.write("checkpoint.pt", self._checkpoint(epoch))
            watch(epoch * steps, self.config.epochs * steps, row)
        summary = self._summary(folder.rows())
        folder.finish(summary)
        return summary

    def _epoch(self, epoch: int, watch: Watch) -> dict[str, Any]:
        """Train for one epoch and evaluate; return the metrics."""
        started = perf_counter()
        row: dict[str, Any] = {"epoch": epoch}
        training, step_seconds = self._train(epoch, watch)
        row |= {f"train/{name}": value for name, value in training.items()}
        for split in self.data:
            if split != "train":
                row |= {f"{split}/{name}": value for name, value in self.evaluate(split).items()}
        return {**row, "seconds": perf_counter() - started, "step_seconds": step_seconds}

    def _train(self, epoch: int, watch: Watch) -> tuple[dict[str, float], float]:
        """Return the means over the steps of one epoch, and the median time of a step."""
        self.model.train()
        self.mtl.start_epoch(epoch, self.config.epochs)
        monitor, seconds = Monitor(), []
        loader = self._loader("train", derived_seed(self.config.seed, epoch))
        for step, (inputs, targets) in enumerate(loader, start=1):
            started = perf_counter()
            try:
                monitor.update(self._step(inputs, targets))
            except FloatingPointError as error:
                raise FloatingPointError(f"epoch {epoch}, step {step}: {error}") from error
            seconds.append(perf_counter() - started)
            watch((epoch - 1) * len(loader) + step, self.config.epochs * len(loader), None)
        return monitor.compute(), median(seconds)

    def _step(self, inputs: Tensor, targets: Targets) -> StepResult:
        closure = self._closure(inputs, targets)
        self.optimizer.zero_grad()
        result = self.mtl.backward(closure, self.parameters, scaler=self.scaler)
        self.optimizer.step()
        self.mtl.after_step(closure)
        return result

    @torch.no_grad()
    def evaluate(self, split: str) -> dict[str, float]:
        """Return loss and accuracy on one split, of each task and their means over the tasks."""
        self.model.eval()
        scores = {task: Classification(classes) for task, classes in self.classes.items()}
        for inputs, targets in self._loader(split):
            with self.precision.forward_context():
                outputs = self.model(self.precision.convert_input(inputs))
            for task, score in scores.items():
                score.update(outputs[task], targets[task])
        values = {task: score.compute() for task, score in scores.items()}
        names = list(next(iter(values.values())))
        means = {name: sum(v[name] for v in values.values()) / len(values) for name in names}
        return {**means, **{f"{name}/{task}": v[name] for task, v in values.items() for name in names}}

    def _loader(self, split: str, seed: int | None = None) -> DataLoader[tuple[Tensor, Targets]]:
        """Return the batches of a split, shuffled by a generator of their own if there is a seed."""
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        loader = DataLoader(self.data[split], self.config.batch_size, shuffle=seed is not None, generator=generator)
        return cast(DataLoader[tuple[Tensor, Targets]], self.fabric.setup_dataloaders(loader))

    def _closure(self, inputs: Tensor, targets: Targets) -> Closure:
        def closure(tasks: Sequence[str]) -> dict[str, Tensor]:
            with self.precision.forward_context():
                outputs = self.model(self.precision.convert_input(inputs), tasks)
                return {task: Classification.loss(outputs[task], targets[task]) for task in tasks}

        return closure

    def _sample(self, size: int) -> list[Closure]:
        """Return closures on a fixed sample of the training data, evenly spaced, in parts of about one size."""
        size = min(size, len(self.data["train"]))
        indices = torch.linspace(0, len(self.data["train"]) - 1, size).long()
        parts = indices.tensor_split(math.ceil(size / self.config.batch_size))
        batches = (default_collate([self.data["train"][i] for i in part.tolist()]) for part in parts)
        return [self._closure(*self.fabric.to_device(batch)) for batch in batches]

    def _checkpoint(self, epoch: int) -> bytes:
        state = {
            "epoch": epoch,
            "data": self.data["test"].fingerprint,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "mtl": self.mtl.state_dict(),
            "precision": self.precision.state_dict(),
            "random": random_state(),
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        return buffer.getvalue()

    def check_data(self, folder: RunFolder, fingerprint: str | None = None) -> None:
        """Raise if the run in the folder was made with other test data; ``None``: those its summary names.

        Raises:
            RunError: naming the folder.
        """
        made_with = folder.summary().get("fingerprint") if fingerprint is None else fingerprint
        if made_with != self.data["test"].fingerprint:
            raise RunError(
                f"{folder.path} was made with other data than those in {self.config.root or 'data'}. Give the --root "
                "that it was made with, choose another --out, or use --overwrite to start again."
            )

    def _restore(self, folder: RunFolder) -> int:
        """Take over the folder's checkpoint and return its epoch, 0 if there is none."""
        path = folder.path / "checkpoint.pt"
        if not path.exists():
            folder.cut_back(0)
            return 0
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file can raise nearly anything
            raise RunError(
                f"{path} is broken (no checkpoint of a run: {type(error).__name__}). Use --overwrite to start again."
            ) from error
        self.check_data(folder, state["data"])
        folder.cut_back(state["epoch"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.mtl.load_state_dict(state["mtl"])
        self.precision.load_state_dict(state["precision"])
        set_random_state(state["random"])
        return state["epoch"]

    def _summary(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what the run came to; the sharpness is that of the final model."""
        wanted = self.config.sharpness
        measured = None
        if wanted.samples:
            measured = sharpness(self.model, self._sample(wanted.samples), self.parameters, wanted.rho)
        return {
            "recipe": self.config.recipe,
            "seed": self.config.seed,
            "data": {split: str(dataset) for split, dataset in self.data.items()},
            "fingerprint": self.data["test"].fingerprint,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            **outcome(rows, self.config.protocol),
            "sharpness": measured,
            "seconds": sum(row["seconds"] for row in rows),
            "step_seconds": median(row["step_seconds"] for row in rows),
        }


def _fabric(config: Config) -> Fabric:
    try:
        return Fabric(accelerator=config.device, devices=1, precision=config.precision)
    except RuntimeError as error:
        raise ValueError(
            f"there is no device {config.device!r} on this machine. Use --device auto. ({error})"
        ) from None


def _dataset(config: Config, split: Split) -> Any:
    options = config.data.options(split)
    return data.build(config.data.name, split, seed=config.seed, root=config.root, source=config.source, **options)


def _classes(config: Config, classes: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the number of classes of each task that is trained.

    Raises:
        ValueError: if the task that is to be trained alone is none of the data's.
    """
    if config.task is not None and config.task not in classes:
        raise ValueError(f"{config.data.name} has no task {config.task!r}. Its tasks: {', '.join(classes)}.")
    return {task: len(names) for task, names in classes.items() if config.task in (None, task)}


def _optimizer(config: Config, parameters: Iterable[Parameter], weighting: Iterable[Parameter]) -> Optimizer:
    """Return the optimizer of a network, and of what a loss weighting trains, which does not decay."""
    chosen = config.optimizer
    groups: list[dict[str, Any]] = [{"params": list(parameters)}, {"params": list(weighting), "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if chosen.name == "sgd":
        return SGD(groups, chosen.lr, momentum=chosen.momentum, weight_decay=chosen.weight_decay)
    make = {"adam": Adam, "adamw": AdamW}[chosen.name]
    return make(groups, chosen.lr, weight_decay=chosen.weight_decay)


def _mtl(config: Config, tasks: int) -> FlatMTL:
    method = config.method
    perturbation = _perturbation(config)
    return FlatMTL(_aggregator(config, tasks), perturbation, combine=method.combine, flat_scale=method.flat_scale)


def _aggregator(config: Config, tasks: int) -> Any:
    """Return the aggregator, told the seed of the run and the number of tasks if it wants to know them."""
    name, options = config.method.aggregator, dict(config.method.options)
    known = {"seed": config.seed, "tasks": tasks}
    accepted = inspect.signature(AGGREGATORS[name]).parameters if name in AGGREGATORS else {}
    options = {option: value for option, value in known.items() if option in accepted} | options
    try:
        return aggregators.build(name, **options)
    except (TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(
            f"bad --method.options {options}: {error} Give all options that the aggregator {name} shall have, or "
            "--method.options alone for none."
        ) from None


def _perturbation(config: Config) -> SAM | None:
    method = config.method
    if method.perturbation == "none":
        return None
    make = {"sam": SAM, "asam": ASAM}[method.perturbation]
    return make(config.rho, rho_heads=method.rho_heads, norm=method.norm)
