"""Depth: mean absolute error to train by, absolute and relative error to judge by."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flatmtl_bench.metrics.checks import check_shapes
from flatmtl_bench.metrics.dense import DenseObjective, PixelMeans
from flatmtl_bench.metrics.objective import Averaging, Better, full_precision


@dataclass(frozen=True)
class Depth(DenseObjective):
    """A depth, or inverse depth, for each pixel.

    Outputs and targets are ``(B, 1, H, W)``, in any unit; a target of 0 says that there is no label. The loss is the
    mean of ``|p - t|`` over all valid pixels of the batch. Metrics are

    - ``abs_err``: mean of ``|p - t|``, in the unit of the data.
    - ``rel_err``: mean of ``|p - t| / |t|``, a ratio.
    - ``valid``: how many pixels have a label. Where none has, there are no other metrics.

    With ``batches`` the means are those over batches, see `PixelMeans`.

    References:
        - Eigen et al. (2014), *Depth map prediction from a single image using a multi-scale deep network*, NeurIPS.
        - Liu et al. (2019), *End-to-end multi-task learning with attention*, CVPR.

    Example:
        >>> errors = Depth().metrics("pooled")
        >>> errors.update(torch.tensor([[[[1.0, 2.0, 3.0]]]]), torch.tensor([[[[2.0, 0.0, 4.0]]]]))
        >>> {name: float(value) for name, value in errors.compute().items()}
        {'abs_err': 1.0, 'rel_err': 0.375, 'valid': 2.0}
    """

    better: ClassVar[Mapping[str, Better]] = {"abs_err": "lower", "rel_err": "lower"}

    @property
    def outputs(self) -> int:
        """The depth."""
        return 1

    def loss(self, output: Tensor, target: Tensor) -> Tensor | None:
        """Return the mean absolute error of the valid pixels."""
        absolute, _ = errors(output, target)
        return absolute.mean() if absolute.numel() else None

    def metrics(self, averaging: Averaging) -> "DepthErrors":
        """Return the mean errors."""
        return DepthErrors(tuple(self.better), averaging)


class DepthErrors(PixelMeans):
    """Absolute and relative error; see `Depth`."""

    def update(self, output: Tensor, target: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take in one batch."""
        self.add(torch.stack(errors(output, target)))


def errors(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return absolute and relative error of each valid pixel, ``(N,)`` both."""
    check_shapes(output, ("B", 1, "H", "W"), target, ("B", 1, "H", "W"))
    valid = target != 0
    truth = target.masked_select(valid)
    absolute = (full_precision(output).masked_select(valid) - truth).abs()
    return absolute, absolute / truth.abs()
