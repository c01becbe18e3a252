"""Calibration: whether class probabilities are as often right as they say, and how uncertain they are.

The paper's section on predictive performance (Phan et al., 2025, supplement) measures these of flat and plain methods.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torchmetrics.functional.classification import binary_auroc

from flatmtl_bench.analysis.batches import Batch
from flatmtl_bench.analysis.untouched import untouched
from flatmtl_bench.choices import whole_number
from flatmtl_bench.metrics.checks import check_labels, check_shapes
from flatmtl_bench.metrics.objective import full_precision

ROUNDING = 0.01
"""How far from 1 the sum of an item's probabilities may be; rounding to bfloat16 stays below."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """How well the confidence of a classifier, its largest probability, tells how often it is right.

    The items are sorted by their confidence into ``M`` bins of one width; the m-th holds the confidences above
    ``(m - 1) / M`` and up to ``m / M``, the first also 0.

    Attributes:
        count: items in each bin, int64 ``(M,)``.
        accuracy: share of them whose class has the largest probability, ``(M,)``; NaN in an empty bin.
        confidence: their mean confidence, ``(M,)``; NaN in an empty bin.
        brier: Brier score, the mean over the items of the squared distance between their probabilities and those of
            one who knows the class; from 0, which is best, to 2.
        entropy: predictive entropy of each item, ``(N,)``; see :func:`predictive_entropy`.

    References:
        - Brier (1950), *Verification of forecasts expressed in terms of probability*, Monthly Weather Review 78.
        - Naeini et al. (2015), *Obtaining well calibrated probabilities using Bayesian binning*, AAAI.
        - Guo et al. (2017), *On calibration of modern neural networks*, ICML.
    """

    count: Tensor
    accuracy: Tensor
    confidence: Tensor
    brier: float
    entropy: Tensor

    @property
    def ece(self) -> float:
        """Expected calibration error: the mean over the items of the gap of accuracy and confidence in their bin."""
        gaps = (self.accuracy - self.confidence).abs()
        return float((self.count * gaps).nansum() / self.count.sum())


class CalibrationMeter:
    """The calibration of class probabilities of many batches, on the CPU in float64.

    It holds a few sums for each bin, and the entropy of each item. `torchmetrics` has an ECE, but with bins that are
    closed at their left end, and without what a reliability diagram shows.

    Args:
        bins: number of bins of the confidence.

    Raises:
        ValueError: there are no bins, nothing was taken in, or what was taken in are no probabilities of classes.

    Example:
        >>> meter = CalibrationMeter(bins=2)
        >>> meter.update(torch.tensor([[0.75, 0.25], [0.0, 1.0]]), torch.tensor([1, 1]))
        >>> found = meter.compute()
        >>> found.count.tolist(), found.accuracy.tolist(), found.confidence.tolist()
        ([0, 2], [nan, 0.5], [nan, 0.875])
        >>> found.ece, found.brier
        (0.375, 0.5625)
    """

    def __init__(self, bins: int = 10) -> None:
        whole_number("bins", bins, 1)
        self._edges = torch.from_numpy(np.linspace(0.0, 1.0, bins + 1))
        self._sums = torch.zeros(3, bins, dtype=torch.float64)  # of items, of right ones, of their confidences
        self._squares = 0.0
        self._entropies: list[Tensor] = []

    def update(self, probabilities: Tensor, labels: Tensor) -> None:
        """Take in one batch.

        Args:
            probabilities: of each class, ``(B, C)``.
            labels: the true classes, int64 ``(B,)``.
        """
        check_shapes(probabilities, ("B", "C"), labels, ("B",))
        p, labels = _checked(probabilities), labels.cpu()
        check_labels(labels, 0, p.shape[1] - 1)
        confidence, predicted = p.max(dim=1)
        # Edges in the precision of the confidences: what is 0.6 in float32 lies in the bin that ends at 0.6.
        bins = torch.bucketize(confidence, self._edges.to(confidence)) - 1
        values = torch.stack([torch.ones_like(confidence), (predicted == labels).to(p), confidence])
        self._sums.index_add_(1, bins.clamp(0, self._sums.shape[1] - 1), values.double())
        self._squares += float((p.double() - one_hot(labels, p.shape[1])).square().sum())
        self._entropies.append(predictive_entropy(p))

    def compute(self) -> Calibration:
        """Return the calibration over all batches so far."""
        count, right, confidence = self._sums
        if not count.any():
            raise ValueError("there is no calibration of no items. Give at least one batch with an item.")
        brier = self._squares / float(count.sum())
        return Calibration(count.long(), right / count, confidence / count, brier, torch.cat(self._entropies))


def calibration(
    model: nn.Module, batches: Iterable[Batch], tasks: Sequence[str], bins: int = 10
) -> dict[str, Calibration]:
    """Return the calibration of each task of a model in eval mode; the model is left as it was.

    Args:
        model: ``model(inputs, tasks) -> {task: logits of shape (B, C)}``.
        batches: inputs, and the labels of each task, int64 ``(B,)``; such as :class:`Batches`.
        tasks: those that name one of several classes.
        bins: number of bins of the confidence.

    Raises:
        ValueError: there is no item, a logit is NaN, or a label is no class.

    Example:
        >>> from flatmtl_bench.models import MultiHead
        >>> model = MultiHead(nn.Identity(), {"side": nn.Identity()})
        >>> batch = torch.tensor([[0.0, 9.0], [9.0, 0.0]]), {"side": torch.tensor([1, 1])}
        >>> round(calibration(model, [batch], ["side"])["side"].ece, 3)
        0.5
    """
    meters = {task: CalibrationMeter(bins) for task in tasks}
    with untouched(model), torch.no_grad():
        for task, p, targets in _probabilities(model, batches, tasks):
            meters[task].update(p, targets[task])
    return {task: meter.compute() for task, meter in meters.items()}


def pooled(parts: Sequence[Calibration]) -> Calibration:
    """Return the calibration of the items of several parts together, such as those of all tasks.

    Raises:
        ValueError: there are no parts, or they have different numbers of bins.

    Example:
        >>> left, right = CalibrationMeter(bins=1), CalibrationMeter(bins=1)
        >>> left.update(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
        >>> right.update(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
        >>> pooled([left.compute(), right.compute()]).accuracy.tolist()
        [0.5]
    """
    numbers = {len(part.count) for part in parts}
    if len(numbers) != 1:
        raise ValueError(f"got parts of {sorted(numbers)} bins; expected at least one part, all of one number of bins.")
    counts = torch.stack([part.count for part in parts])
    items, count = counts.sum(dim=1), counts.sum(dim=0)

    def mean(values: Sequence[Tensor]) -> Tensor:
        return (torch.stack(list(values)) * counts).nansum(dim=0) / count

    brier = sum(part.brier * int(n) for part, n in zip(parts, items, strict=True)) / int(items.sum())
    accuracy, confidence = mean([part.accuracy for part in parts]), mean([part.confidence for part in parts])
    return Calibration(count, accuracy, confidence, brier, torch.cat([part.entropy for part in parts]))


def predictive_entropy(probabilities: Tensor) -> Tensor:
    r"""Return :math:`\frac1C \sum_c -p_c \log p_c` of each item in nats, with :math:`0 \log 0 = 0`.

    The factor :math:`1/C` is that of Phan et al. (2025): the entropy lies between 0 and :math:`\log(C) / C`.

    Args:
        probabilities: of each class, ``(N, C)``.

    Returns:
        float64 ``(N,)``, on the CPU.

    Raises:
        ValueError: they are no probabilities of at least two classes.

    Example:
        >>> [round(h, 4) for h in predictive_entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]])).tolist()]
        [0.3466, 0.0]
    """
    p = _checked(probabilities).double()
    return torch.special.entr(p).mean(dim=1).clamp(0.0, highest_entropy(p.shape[1]))


def highest_entropy(classes: int) -> float:
    """Return the predictive entropy of who holds all classes for equally probable, the highest there is.

    Example:
        >>> round(highest_entropy(10), 4)
        0.2303
    """
    return math.log(classes) / classes


def predictive_entropies(model: nn.Module, batches: Iterable[Batch], tasks: Sequence[str]) -> dict[str, Tensor]:
    """Return for each task the predictive entropies ``(N,)`` of a model in eval mode, which is left as it was.

    Labels are not read, so the batches may be of data that the model was not trained on.

    Args:
        model: ``model(inputs, tasks) -> {task: logits of shape (B, C)}``.
        batches: inputs of which the model can say something, with anything beside them.
        tasks: those that name one of several classes.

    Raises:
        ValueError: there is no item, or a logit is NaN.

    Example:
        >>> from flatmtl_bench.models import MultiHead
        >>> model = MultiHead(nn.Identity(), {"side": nn.Identity()})
        >>> [round(h, 4) for h in predictive_entropies(model, [(torch.zeros(1, 2), {})], ["side"])["side"].tolist()]
        [0.3466]
    """
    found: dict[str, list[Tensor]] = {task: [] for task in tasks}
    with untouched(model), torch.no_grad():
        for task, p, _ in _probabilities(model, batches, tasks):
            found[task].append(predictive_entropy(p))
    if not all(found.values()):
        raise ValueError("there is no entropy of no items. Give at least one batch with an item.")
    return {task: torch.cat(some) for task, some in found.items()}


def entropy_auroc(inside: Tensor, outside: Tensor) -> float:
    """Return how often an item from outside a model's domain has a higher entropy than one from inside.

    It is the area under the ROC curve of a detector that goes by the entropy: 1 where every item from outside has a
    higher one, 0.5 where nothing is told apart. Ties count half. Higher entropy on both sides does not raise it.

    Args:
        inside: entropies of items of the domain, ``(N,)``.
        outside: of others, ``(K,)``.

    Raises:
        ValueError: there are none, or one is not finite.

    References:
        Hendrycks and Gimpel (2017), *A baseline for detecting misclassified and out-of-distribution examples in neural
        networks*, ICLR.

    Example:
        >>> entropy_auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.3]))
        0.875
    """
    for name, values in (("inside", inside), ("outside", outside)):
        if values.ndim != 1 or not len(values) or not values.isfinite().all():
            raise ValueError(
                f"the entropies {name} are of shape {tuple(values.shape)}, {int((~values.isfinite()).sum())} of them "
                "not finite; expected one finite number for each of at least one item."
            )
    is_outside = torch.cat([torch.zeros_like(inside, dtype=torch.long), torch.ones_like(outside, dtype=torch.long)])
    return float(binary_auroc(torch.cat([inside, outside]), is_outside))


def entropy_histogram(entropies: Tensor, classes: int, bins: int) -> list[int]:
    """Return how many entropies lie in each of some bins of one width, from 0 to the highest there is.

    Args:
        entropies: see :func:`predictive_entropy`, ``(N,)``.
        classes: of the task.
        bins: their number.

    Example:
        >>> entropy_histogram(torch.tensor([0.0, 0.01, 0.34]), classes=2, bins=3)
        [2, 0, 1]
    """
    return np.histogram(entropies.numpy(), bins, (0.0, highest_entropy(classes)))[0].tolist()


def _probabilities(
    model: nn.Module, batches: Iterable[Batch], tasks: Sequence[str]
) -> Iterator[tuple[str, Tensor, Mapping[str, Tensor]]]:
    """Yield for each batch and task its name, its class probabilities in float64 on the CPU, and all targets."""
    for inputs, targets in batches:
        outputs = model(inputs, tasks)
        for task in tasks:
            yield task, outputs[task].cpu().double().softmax(dim=1), targets


def _checked(probabilities: Tensor) -> Tensor:
    """Return probabilities on the CPU, in float32 or better.

    Raises:
        ValueError: they are none.
    """
    p = full_precision(probabilities.detach().cpu())
    if p.ndim != 2 or p.shape[1] < 2:
        raise ValueError(f"got probabilities of shape {tuple(p.shape)}; expected (N, C) with at least two classes C.")
    sums = p.double().sum(dim=1)
    wrong = ~((p >= 0.0).all(dim=1) & ((sums - 1.0).abs() <= ROUNDING))  # so that NaN is wrong, too
    if wrong.any():
        item = int(wrong.nonzero()[0])
        given = ", ".join(f"{value:.4g}" for value in p[item].tolist())
        raise ValueError(
            f"the probabilities of item {item} are {given:.80}; expected numbers from 0 that sum to 1. Logits become "
            "probabilities by softmax; NaN means that the model failed."
        )
    return p
