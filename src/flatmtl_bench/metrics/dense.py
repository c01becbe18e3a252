"""What objectives with a label for each pixel have in common."""

import math
from collections.abc import Mapping
from statistics import fmean
from typing import get_args

import torch
from torch import Tensor
from torchmetrics import Metric

from flatmtl_bench.choices import one_of
from flatmtl_bench.metrics.objective import Averaging, Objective

SUMS = torch.float32 if torch.backends.mps.is_available() else torch.float64
"""In what sums over pixels are kept: float64, which Apple's devices do not have."""


class DenseObjective(Objective):
    """A label for each pixel, of which some or all of a picture may be missing.

    Missing labels take no part in loss and metrics. Beside the metrics of a result table there is ``valid``, how many
    pixels had a label; where it is 0, it is the only one, so that no table shows a number for nothing.
    """

    def score(self, values: Mapping[str, float]) -> float:
        """Return the mean of the logarithms of the metrics, with a minus where lower is better.

        The difference of two scores is a mean of log ratios. So which of two epochs is the better one depends neither
        on units (an error in metres or millimetres, a share or per cent) nor on the values of any other method, which
        Delta m would need; for small changes of one task it is the order that Delta m gives. Where nothing is right
        that should be, or no pixel had a label, the score is minus infinity: an epoch that is chosen only if all are
        like it.

        Example:
            >>> from flatmtl_bench.metrics import Depth
            >>> Depth().score({"abs_err": 0.5, "rel_err": 0.5, "valid": 9.0})
            0.6931471805599453
        """
        if values.get("valid") == 0:
            return -math.inf
        signs = {"higher": 1.0, "lower": -1.0}
        logs = [signs[direction] * _log(values[name]) for name, direction in self.better.items()]
        return -math.inf if -math.inf in logs else fmean(logs)


def _log(value: float) -> float:
    return math.log(value) if value else -math.inf


class PixelMeans(Metric):
    """Means over the valid pixels of many batches, of numbers that each pixel has; the base of metrics.

    Pooled, each pixel of the set counts the same, however it is cut into batches. By batches, the mean over batches of
    the means over their pixels, as in public training scripts: a batch with few valid pixels counts as much as
    another, and one without any takes no part. With several processes a batch is what one of them has of it, so that
    the mean is over all such slices; pooled means are the same for any number of processes.

    A subclass hands the numbers of a batch to :meth:`add`. The memory needed does not grow with the data.

    Args:
        names: of the numbers that a pixel has.
        averaging: ``pooled`` or ``batches``.

    Raises:
        ValueError: the averaging is unknown.
    """

    totals: Tensor
    weight: Tensor
    valid: Tensor

    def __init__(self, names: tuple[str, ...], averaging: Averaging) -> None:
        super().__init__()
        one_of("averaging", averaging, get_args(Averaging))
        self.names, self.averaging = names, averaging
        self.add_state("totals", torch.zeros(len(names), dtype=SUMS), dist_reduce_fx="sum")
        self.add_state("weight", torch.tensor(0), dist_reduce_fx="sum")  # pixels, or batches
        self.add_state("valid", torch.tensor(0), dist_reduce_fx="sum")

    def add(self, values: Tensor) -> None:
        """Take in the valid pixels of one batch: a row for each name, ``(K, N)``."""
        pixels = values.shape[1]
        if pixels and self.averaging == "pooled":
            self.totals += values.sum(dim=1, dtype=SUMS)
            self.weight += pixels
        elif pixels:
            self.totals += values.mean(dim=1, dtype=SUMS)
            self.weight += 1
        self.valid += pixels

    def compute(self) -> dict[str, Tensor]:
        """Return the means, and how many pixels were valid; that alone if none was."""
        means = dict(zip(self.names, self.totals / self.weight, strict=True)) if self.weight else {}
        return {**means, "valid": self.valid}
