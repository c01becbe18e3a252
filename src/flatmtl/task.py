"""What one step knows of a task, and what the next steps need not find out again."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from flatmtl.gradients import Gradient


@dataclass(eq=False)
class Task:
    """What one step knows of one present task.

    Attributes:
        name: of the task.
        position: among all tasks.
        closures: numbers of the closures in which it is present.
        reached: numbers of the shared parameters that its loss reaches.
        loss: clean loss, float64.
        head: gradient on the task's own parameters, the clean one until that at the perturbed weights is known.
        length: norm of its loss gradient on the shared parameters, float64, once it is known.
        head_length: norm of that on the task's own parameters, likewise.
        count: closures in which it is present, on all ranks together.
        own_head: this rank's own gradient on the task's own parameters, where it is to be perturbed along.
        sample: some entries of its loss gradient, in the precision in which they came.
        perturbed_loss: loss at the perturbed weights.
        sam_head: gradient on the task's own parameters at the perturbed weights.
        intra: inner product of its loss gradient and its flat gradient.
        has_flat: whether it has a finite flat gradient.
    """

    name: str
    position: int
    closures: list[int]
    reached: set[int]
    loss: Tensor
    head: Gradient
    length: Tensor | None = None
    head_length: Tensor | None = None
    count: int = 1
    own_head: Gradient = field(default_factory=list[Tensor | None])
    sample: Tensor | None = None
    perturbed_loss: Tensor | None = None
    sam_head: Gradient = field(default_factory=list[Tensor | None])
    intra: Tensor | None = None
    has_flat: bool = False


Take = Callable[[Task, Tensor, Gradient, Gradient], None]
"""Gets a task with its loss and its gradients on the shared parameters and on its head, at its perturbed weights."""


@dataclass
class Learned:
    """What the passes of one step found out that holds for the next ones too.

    Attributes:
        kind: what is done, which all ranks must do alike.
        compared: whether the ranks have compared the weights they begin with.
        asks_all: whether a task's own pass must ask for all tasks, since a head draws random numbers.
        forward_per_task: whether each task needs a forward pass of its own, since the graph that tasks would share
            serves one backward pass only.
        unmoved: share of the shared weights kept in half precision that a perturbation did not move; ``None`` as long
            as there are no such weights.
    """

    kind: str = ""
    compared: bool = False
    asks_all: bool = False
    forward_per_task: bool = False
    unmoved: float | None = None
