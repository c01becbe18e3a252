"""Which items make up which batch of an epoch, and which of them are whose."""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class BatchIndices(Sampler[list[int]]):
    """The indices of each batch, in order or shuffled, from a batch on: those before it are not loaded.

    Several ranks have the same batches as one, of which each takes its slice.

    Args:
        size: number of items.
        batch_size: items in a batch, of all ranks together; the last one may have fewer.
        generator: shuffles the items, for all ranks alike; ``None``: they come in order.
        start: number of batches to pass over.
        rank: whose slices these are.
        ranks: number of ranks.

    Example:
        >>> list(BatchIndices(5, 2, start=1))
        [[2, 3], [4]]
        >>> list(BatchIndices(6, 3, rank=0, ranks=2)), list(BatchIndices(6, 3, rank=1, ranks=2))
        ([[0, 1], [3, 4]], [[2], [5]])
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        generator: torch.Generator | None = None,
        start: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.size = size
        self.batch_size = batch_size
        self.generator = generator
        self.start = start
        self.rank = rank
        self.ranks = ranks

    def __iter__(self) -> Iterator[list[int]]:
        shuffled = self.generator is not None
        order = torch.randperm(self.size, generator=self.generator) if shuffled else torch.arange(self.size)
        for batch in order.split(self.batch_size)[self.start :]:
            part = batch.tensor_split(self.ranks)[self.rank]
            yield (part if len(part) else batch[:1]).tolist()  # see `shares`

    def __len__(self) -> int:
        return len(range(self.start * self.batch_size, self.size, self.batch_size))

    def shares(self) -> Iterator[float]:
        """Yield for each batch what the mean over this rank's slice counts for.

        The mean over the ranks of these products is the mean over the batch, also where slices differ in length, if
        each item counts the same: a loss that leaves out pixels is near to it only. It is 0 where a batch has no item
        for this rank: its slice is then an item of another rank, as no loss is without one.

        Example:
            >>> list(BatchIndices(4, 3, rank=0, ranks=2).shares()), list(BatchIndices(4, 3, rank=1, ranks=2).shares())
            ([1.3333333333333333, 2.0], [0.6666666666666666, 0.0])
        """
        for first in range(self.start * self.batch_size, self.size, self.batch_size):
            length = min(self.batch_size, self.size - first)
            mine = length // self.ranks + (self.rank < length % self.ranks)
            yield mine * self.ranks / length
