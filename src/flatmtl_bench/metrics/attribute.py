"""A yes-or-no attribute: binary cross-entropy to train by, error, accuracy and F1 to judge by."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torchmetrics.classification import BinaryStatScores

from flatmtl_bench.choices import whole_number
from flatmtl_bench.metrics.checks import check_labels, check_shapes
from flatmtl_bench.metrics.objective import Averaging, Better, Objective, full_precision


@dataclass(frozen=True)
class Attribute(Objective):
    """Whether each item has an attribute.

    Outputs are logits ``(B, 1)``, of yes against no, or ``(B, 2)``, of no and yes; targets are int64 ``(B,)``, 0 for no
    and 1 for yes. The loss is the mean cross-entropy. Metrics, the same for both ways to average, are

    - ``error``: per cent of items that are wrong; it counts in result tables.
    - ``accuracy``: share of items that are right.
    - ``f1``: harmonic mean of precision and recall of yes; 0 where yes is neither true nor predicted of any item.

    Args:
        logits: how many there are for each item, 1 or 2.

    Example:
        >>> import torch
        >>> task = Attribute()
        >>> scores = task.metrics("pooled")
        >>> scores.update(torch.tensor([[2.0], [1.0], [-1.0], [-3.0]]), torch.tensor([1, 0, 0, 0]))
        >>> {name: round(float(value), 4) for name, value in scores.compute().items()}
        {'error': 25.0, 'accuracy': 0.75, 'f1': 0.6667}
    """

    logits: int = 1
    better: ClassVar[Mapping[str, Better]] = {"error": "lower"}

    def __post_init__(self) -> None:
        whole_number("logits", self.logits, 1, 3)

    @property
    def outputs(self) -> int:
        """The logits."""
        return self.logits

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        _check(output, target, self.logits)
        logits = full_precision(output)
        if self.logits == 2:
            return cross_entropy(logits, target)
        return binary_cross_entropy_with_logits(logits.squeeze(1), target.to(logits))

    def metrics(self, averaging: Averaging) -> "AttributeScores":
        """Return the metrics."""
        return AttributeScores(self.logits)

    def score(self, values: Mapping[str, float]) -> float:
        """Return the accuracy."""
        return values["accuracy"]


class AttributeScores(BinaryStatScores):
    """Error, accuracy and F1; see `Attribute`."""

    def __init__(self, logits: int) -> None:
        super().__init__(validate_args=False)
        self._logits = logits

    def update(self, output: Tensor, target: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take in one batch."""
        _check(output, target, self._logits)
        yes = output.argmax(dim=1) if self._logits == 2 else output.squeeze(1) > 0
        super().update(yes.long(), target)

    def compute(self) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the metrics of all batches."""
        true_yes, false_yes, true_no, false_no, _ = super().compute().cpu().double()
        wrong, right = false_yes + false_no, true_yes + true_no
        f1 = 2 * true_yes / (2 * true_yes + wrong).clamp(min=1)
        return {"error": 100 * wrong / (wrong + right), "accuracy": right / (wrong + right), "f1": f1}


def _check(output: Tensor, target: Tensor, logits: int) -> None:
    """Raise if logits and labels do not fit, or a label is neither yes nor no."""
    check_shapes(output, ("B", logits), target, ("B",))
    check_labels(target, 0, 1)
