"""The training loop: one for every data set and every method, on Lightning Fabric."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from lightning.fabric import seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flatmtl import StepResult, TaskParameters
from flatmtl_bench import assembly, schedules
from flatmtl_bench.analysis.batches import Batches, Closure
from flatmtl_bench.analysis.sharpness import sharpness
from flatmtl_bench.data.batches import BatchIndices
from flatmtl_bench.loggers import check_installed
from flatmtl_bench.memory import held, rise
from flatmtl_bench.metrics import Meters
from flatmtl_bench.position import Position
from flatmtl_bench.protocols import Row, epochs_without_improvement, outcome
from flatmtl_bench.provenance import Provenance
from flatmtl_bench.randomness import RandomStreams, derived_seed
from flatmtl_bench.ranks import (
    EachRank,
    any_rank,
    average_buffers,
    check_same,
    launch,
    over_all_ranks,
    process_group,
    take_from_rank_zero,
    together,
)
from flatmtl_bench.recipes.config import Config, Split
from flatmtl_bench.record import Record
from flatmtl_bench.runs import RunError, RunFolder, finite

Targets = Mapping[str, Tensor]
Watch = Callable[[int, int, Row | None], None]
"""Is told the steps done, all steps of the run, and the metrics of an epoch that has just ended, else None."""


def unwatched(_done: int, _total: int, _row: Row | None) -> None:
    """Do nothing: the run shows in its folder only."""


class Stopped(Exception):
    """A run was asked to stop; it has ended its step and saved where it stands."""


class Trainer:
    """Everything that a run needs, made from its config: data, model, optimizer and the multi-task step.

    Making it does not write anything, and it is where a bad value of the config is found.

    Attributes:
        config: as given, but with the source of the data that ``auto`` came to.
        data: the data set of each split.
        tasks: names of the tasks.
        provenance: what tells from others what was made by this run.

    Raises:
        ValueError, OSError: the config is wrong, or the data are missing or broken.
    """

    def __init__(self, config: Config) -> None:
        check_installed(config.loggers)
        self.fabric = launch(config)
        seed_everything(config.seed, verbose=False)
        self._load_data(config)
        with together(self.fabric):
            self.objectives = assembly.trained(config, self.data["train"].objectives)
            self.tasks = tuple(self.objectives)
            self.mtl = assembly.flat_mtl(self.config, len(self.tasks), process_group(self.fabric))
            self._make_model()
            self.parameters = self._split_parameters()
        take_from_rank_zero(self.fabric, self.model)
        self.position = Position()
        self._stopping = False
        if rank := self.fabric.global_rank:  # so that no two ranks drop the same; rank 0 draws what it would draw alone
            seed_everything(derived_seed(config.seed, 0, rank) % 2**32, verbose=False)

    def _load_data(self, config: Config) -> None:
        splits: list[Split] = ["train", "validation", "test"] if config.data.validation_share else ["train", "test"]
        for turn in (True, False):  # the first process of each machine goes ahead: it may have to download
            with together(self.fabric):
                if (self.fabric.local_rank == 0) == turn:
                    self.data = {split: assembly.dataset(config, split) for split in splits}
        check_same(self.fabric, "data", {split: f"{data} {data.fingerprint}" for split, data in self.data.items()})
        self.config = replace(config, source=self.data["train"].source)
        self.provenance = Provenance.of(self.config, self.data)

    def _make_model(self) -> None:
        """Make model, optimizer and schedule. No wrapper averages gradients over the ranks: the step does."""
        channels = self.data["train"][0][0].shape[0]
        self.precision = self.fabric.strategy.precision
        self.scaler = getattr(self.precision, "scaler", None)
        model = assembly.model(self.config, self.objectives, channels)
        model = over_all_ranks(self.fabric, self.precision.convert_module(model))
        self.model: nn.Module = self.fabric.to_device(model)
        optimizer = assembly.optimizer(self.config, self.model.parameters(), self.mtl.parameters())
        self.steps_per_epoch = len(BatchIndices(len(self.data["train"]), self.config.batch_size))
        plan = {"steps": self.steps_per_epoch, "epochs": self.config.epochs}
        self.schedule = schedules.build(self.config.schedule, optimizer, **plan)
        self.optimizer: Any = self.fabric.setup_optimizers(optimizer)

    def _split_parameters(self) -> TaskParameters:
        """Return whose the parameters are, found from a batch as small as the smallest of an epoch."""
        smallest = min(2, (len(self.data["train"]) - 1) % self.config.batch_size + 1)
        try:
            return assembly.parameters(self.config, self.model, self._sample(smallest)[0], self.tasks)
        except ValueError as error:
            if "Expected more than 1 value per channel" in str(error):  # of batch normalisation
                raise ValueError(
                    f"the last batch of an epoch is one item of {len(self.data['train'])}, which {self.config.model} "
                    f"cannot be trained on: {error}. Choose another --batch-size or --data.train-samples."
                ) from error
            raise

    def fit(
        self,
        folder: RunFolder | None,
        watch: Watch = unwatched,
        *,
        checkpoint_every: int = 0,
        keep_every: int = 0,
        log_every: int = 0,
    ) -> dict[str, Any]:
        """Train from where the folder's last checkpoint stands, if there is one, to the end; return the summary.

        The folder gets a checkpoint and the metrics after each epoch, and the summary in the end.

        Args:
            folder: of the run; None on all ranks but 0, which reads and writes it.
            watch: is told of every step and epoch.
            checkpoint_every: steps between checkpoints within an epoch; 0: there are none.
            keep_every: epochs between snapshots of the weights; 0: there are none.
            log_every: steps between points of the live log; 0: there is none.

        Raises:
            FloatingPointError: naming task, step and epoch at which a loss or gradient is not finite.
            Stopped: after :meth:`stop`; where the run stands is saved.
            RunError: the folder holds what no run can go on from.
            WriteError: a file cannot be written; the last checkpoint is as it was.
        """
        with Record(self.fabric, folder, self.config.loggers, keep_every, log_every) as record:
            self._restore(record)
            record.begin(self.position.rows, self.position.times, self._steps_done())
            try:
                while not self._is_over():
                    row = self._epoch(record, watch, checkpoint_every)
                    self._end_epoch(record, row)
                    self._tell(watch, row)
            except Stopped:
                if self.position.steps:
                    self._save(record)
                raise
            summary = self._summary()
            record.finish(summary)
            return summary

    def seconds(self, steps: int = 3) -> float:
        """Return about how long a run takes here, judged from some steps and the evaluation of a batch.

        The steps train the model, so the trainer is of no further use. The sharpness in the end is left out.
        """
        size = self.config.batch_size
        closure = self._sample(size)[0]
        load = self._timed(lambda: self._sample(size))  # again: what is rendered is kept
        self.model.train()
        step = sorted(self._timed(lambda: self._step(closure)) for _ in range(steps + 1))[steps // 2]
        self.model.eval()
        with torch.no_grad():
            forward = self._timed(lambda: closure(self.tasks))
        evaluated = sum(len(data) for split, data in self.data.items() if split != "train") / size
        return self.config.epochs * (self.steps_per_epoch * (load + step) + evaluated * (load + forward))

    def _timed(self, work: Callable[[], Any]) -> float:
        started = perf_counter()
        work()
        if self.fabric.device.type == "cuda":
            torch.cuda.synchronize(self.fabric.device)
        return perf_counter() - started

    def _is_over(self) -> bool:
        """Whether there is no further epoch, or no better score for as long as early stopping waits for one."""
        patience, rows = self.config.early_stop.patience, self.position.rows
        waited = 0 if patience is None else epochs_without_improvement(rows, self.config.protocol)
        return len(rows) >= self.config.epochs or (patience is not None and waited >= patience)

    def means(self) -> Row:
        """Return the means over the steps of the epoch under way."""
        return self.position.monitor.compute()

    def stop(self) -> None:
        """Let :meth:`fit` end the step under way, save, and raise :class:`Stopped`."""
        self._stopping = True

    def _check_stop(self) -> None:
        """Raise if the run shall stop on some rank: called where what is saved is a whole number of steps."""
        if any_rank(self.fabric, self._stopping):
            here = self.position
            raise Stopped(
                f"stopped after {here.epochs} finished epochs and {here.steps} of {self.steps_per_epoch} steps."
            )

    def _epoch(self, record: Record, watch: Watch, checkpoint_every: int) -> dict[str, Any]:
        """Train for one epoch, or the rest of it, and evaluate; return the metrics."""
        for result in self._steps():
            record.step(result, self._steps_done())
            self._tell(watch)
            if checkpoint_every and self.position.steps % checkpoint_every == 0:
                self._save(record)
        average_buffers(self.fabric, self.model)
        row = {f"train/{name}": value for name, value in self.position.monitor.compute().items()}
        for split in self.data:
            if split != "train":
                row |= {f"{split}/{name}": value for name, value in self.evaluate(split).items()}
        rate = self.schedule.get_last_lr()[0]  # with which the next step is made
        return {"epoch": self.position.epochs + 1, "learning_rate": rate, **row}

    def _steps(self) -> Iterator[StepResult]:
        """Do the steps of an epoch that are left; yields what each told."""
        here, epoch = self.position, self.position.epochs + 1
        self.model.train()
        if here.steps == 0:
            self.mtl.start_epoch(epoch, self.config.epochs)
        self.data["train"].start_epoch(epoch)
        for inputs, targets, share in self._batches("train", derived_seed(self.config.seed, epoch), here.steps):
            self._check_stop()
            started = perf_counter()
            try:
                result = self._step(self._closure(inputs, targets, share))
                here.monitor.update(result)
            except FloatingPointError as error:
                raise FloatingPointError(f"epoch {epoch}, step {here.steps + 1}: {error}") from error
            here.end_step(perf_counter() - started)
            yield result

    def _step(self, closure: Closure) -> StepResult:
        self.optimizer.zero_grad()
        result = self.mtl.backward(closure, self.parameters, scaler=self.scaler)
        self.optimizer.step()
        self.mtl.after_step(closure)
        self.schedule.step()
        return result

    def _end_epoch(self, record: Record, row: dict[str, Any]) -> None:
        """Save what the epoch came to: the checkpoint first, from which the other files can be made again."""
        self.position.end_epoch(finite(row))
        record.keep(self.model.state_dict(), self.position.epochs)
        self._save(record)
        record.append(self.position.rows[-1], self.position.times[-1])

    def _steps_done(self) -> int:
        return self.position.epochs * self.steps_per_epoch + self.position.steps

    def _tell(self, watch: Watch, row: Row | None = None) -> None:
        watch(self._steps_done(), self.config.epochs * self.steps_per_epoch, row)

    @torch.no_grad()
    def evaluate(self, split: str) -> dict[str, float]:
        """Return what one split comes to: of each task its loss, metrics and score, and the means of what all have."""
        self.model.eval()
        meters = Meters(self.objectives, self.config.averaging)
        for inputs, targets, share in self._batches(split):
            self._check_stop()
            if share == 0.0:
                continue
            with self.precision.forward_context():
                outputs = self._outputs(inputs, self.tasks)
            meters.update(outputs, targets)
        return meters.compute()

    def _batches(self, split: str, seed: int | None = None, start: int = 0) -> Iterator[tuple[Tensor, Targets, float]]:
        """Yield this rank's slices of the batches of a split from one on, and what the mean over each counts for.

        They are shuffled if there is a seed. No random stream is touched.
        """
        generator = torch.Generator()
        order = None if seed is None else generator.manual_seed(seed)
        data, mine = self.data[split], {"rank": self.fabric.global_rank, "ranks": self.fabric.world_size}
        batches = BatchIndices(len(data), self.config.batch_size, generator=order, start=start, **mine)
        loader = DataLoader(data, batch_sampler=batches, generator=generator, num_workers=self.config.workers)
        loader = self.fabric.setup_dataloaders(loader, use_distributed_sampler=False)
        for share, (inputs, targets) in zip(batches.shares(), loader, strict=True):
            yield inputs, targets, share

    def _outputs(self, inputs: Tensor, tasks: Sequence[str]) -> Mapping[str, Tensor]:
        """Return task -> output of the model."""
        outputs = self.model(self.precision.convert_input(inputs), tasks)
        if not isinstance(outputs, Mapping) or not {*tasks} <= {*outputs}:
            found = sorted(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
            raise ValueError(
                f"model {self.config.model} returned {found}; expected {{task: output}} for the tasks it was called "
                f"with: {', '.join(tasks)}."
            )
        return outputs

    def _closure(self, inputs: Tensor, targets: Targets, share: float = 1.0) -> Closure:
        """Return the closure of a batch: the mean loss, times what it counts for among those of other ranks.

        A task of which the batch has no valid label takes no part.
        """

        def closure(tasks: Sequence[str]) -> dict[str, Tensor | None]:
            with self.precision.forward_context():
                outputs = self._outputs(inputs, tasks)
                losses = {task: self.objectives[task].loss(outputs[task], targets[task]) for task in tasks}
            if share == 1.0:
                return losses
            return {task: None if loss is None else share * loss for task, loss in losses.items()}

        return closure

    def _sample(self, size: int) -> list[Closure]:
        """Return closures on a fixed sample of the training data, evenly spaced, in parts of about one size."""
        parts = Batches(self.data["train"].clean, self.config.batch_size, size)
        return [self._closure(*self.fabric.to_device(part)) for part in parts]

    def _parts(self) -> dict[str, Any]:
        """Return everything whose state decides how the run goes on; the random streams last, as others draw."""
        return {
            "position": self.position,
            "model": self.model,
            "optimizer": self.optimizer,
            "mtl": self.mtl,
            "precision": self.precision,
            "schedule": self.schedule,
            "random": EachRank(self.fabric, RandomStreams()),
        }

    def _save(self, record: Record) -> None:
        """Write a checkpoint, and keep that of the last epoch which counts under the protocol."""
        here = self.position
        average_buffers(self.fabric, self.model)
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        best = outcome(here.rows, self.config.protocol)["epochs"][-1] if here.rows else None
        record.save(self.provenance.state_dict() | parts, here.epochs, here.steps, best)

    def _restore(self, record: Record) -> None:
        """Go on from the last checkpoint, or from the start if there is none."""
        found = record.last_checkpoint()
        if found is None:
            self.position.begin_epoch()
            return
        with together(self.fabric):
            self._take_over(*found)

    def _take_over(self, path: str, state: Mapping[str, Any]) -> None:
        """Put every part into the state that a checkpoint says."""
        parts = self._parts()
        if set(state) != {*self.provenance.state_dict(), *parts}:
            raise RunError(f"{path} is no checkpoint of this version of flatmtl. Use --overwrite to start again.")
        self.provenance.check(path, state)
        try:
            for name, part in parts.items():
                part.load_state_dict(state[name])
        except Exception as error:  # a state of something else can raise nearly anything
            raise RunError(
                f"{path} does not fit this run ({type(error).__name__}: {error}). Remove it to go on from the "
                "checkpoint before it, or use --overwrite to start again."
            ) from error

    def _summary(self) -> dict[str, Any]:
        """Return what the run came to; the sharpness is that of the final model."""
        wanted, times = self.config.sharpness, self.position.times
        measured = None
        if wanted.samples:
            sample, group = self._sample(wanted.samples), process_group(self.fabric)  # all ranks measure the same
            measured = sharpness(self.model, sample, self.parameters, wanted.rho, process_group=group)
        return {
            "recipe": self.config.recipe,
            "seed": self.config.seed,
            "data": {split: str(dataset) for split, dataset in self.data.items()},
            "fingerprints": self.provenance.data,
            "input": list(self.data["test"][0][0].shape),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "better": {f"{name}/{task}": b for task, o in self.objectives.items() for name, b in o.better.items()},
            **outcome(self.position.rows, self.config.protocol),
            "stopped_early": self.position.epochs < self.config.epochs,
            "sharpness": measured,
            "seconds": sum(time["seconds"] for time in times),
            "step_seconds": median(time["step_seconds"] for time in times),
            "step_bytes": self._step_bytes(),
        }

    def _step_bytes(self) -> int | None:
        """Return the memory of a step on a full batch, what model and optimizer hold included.

        None if a loss is not finite, which shall not cost a run its result when all else is done.
        """
        self.model.train()
        self.optimizer.zero_grad()
        (closure, *_) = self._sample(self.config.batch_size)
        group = process_group(self.fabric)
        mtl = assembly.flat_mtl(self.config, len(self.tasks), group)  # a fresh one makes its rows, which count too
        mtl.start_epoch(1, self.config.epochs)
        step = partial(mtl.backward, closure, self.parameters, scaler=self.scaler)
        try:
            return held(self.model, self.optimizer) + rise(step, self.fabric.device)
        except FloatingPointError:
            return None
