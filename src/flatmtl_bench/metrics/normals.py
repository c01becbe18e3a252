"""Surface normals: cosine to train by, angles between true and predicted directions to judge by."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torchmetrics.utilities import dim_zero_cat

from flatmtl_bench.metrics.checks import check_shapes
from flatmtl_bench.metrics.dense import SUMS, DenseObjective, PixelMeans
from flatmtl_bench.metrics.objective import Averaging, Better, full_precision

WITHIN = (11.25, 22.5, 30)
"""Degrees below which a direction counts as right."""


@dataclass(frozen=True)
class Normals(DenseObjective):
    """The direction of the surface that each pixel shows.

    Outputs and targets are ``(B, 3, H, W)``. Outputs may have any length; loss and metrics take them at unit length,
    and an output of length 0, which has no direction, as at right angles to the truth. A target of (0, 0, 0) says that
    there is no label; public training scripts drop all targets whose components sum to 0, true normals as (1, -1, 0)
    among them. The loss is 1 minus the mean over valid pixels of the inner product of output and target, in which
    targets that an augmentation has left shorter than 1 count for less, as in those scripts. Metrics are of the angle
    between the two, whatever their lengths, in degrees from 0 to 180:

    - ``mean``, ``median``.
    - ``within_11.25``, ``within_22.5``, ``within_30``: shares of pixels with a smaller angle.
    - ``valid``: how many pixels have a label. Where none has, there are no other metrics.

    With ``batches`` each is the mean over batches, the median the mean of their medians; see `PixelMeans`. The pooled
    median is exact, for which all angles are kept: 4 bytes for each valid pixel on the device of the outputs (0.3 GB
    for the 654 test pictures of NYUv2), and as much again there, and on the host, while it is computed. Each of several
    processes then has the angles of all. Nothing else takes memory that grows with the data.

    References:
        - Fouhey et al. (2013), *Data-driven 3D primitives for single image understanding*, ICCV.
        - Eigen and Fergus (2015), *Predicting depth, surface normals and semantic labels with a common multi-scale
          convolutional architecture*, ICCV.
        - Liu et al. (2019), *End-to-end multi-task learning with attention*, CVPR.

    Example:
        >>> truth = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]).T.reshape(1, 3, 1, 2)
        >>> output = torch.tensor([[0.0, 0.0, 0.5], [0.0, 2.0, 2.0]]).T.reshape(1, 3, 1, 2)
        >>> angles = Normals().metrics("pooled")
        >>> angles.update(output, truth)
        >>> {name: round(float(value), 4) for name, value in angles.compute().items()}
        {'mean': 22.5, 'median': 22.5, 'within_11.25': 0.5, 'within_22.5': 0.5, 'within_30': 0.5, 'valid': 2.0}
    """

    better: ClassVar[Mapping[str, Better]] = {
        "mean": "lower",
        "median": "lower",
        **{f"within_{degrees}": "higher" for degrees in WITHIN},
    }

    @property
    def outputs(self) -> int:
        """The components of the direction."""
        return 3

    def loss(self, output: Tensor, target: Tensor) -> Tensor | None:
        """Return 1 minus the mean inner product of the valid pixels."""
        predicted, truth = valid_pixels(output, target)
        return 1 - (unit(predicted) * truth).sum(dim=1).mean() if len(truth) else None

    def metrics(self, averaging: Averaging) -> "NormalAngles":
        """Return what there is to know of the angles."""
        return NormalAngles(averaging)


class NormalAngles(PixelMeans):
    """Mean and median angle, and shares of small ones; see `Normals`."""

    medians: Tensor
    angles: list[Tensor]

    def __init__(self, averaging: Averaging) -> None:
        super().__init__(("mean", *(f"within_{degrees}" for degrees in WITHIN)), averaging)
        self.add_state("medians", torch.zeros((), dtype=SUMS), dist_reduce_fx="sum")
        self.add_state("angles", [], dist_reduce_fx="cat")

    def update(self, output: Tensor, target: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take in one batch."""
        degrees = angles_between(*valid_pixels(output, target))
        self.add(torch.stack([degrees, *(degrees < limit for limit in WITHIN)]))
        if self.averaging == "pooled":
            self.angles.append(degrees.to(self.dtype))
        elif len(degrees):
            self.medians += median(degrees)

    def compute(self) -> dict[str, Tensor]:
        """Return the metrics of all batches."""
        values = super().compute()
        if not self.weight:
            return values
        pooled = self.averaging == "pooled"
        values["median"] = median(dim_zero_cat(self.angles)) if pooled else self.medians / self.weight
        return {name: values[name] for name in (*Normals.better, "valid")}


def valid_pixels(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the vectors of the valid pixels, ``(N, 3)`` both, in float32 or better."""
    check_shapes(output, ("B", 3, "H", "W"), target, ("B", 3, "H", "W"))
    valid = (target != 0).any(dim=1).unsqueeze(-1)
    predicted, truth = (full_precision(vectors).movedim(1, -1) for vectors in (output, target))
    return predicted.masked_select(valid).reshape(-1, 3), truth.masked_select(valid).reshape(-1, 3)


def unit(vectors: Tensor) -> Tensor:
    """Return vectors ``(N, 3)`` at unit length, whatever theirs is; those of length 0 as they are."""
    largest = vectors.detach().abs().amax(dim=1, keepdim=True)
    scaled = vectors / largest.where(largest > 0, 1)  # so that no square overflows or vanishes
    return scaled / scaled.norm(dim=1, keepdim=True).clamp(min=1)  # which is at least 1 unless the length is 0


def angles_between(first: Tensor, second: Tensor) -> Tensor:
    """Return the angles between vectors ``(N, 3)`` in degrees, accurate for the smallest and largest ones, too.

    Half the angle between unit vectors u and v has the tangent ``|u - v| / |u + v|`` (Kahan, 2006, *How futile are
    mindless assessments of roundoff in floating-point computation?*). The arc cosine of their inner product is off by
    up to 0.04 degrees near 0 and 180 in float32.
    """
    u, v = unit(first), unit(second)
    return torch.rad2deg(2 * torch.atan2((u - v).norm(dim=1), (u + v).norm(dim=1)))


def median(values: Tensor) -> Tensor:
    """Return the median, for an even number the mean of the two in the middle."""
    return torch.as_tensor(np.median(values.cpu().numpy(), overwrite_input=True))
