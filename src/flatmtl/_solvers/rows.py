"""Lengths of the rows behind a Gramian, and the rounding that every solver works at."""

from collections.abc import Callable

import torch
from torch import Tensor

EPS = torch.finfo(torch.float64).eps
NOISE = 16 * EPS  # rounding of sums of products of unit rows
DEPENDENT = EPS**0.5  # smallest eigenvalue of a Gramian of unit rows below which rounding may matter
RIDGE = 4 * NOISE  # what a Gramian of unit rows must be raised by to be definite whatever the rounding


def row_norms(gramian: Tensor) -> Tensor:
    """Return the Euclidean norms of the rows behind a Gramian, shape ``(m,)``."""
    return gramian.diagonal().clamp(min=0.0).sqrt()


def unit_rows(gramian: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Gramian of the unit rows, and the shortest norm divided by each norm."""
    return gramian / norms.unsqueeze(1) / norms, norms.min() / norms


def weights_without_zero_rows(gramian: Tensor, solve: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the weights of all rows, 0 for zero rows and for the others what ``solve(U, lengths)`` returns.

    ``U`` is the Gramian of the rows that are not zero, scaled to unit length, and ``lengths`` are their norms.
    """
    norms = row_norms(gramian)
    rows = norms.nonzero().squeeze(1)
    weights = torch.zeros_like(norms)
    if len(rows):
        lengths = norms[rows]
        weights[rows] = solve(unit_rows(gramian[rows][:, rows], lengths)[0], lengths)
    return weights
