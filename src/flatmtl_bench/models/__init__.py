"""Architectures: a shared encoder and one head for each task."""

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn

from flatmtl_bench.choices import one_of, whole_number
from flatmtl_bench.models.lenet import LeNet
from flatmtl_bench.models.resnet import ResNet18, ResNet18Official

__all__ = ["MODELS", "MultiHead", "build"]

# Encoders: called with the number of input channels, with the size of the representation as `width`.
MODELS: dict[str, Callable[[int], LeNet | ResNet18]] = {
    "lenet": LeNet,
    "resnet18": ResNet18,
    "resnet18_official": ResNet18Official,
}


class MultiHead(nn.Module):
    """A shared encoder with one head for each task.

    Attributes:
        encoder: input -> representation.
        heads: task -> module from representation to output, an `nn.ModuleDict`.
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
        """Return task -> output for ``tasks`` (None: all of them); no other head is evaluated."""
        wanted = list(self.heads) if tasks is None else list(tasks)
        unknown = [task for task in wanted if task not in self.heads]
        if unknown:
            known = ", ".join(self.heads)
            raise ValueError(f"no head for {unknown} (asked for: {tasks!r}). Pass a list of: {known}.")
        z = self.encoder(x)
        return {task: self.heads[task](z) for task in wanted}


def build(name: str, heads: Mapping[str, int], in_channels: int = 1) -> MultiHead:
    """Return the model ``name``, a key of ``MODELS``, with a linear head of ``heads[task]`` outputs per task.

    Example:
        >>> model = build("lenet", {"left": 10, "right": 10})
        >>> sum(p.numel() for p in model.parameters())
        31910
    """
    one_of("model", name, MODELS)
    whole_number("in_channels", in_channels, 1)
    for task, outputs in heads.items():
        if outputs < 1:
            raise ValueError(f"the head of task {task!r} must have at least one output, got {outputs}.")
    encoder = MODELS[name](in_channels)
    return MultiHead(encoder, {task: nn.Linear(encoder.width, outputs) for task, outputs in heads.items()})
