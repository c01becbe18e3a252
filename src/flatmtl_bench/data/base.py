"""What all data sets have in common."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from flatmtl_bench.metrics import Objective

SPLITS = ("train", "validation", "test")


class TaskDataset(Dataset[tuple[Tensor, dict[str, Any]]]):
    """One split of a data set: items ``(input, {task: target})``.

    Inputs are float32 ``(C, H, W)`` in [0, 1]. ``str`` of it says in one line what it is and where it comes from.

    Attributes:
        objectives: task -> what it is trained by and judged by; the order is that of the tasks.
        classes: task -> names of its classes, where it has any.
        split: ``train``, ``validation`` or ``test``.
        source: where the items come from, never ``auto``.
        fingerprint: a short text that tells these data from others.
    """

    objectives: Mapping[str, Objective]
    classes: Mapping[str, Sequence[str]]
    split: str
    source: str

    @property
    def fingerprint(self) -> str:
        """A short text that tells these data from others."""
        raise NotImplementedError

    @property
    def clean(self) -> "TaskDataset":
        """The same items as they are, where this data set changes them at random."""
        return self

    def start_epoch(self, epoch: int) -> None:
        """Let the random changes of items be those of an epoch; the same for any number of loader processes."""

    def __len__(self) -> int:
        raise NotImplementedError
