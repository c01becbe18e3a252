"""A trained model, from the folder of its run."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from flatmtl import TaskParameters
from flatmtl_bench import assembly
from flatmtl_bench.analysis.batches import Batch, Batches, Closure, Losses, closures
from flatmtl_bench.checkpoints import Checkpoints, load_snapshot, snapshots
from flatmtl_bench.data.base import TaskDataset
from flatmtl_bench.metrics import Meters, Objective
from flatmtl_bench.recipes.config import Config, Split
from flatmtl_bench.reports.reading import Run, read
from flatmtl_bench.runs import RunError


@dataclass(frozen=True, eq=False)
class Trained:
    """A model as an epoch left it, in eval mode, with one split of its data, unchanged by augmentation.

    Attributes:
        run: what its folder tells.
        epoch: that left it.
        model: input, tasks -> {task: output}.
        dataset: one split of the run's data.
        objectives: of the tasks that the model was trained on.
        device: of the model, to which batches go.
    """

    run: Run
    epoch: int
    model: nn.Module
    dataset: TaskDataset
    objectives: Mapping[str, Objective]
    device: torch.device

    @property
    def config(self) -> Config:
        """That of the run."""
        return self.run.config

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the tasks."""
        return tuple(self.objectives)

    @property
    def losses(self) -> Losses:
        """The loss of each task."""
        return {task: objective.loss for task, objective in self.objectives.items()}

    def batches(self, samples: int | None = None, batch_size: int | None = None, seed: int | None = None) -> Batches:
        """Return the data, or so many evenly spaced samples, in batches of the run's size or another."""
        size = self.config.batch_size if batch_size is None else batch_size
        return Batches(self.dataset, size, samples, self.device, seed)

    def closures(
        self, samples: int | None = None, batch_size: int | None = None, seed: int | None = None
    ) -> list[Closure]:
        """Return the closure of each of :meth:`batches`."""
        return closures(self.model, self.batches(samples, batch_size, seed), self.losses)

    @cached_property
    def parameters(self) -> TaskParameters:
        """Who owns which parameter, as in training."""
        return assembly.parameters(self.config, self.model, self.closures(2)[0], self.tasks)

    @torch.no_grad()
    def evaluate(self, samples: int | None = None, *, batches: Iterable[Batch] | None = None) -> dict[str, float]:
        """Return loss and metrics of each task and their means: those of a run, but for how items fall into batches.

        They are of the data, of so many evenly spaced samples, or of batches that are at hand.
        """
        meters = Meters(self.objectives, self.config.averaging)
        for inputs, targets in self.batches(samples) if batches is None else batches:
            meters.update(self.model(inputs, self.tasks), targets)
        return meters.compute()

    @torch.no_grad()
    def outputs(self, indices: Iterable[int]) -> dict[int, dict[str, Tensor]]:
        """Return the output for items of the data: index -> task -> output, without the dimension of the batch."""
        found = {}
        for index in indices:
            outputs = self.model(self.dataset[index][0].unsqueeze(0).to(self.device), self.tasks)
            found[index] = {task: output[0] for task, output in outputs.items()}
        return found


def trained(
    run: Path | Run, split: Split = "test", epoch: int | None = None, device: torch.device | str = "cpu"
) -> Trained:
    """Return the model of a finished run.

    Args:
        run: it, or its folder.
        split: of the data that come with it.
        epoch: of which there is a snapshot (``flatmtl run --keep-every``); None: the epoch that counts under the run's
            protocol, the last one if several do.
        device: where the model goes.

    Raises:
        RunError, ValueError, OSError: the run is not finished or not whole, there is no such epoch, or its data are
            not there or others.
    """
    run = read(run) if isinstance(run, Path) else run
    dataset = assembly.dataset(run.config, split)
    expected = run.summary.get("fingerprints", {}).get(split)
    if dataset.fingerprint != expected:
        raise RunError(
            f"{run.path} was made with other {split} data ({expected}) than are here now ({dataset.fingerprint}). "
            "Put the data back to where they were, or train the run again."
        )
    objectives = assembly.trained(run.config, dataset.objectives)
    model = assembly.model(run.config, objectives, dataset[0][0].shape[0])
    epoch, where = put_back(run, model, epoch), torch.device(device)
    return Trained(run, epoch, model.eval().to(where), dataset.clean, objectives, where)


def put_back(run: Run, model: nn.Module, epoch: int | None = None) -> int:
    """Give a model the weights that an epoch of a run left, the one that counts if none is named; return which.

    Raises:
        RunError: there are no such weights, or they are those of another model.
        OSError: their file cannot be read.
    """
    which: int = run.summary["epochs"][-1] if epoch is None else epoch  # the last one if several count
    weights = Checkpoints(run.path).of_epoch(which).get("model") if epoch is None else _weights(run, which)
    try:
        model.load_state_dict(weights)  # pyright: ignore[reportArgumentType]  (what is none is refused)
    except (RuntimeError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise RunError(
            f"the weights of epoch {which} in {run.path} are not those of the model {run.config.model} as it is now: "
            f"{reason:.300}. Train the run again."
        ) from error
    return which


def check_device(name: str) -> None:
    """Raise a `ValueError` unless a device is there that can hold numbers."""
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {name} cannot be used here: {reason} Use --device cpu.") from None


def at_snapshots(run: Run, split: Split, device: torch.device | str = "cpu") -> Iterator[Trained]:
    """Yield the model of a finished run at each of its snapshots, in the order of the epochs, with one data set.

    It is one model, whose weights are others at the next turn.

    Raises:
        RunError, ValueError, OSError: as of :func:`trained`, or there is no snapshot.
    """
    model = None
    for epoch in epochs_kept(run):
        if model is None:
            model = trained(run, split, epoch, device)
        else:
            model.model.load_state_dict(_weights(run, epoch))
            model = replace(model, epoch=epoch)
        yield model


def epochs_kept(run: Run) -> list[int]:
    """Return the epochs of which a run has snapshots.

    Raises:
        RunError: there is none.
    """
    found = list(snapshots(run.path))
    if not found:
        raise RunError(
            f"{run.path} has no snapshots of its weights, which analyses over training read. Train it with "
            "--keep-every 1, or another number of epochs between them. `figure conflict --samples 0` needs none."
        )
    return found


def _weights(run: Run, epoch: int) -> dict[str, Tensor]:
    """Return the weights of a snapshot."""
    path = snapshots(run.path).get(epoch)
    if path is None:
        raise RunError(f"{run.path} has no snapshot of epoch {epoch}. It has: {', '.join(map(str, epochs_kept(run)))}.")
    return load_snapshot(path)
