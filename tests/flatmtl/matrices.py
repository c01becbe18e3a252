"""Matrices for tests: drawn from a seed, or by hypothesis."""

import torch
from hypothesis import strategies as st
from torch import Tensor


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal entries in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def decades(m: int, span: float, seed: int) -> Tensor:
    """Factors over ``span`` decades, one for each row."""
    return 10.0 ** (span * torch.rand(m, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))


integer_rows = (
    st.integers(1, 6)
    .flatmap(lambda m: st.lists(st.lists(st.integers(-3, 3), min_size=4, max_size=4), min_size=m, max_size=m))
    .map(lambda rows: torch.tensor(rows, dtype=torch.float64))
)
"""Up to six rows of small integers: equal, opposite, zero and dependent ones are frequent."""


def _scaled(rows_and_powers: tuple[list[list[int]], list[int]]) -> Tensor:
    rows, powers = rows_and_powers
    factors = 10.0 ** torch.tensor(powers[: len(rows)], dtype=torch.float64)
    return torch.tensor(rows, dtype=torch.float64) * factors[:, None]


scaled_integer_rows = st.tuples(
    st.integers(1, 7).flatmap(
        lambda m: st.lists(st.lists(st.integers(-3, 3), min_size=3, max_size=3), min_size=m, max_size=m)
    ),
    st.lists(st.integers(-4, 4), min_size=7, max_size=7),
).map(_scaled)
"""Up to seven such rows, each times a power of ten."""
