"""Matrices of every kind that a solver must be right for."""

import numpy as np
import pytest
import torch
from tests.flatmtl.matrices import decades, randn
from torch import Tensor


def chosen(basis: Tensor, m: int, seed: int) -> Tensor:
    """Return ``m`` rows of the basis, some of them more than once."""
    return basis[torch.randint(len(basis), (m,), generator=torch.Generator().manual_seed(seed))]


def signs(m: int, seed: int) -> Tensor:
    return torch.where(randn(m, 1, seed=seed) > 0.0, 1.0, -1.0)


FAMILIES = {
    "random": lambda m, n, s: randn(m, n, seed=s),
    "one orthant": lambda m, n, s: randn(m, n, seed=s).abs(),
    "eight decades": lambda m, n, s: randn(m, n, seed=s) * decades(m, 8, s),
    "eight decades, one orthant": lambda m, n, s: randn(m, n, seed=s).abs() * decades(m, 8, s),
    "nearly equal": lambda m, n, s: randn(1, n, seed=s) + 1e-7 * randn(m, n, seed=s + 1),
    "rounded to float32": lambda m, n, s: (randn(m, n, seed=s) + 1.0).float().double(),
    "equal": lambda m, n, s: chosen(randn(max(m // 2, 1), n, seed=s), m, s),
    "parallel": lambda m, n, s: chosen(randn(max(m // 2, 1), n, seed=s), m, s) * decades(m, 3, s),
    "opposite": lambda m, n, s: chosen(randn(max(m // 2, 1), n, seed=s), m, s) * signs(m, s),
    "nearly opposite": lambda m, n, s: (
        chosen(randn(max(m // 2, 1), n, seed=s), m, s) * signs(m, s) + 1e-7 * randn(m, n, seed=s)
    ),
    "rank one": lambda m, n, s: randn(m, 1, seed=s) * randn(1, n, seed=s + 1),
    "rank two": lambda m, n, s: randn(m, 2, seed=s) @ randn(2, n, seed=s + 1),
    "affinely dependent": lambda m, n, s: randn(m, 2, seed=s) @ randn(2, n, seed=s + 1) + randn(1, n, seed=s + 2),
    "integers": lambda m, n, s: randn(m, n, seed=s).round(),
    "tiny": lambda m, n, s: 1e-60 * randn(m, n, seed=s),
    "huge": lambda m, n, s: 1e60 * randn(m, n, seed=s),
}
SHAPES = [(1, 3), (2, 1), (2, 5), (3, 2), (3, 8), (5, 3), (8, 20), (16, 4), (40, 3), (40, 64), (64, 200)]

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def exactly(J: Tensor, w: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows, weights and direction in extended precision, so that only errors of the weights show."""
    rows, weights = J.numpy().astype(np.longdouble), w.numpy().astype(np.longdouble)
    return rows, weights, rows.T @ weights
