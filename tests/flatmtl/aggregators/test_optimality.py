"""How close the weights are to the solution of their problem, in extended precision, at every number of tasks."""

import numpy as np
import pytest
import torch
from tests.flatmtl.matrices import randn
from torch import Tensor

from flatmtl.aggregators import MGDA, CAGrad, FairGrad, NashMTL


def random(m: int, seed: int) -> Tensor:
    return randn(m, 2 * m + 3, seed=seed)


def conflicting(m: int, seed: int) -> Tensor:
    """Rows that nearly add up to zero."""
    rows = randn(m, 2 * m + 3, seed=seed)
    return rows - 0.95 * rows.mean(dim=0)


def badly_scaled(m: int, seed: int) -> Tensor:
    """Rows over eight decades."""
    exponents = 8.0 * torch.rand(m, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) - 4.0
    return randn(m, 2 * m + 3, seed=seed) * 10.0**exponents


def rank_deficient(m: int, seed: int) -> Tensor:
    """More rows than columns, in one half-space, some of them in conflict."""
    rows = randn(m, max(m // 2, 1), seed=seed)
    return torch.cat([rows, 0.5 + rows[:, :1].abs()], dim=1)


every_problem = pytest.mark.parametrize(
    "J",
    [
        pytest.param(family(m, seed), id=f"{family.__name__}-{m}-{seed}")
        for family in (random, conflicting, badly_scaled, rank_deficient)
        for m in (1, 2, 3, 4, 5, 10, 20, 40, 64, 100)
        for seed in range(2)
    ],
)


def exactly(J: Tensor, w: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Return rows, weights and direction in extended precision, and the length of the longest row."""
    rows, weights = J.numpy().astype(np.longdouble), w.numpy().astype(np.longdouble)
    return rows, weights, rows.T @ weights, float(np.sqrt((rows**2).sum(axis=1)).max())


@every_problem
def test_mgda(J):
    rows, _, d, longest = exactly(J, MGDA().weights(J @ J.T))
    assert d @ d - (rows @ d).min() <= 1e-12 * longest**2


@every_problem
@pytest.mark.parametrize("c", [0.2, 0.8])
def test_cagrad(J, c):
    """The duality gap: what the worst-served task gains against what the dual weights say it can."""
    rows, w, d, longest = exactly(J, CAGrad(c).weights(J @ J.T))
    mean = rows.mean(axis=0)
    length = np.sqrt(mean @ mean)
    x = w - 1 / np.longdouble(len(J))  # d = mean + J' x
    dual = x / x.sum()
    bound = rows @ mean @ dual + c * length * np.sqrt((rows.T @ dual) @ (rows.T @ dual))
    assert np.sqrt((d - mean) @ (d - mean)) <= (1 + 1e-9) * c * length
    assert bound - (rows @ d).min() <= 1e-9 * length * longest


@pytest.mark.filterwarnings("ignore:.*the weights are not exact")  # above 1e-10, the bound of the class
@every_problem
@pytest.mark.parametrize("alpha", [1.0, 2.0, 5.0])
def test_nash_and_fairgrad(J, alpha):
    for aggregator in [FairGrad(alpha), *([NashMTL()] if alpha == 1.0 else [])]:
        rows, w, d, _ = exactly(J, aggregator.weights(J @ J.T))
        assert np.abs((rows @ d) * w ** np.longdouble(1 / alpha) - 1).max() <= 1e-9
