"""Classification: mean cross-entropy to train by, accuracy to judge by."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy


class Classification:
    """Mean cross-entropy and accuracy of one task over many batches.

    Example:
        >>> score = Classification(classes=2)
        >>> score.update(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        >>> {name: round(value, 4) for name, value in score.compute().items()}
        {'loss': 0.41, 'accuracy': 0.5}
    """

    def __init__(self, classes: int) -> None:
        self._loss = MeanMetric()
        self._accuracy = MulticlassAccuracy(classes, average="micro", validate_args=False)

    @staticmethod
    def loss(output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over a batch, in float32 or better."""
        return cross_entropy(output.to(torch.promote_types(output.dtype, torch.float32)), target)

    def update(self, output: Tensor, target: Tensor) -> None:
        """Take in one batch of outputs, on their device."""
        self._loss.to(output.device).update(self.loss(output, target), weight=len(target))
        self._accuracy.to(output.device).update(output, target)

    def compute(self) -> dict[str, float]:
        """Return the means over all samples so far."""
        return {"loss": float(self._loss.compute()), "accuracy": float(self._accuracy.compute())}
