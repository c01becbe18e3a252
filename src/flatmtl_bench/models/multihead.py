"""A shared encoder and one head for each task: the form of every model here."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn


class MultiHead(nn.Module):
    """A shared encoder with one head for each task.

    Args:
        encoder: input -> what the tasks share.
        heads: task -> module from the representation, see :meth:`representation`, to the task's output.

    Attributes:
        encoder: as given.
        heads: as given, an `nn.ModuleDict`.

    Raises:
        ValueError: there is no head, or torch cannot name a module like one of the tasks.

    Example:
        >>> import torch
        >>> model = MultiHead(nn.Linear(4, 3), {"left": nn.Linear(3, 10), "right": nn.Linear(3, 2)})
        >>> {task: tuple(output.shape) for task, output in model(torch.ones(5, 4), ["right"]).items()}
        {'right': (5, 2)}
    """

    def __init__(self, encoder: nn.Module, heads: Mapping[str, nn.Module]) -> None:
        super().__init__()
        if not heads:
            raise ValueError(
                "a model needs a head, got none. Pass at least one task, e.g. {'left': nn.Linear(50, 10)}."
            )
        for task in heads:
            if not task or "." in task or hasattr(nn.ModuleDict(), task):
                raise ValueError(f"task name {task!r} cannot name a module of torch. Choose another without dots.")
        self.encoder = encoder
        self.heads = nn.ModuleDict(dict(heads))

    def forward(self, x: Tensor, tasks: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return task -> output for ``tasks`` (None: all of them); nothing is evaluated that only others need.

        Raises:
            ValueError: there is no head for one of ``tasks``.
        """
        wanted = list(self.heads) if tasks is None else list(tasks)
        unknown = [task for task in wanted if task not in self.heads]
        if unknown:
            known = ", ".join(self.heads)
            raise ValueError(f"no head for {unknown} (asked for: {tasks!r}). Pass a list of: {known}.")
        shared = self.encoder(x)
        return {task: self.heads[task](self.representation(task, shared)) for task in wanted}

    def representation(self, task: str, shared: Any) -> Tensor:
        """Return what the head of ``task`` reads, from what the encoder returned: here, just that."""
        del task
        return shared
