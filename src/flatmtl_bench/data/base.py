"""What all data sets have in common."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from flatmtl_bench.choices import one_of, whole_number
from flatmtl_bench.metrics import Objective

SPLITS = ("train", "validation", "test")


def check_split(split: str, validation_share: float, seed: int = 0, *, made: bool = False) -> None:
    """Raise a `ValueError` unless these can be arguments of a data set.

    Args:
        split: which part is wanted.
        validation_share: of the training data that is held out; 0: there is no validation split.
        seed: of what is random in the train split.
        made: the validation split is there by itself and not held out, so only a share of 0 forbids it.
    """
    one_of("split", split, SPLITS)
    whole_number("seed", seed, 0, 2**32)
    if not 0 <= validation_share < 1:
        raise ValueError(f"validation_share must be at least 0 and below 1, got {validation_share}.")
    if made and split == "validation" and not validation_share:
        raise ValueError("validation_share=0 leaves no pictures for split 'validation'. Choose another split.")


class TaskDataset(Dataset[tuple[Tensor, dict[str, Any]]]):
    """One split of a data set: items ``(input, {task: target})``.

    Inputs are float32 ``(C, H, W)``, in [0, 1] unless their preprocessing says otherwise. ``str`` of it says in one
    line what it is and where it comes from.

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

    def to_look_at(self, item: Tensor) -> Tensor:
        """Return the picture in an input: ``(1 or 3, H, W)``, gray or red, green and blue, in [0, 1]."""
        return item

    def start_epoch(self, epoch: int) -> None:
        """Let the random changes of items be those of an epoch; the same for any number of loader processes."""

    def __len__(self) -> int:
        raise NotImplementedError
