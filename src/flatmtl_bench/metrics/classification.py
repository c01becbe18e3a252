"""Classification: mean cross-entropy to train by, accuracy to judge by."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from flatmtl_bench.metrics.objective import Averaging, Better, Objective, full_precision


@dataclass(frozen=True)
class Classification(Objective):
    """One of several classes for each item.

    Outputs are logits ``(B, C)``, targets int64 ``(B,)``. The loss is the mean cross-entropy, the metric the share of
    items whose class has the largest logit.

    Args:
        classes: their names.

    Example:
        >>> import torch
        >>> task = Classification(("cat", "dog"))
        >>> accuracy = task.metrics("pooled")
        >>> accuracy.update(torch.tensor([[2.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
        >>> {name: float(value) for name, value in accuracy.compute().items()}
        {'accuracy': 0.5}
    """

    classes: tuple[str, ...]
    better: ClassVar[Mapping[str, Better]] = {"accuracy": "higher"}

    @property
    def outputs(self) -> int:
        """One logit for each class."""
        return len(self.classes)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return cross_entropy(full_precision(output), target)

    def metrics(self, averaging: Averaging) -> MetricCollection:
        """Return the accuracy, which is the same for both ways to average."""
        return MetricCollection({"accuracy": MulticlassAccuracy(self.outputs, average="micro", validate_args=False)})

    def score(self, values: Mapping[str, float]) -> float:
        """Return the accuracy."""
        return values["accuracy"]
