"""A trained model, from the folder of its run."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from flatmtl_bench import assembly
from flatmtl_bench.checkpoints import Checkpoints
from flatmtl_bench.data.base import TaskDataset
from flatmtl_bench.recipes.config import Config, Split
from flatmtl_bench.reports.reading import read


@dataclass(frozen=True)
class Trained:
    """A model as the epoch left it that counts under the run's protocol, in eval mode on the CPU, and data for it.

    Attributes:
        config: of the run.
        model: input, tasks -> {task: output}.
        dataset: one split of the run's data.
        tasks: that the model was trained on.
    """

    config: Config
    model: nn.Module
    dataset: TaskDataset
    tasks: tuple[str, ...]

    @torch.no_grad()
    def outputs(self, indices: Iterable[int]) -> dict[int, dict[str, Tensor]]:
        """Return the output for items of the data: index -> task -> output, without the dimension of the batch."""
        found = {}
        for index in indices:
            outputs = self.model(self.dataset[index][0].unsqueeze(0), self.tasks)
            found[index] = {task: output[0] for task, output in outputs.items()}
        return found


def trained(run: Path, split: Split = "test") -> Trained:
    """Return the model of a finished run; of several epochs that count, the last one's.

    Args:
        run: its folder.
        split: of the data that come with it.

    Raises:
        RunError, ValueError, OSError: the run is not finished or not whole, or its data are not there.
    """
    found = read(run)
    config = found.config
    dataset = assembly.dataset(config, split)
    objectives = assembly.trained(config, dataset.objectives)
    model = assembly.model(config, objectives, dataset[0][0].shape[0])
    model.load_state_dict(Checkpoints(run).of_epoch(found.summary["epochs"][-1])["model"])
    return Trained(config, model.eval(), dataset.clean, tuple(objectives))
