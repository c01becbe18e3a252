"""Semantic segmentation: cross-entropy to train by, mean intersection over union and pixel accuracy to judge by."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassConfusionMatrix

from flatmtl_bench.metrics.checks import check_labels, check_shapes
from flatmtl_bench.metrics.dense import DenseObjective
from flatmtl_bench.metrics.objective import Averaging, Better, full_precision

VOID = -1
"""The label of pixels that have none."""


@dataclass(frozen=True)
class Segmentation(DenseObjective):
    """One of several classes for each pixel.

    Outputs are logits ``(B, C, H, W)``, targets int64 ``(B, H, W)`` with -1 where there is no label. The loss is the
    mean cross-entropy of the labelled pixels. The metrics come from one confusion matrix of the labelled pixels of the
    whole set, for both ways to average, as in public training scripts:

    - ``miou``: mean over classes of the intersection over union, the pixels of a class that are predicted as such over
      the pixels that have it as label or prediction. A class that occurs as neither is left out; those scripts take
      the mean over all classes, which then is NaN.
    - ``pixel_accuracy``: share of pixels whose class has the largest logit.
    - ``valid``: how many pixels are labelled. Where none is, there are no other metrics.

    Args:
        classes: their names.

    References:
        - Long et al. (2015), *Fully convolutional networks for semantic segmentation*, CVPR.
        - Liu et al. (2019), *End-to-end multi-task learning with attention*, CVPR.

    Example:
        >>> import torch
        >>> task = Segmentation(("wall", "floor", "window"))
        >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 2.0], [1.0, 1.0, 1.0]]).reshape(1, 3, 1, 3)
        >>> scores = task.metrics("pooled")
        >>> scores.update(logits, torch.tensor([[[0, 1, -1]]]))
        >>> {name: float(value) for name, value in scores.compute().items()}
        {'miou': 1.0, 'pixel_accuracy': 1.0, 'valid': 2.0}
    """

    classes: tuple[str, ...]
    better: ClassVar[Mapping[str, Better]] = {"miou": "higher", "pixel_accuracy": "higher"}

    @property
    def outputs(self) -> int:
        """One logit for each class."""
        return len(self.classes)

    def loss(self, output: Tensor, target: Tensor) -> Tensor | None:
        """Return the mean cross-entropy of the labelled pixels."""
        _check(output, target, self.outputs)
        if (target == VOID).all():
            return None
        return cross_entropy(full_precision(output), target, ignore_index=VOID)

    def metrics(self, averaging: Averaging) -> "SegmentationScores":
        """Return the metrics, which are the same for both ways to average."""
        return SegmentationScores(self.outputs)


class SegmentationScores(MulticlassConfusionMatrix):
    """Mean intersection over union and pixel accuracy, from one confusion matrix; see `Segmentation`."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes, ignore_index=VOID, validate_args=False)

    def update(self, output: Tensor, target: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take in one batch."""
        _check(output, target, self.num_classes)
        super().update(output, target)

    def compute(self) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the metrics of all batches."""
        confusion = self.confmat.cpu().double()  # rows are labels, columns predictions
        valid, right = confusion.sum(), confusion.diag()
        if not valid:
            return {"valid": valid}
        union = confusion.sum(0) + confusion.sum(1) - right
        occurs = union > 0
        miou = (right[occurs] / union[occurs]).mean()
        return {"miou": miou, "pixel_accuracy": right.sum() / valid, "valid": valid}


def _check(output: Tensor, target: Tensor, classes: int) -> None:
    """Raise if logits and labels do not fit, or a label is no class."""
    check_shapes(output, ("B", classes, "H", "W"), target, ("B", "H", "W"))
    check_labels(target, VOID, classes - 1)
