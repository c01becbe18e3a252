"""The batches of a data set, loaded each time that they are asked for, and the closures of their losses."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

Batch = tuple[Tensor, Mapping[str, Tensor]]
"""Inputs, and the targets of each task."""
Closure = Callable[[Sequence[str]], Mapping[str, Tensor | None]]
"""What a step calls: names of tasks -> their losses, None for one without labels."""
Losses = Mapping[str, Callable[[Tensor, Tensor], Tensor | None]]
"""For each task its mean loss of a batch from output and target; None if no label of it is valid."""


class Batches(Sequence[Batch]):
    """The items of a data set in batches of nearly one size, so that means over them are means over the items.

    A batch is loaded each time that it is asked for: data of any size take the memory of one batch.

    Args:
        dataset: items ``(input, {task: target})``.
        batch_size: the most items in a batch.
        samples: so many items, evenly spaced; None, or more than there are: all.
        device: where the batches go.
        seed: the order of the items is drawn from it, as in training; None: their own order.

    Example:
        >>> data = [(torch.tensor([float(i)]), {"even": torch.tensor(1 - i % 2)}) for i in range(10)]
        >>> [inputs.flatten().tolist() for inputs, _ in Batches(data, 2, samples=5)]
        [[0.0, 2.0], [4.0, 6.0], [9.0]]
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        batch_size: int,
        samples: int | None = None,
        device: torch.device | str = "cpu",
        seed: int | None = None,
    ) -> None:
        self._dataset: Any = dataset
        self._device = torch.device(device)
        size = len(self._dataset) if samples is None else min(samples, len(self._dataset))
        if size < 1 or batch_size < 1:
            raise ValueError(
                f"got {len(self._dataset)} items, of which {samples} were asked for, in batches of {batch_size}; "
                "expected at least one of each."
            )
        items = torch.linspace(0, len(self._dataset) - 1, size, dtype=torch.float64).long()
        if seed is not None:
            items = items[torch.randperm(size, generator=torch.Generator().manual_seed(seed))]
        self._indices = items.tensor_split(math.ceil(size / batch_size))

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: Any) -> Any:
        items = [self._dataset[i] for i in self._indices[number].tolist()]
        inputs, targets = default_collate(items)
        return inputs.to(self._device), {task: target.to(self._device) for task, target in targets.items()}

    def __iter__(self) -> Iterator[Batch]:
        return (self[number] for number in range(len(self)))


def closures(model: nn.Module, batches: Sequence[Batch], losses: Losses) -> list[Closure]:
    """Return the closure of each batch, which loads it when it is called.

    Args:
        model: ``model(inputs, tasks) -> {task: output}``.
        batches: such as :class:`Batches`.
        losses: of each task.

    Example:
        >>> from flatmtl_bench.models import MultiHead
        >>> model = MultiHead(nn.Identity(), {"sum": nn.Linear(2, 1)})
        >>> data = [(torch.ones(2), {"sum": torch.ones(1)})] * 4
        >>> first, second = closures(model, Batches(data, 2), {"sum": nn.functional.mse_loss})
        >>> list(first(["sum"]))
        ['sum']
    """

    def closure_of(number: int) -> Closure:
        def closure(tasks: Sequence[str]) -> dict[str, Tensor | None]:
            inputs, targets = batches[number]
            outputs = model(inputs, tasks)
            return {task: losses[task](outputs[task], targets[task]) for task in tasks}

        return closure

    return [closure_of(number) for number in range(len(batches))]
