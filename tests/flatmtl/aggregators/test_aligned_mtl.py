"""Principal components of one length."""

import json
from pathlib import Path

import pytest
import torch
from tests.flatmtl.matrices import randn
from torch import Tensor
from torchjd import aggregation as torchjd

from flatmtl.aggregators.aligned_mtl import AlignedMTL

MATRICES = json.loads((Path(__file__).parents[2] / "golden" / "aggregators.json").read_text())["matrices"]
EXACT = [entry for entry in MATRICES if entry["ops"]["aligned_mtl"]["exact"] is not None]

pytestmark = pytest.mark.filterwarnings("ignore:.*a task gradient is zero")


def naive(J: Tensor) -> Tensor:
    """From the singular value decomposition of the rows themselves; the rank is known from how they were made."""
    U, singular, Vh = torch.linalg.svd(J, full_matrices=False)
    kept = singular > 1e-9 * singular[0]
    return singular[kept][-1] * (U[:, kept] @ Vh[kept]).mean(dim=0)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual / expected.norm(), expected / expected.norm(), atol=tolerance, rtol=0.0)


@pytest.mark.parametrize("entry", EXACT, ids=[entry["id"] for entry in EXACT])
def test_golden(entry):
    d = AlignedMTL()(torch.tensor(entry["G"], dtype=torch.float64))
    g = torch.tensor(entry["ops"]["aligned_mtl"]["exact"]["g"], dtype=torch.float64)
    size = float(g.abs().max())
    torch.testing.assert_close(d / size, g / size, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize(
    ("m", "n"), [(1, 3), (2, 5), (3, 9), (5, 3), (10, 64), (16, 4), (40, 100), (64, 30), (64, 200)]
)
def test_equals_the_decomposition_of_the_rows(m, n):
    for seed in range(3):
        J = randn(m, n, seed=seed)
        assert_close(AlignedMTL()(J), naive(J))


@pytest.mark.parametrize("ratio", [1e-3, 1e-6, 1e-9])
def test_a_short_row_is_no_dependent_row(ratio):
    J = randn(3, 6)
    J[1] *= ratio
    U, singular, Vh = torch.linalg.svd(J, full_matrices=False)
    assert_close(AlignedMTL()(J), singular[-1] * (U @ Vh).mean(dim=0), tolerance=1e-14 / ratio)


def test_nearly_dependent_rows_are_as_accurate_as_their_gramian():
    J = randn(3, 6)
    J[2] = J[0] - J[1] + 1e-4 * J[2]
    assert_close(AlignedMTL()(J), naive(J), tolerance=1e-6)


@pytest.mark.parametrize(("m", "rank"), [(3, 2), (5, 1), (8, 3), (40, 10), (64, 20)])
def test_rows_that_depend_on_each_other_are_aligned_on_their_range(m, rank):
    J = randn(m, rank, seed=1) @ randn(rank, 50, seed=2)
    assert_close(AlignedMTL()(J), naive(J))


def test_the_direction_has_one_length_whatever_the_rows():
    for seed in range(5):
        J = randn(6, 20, seed=seed)
        smallest = torch.linalg.svdvals(J)[-1]
        torch.testing.assert_close(AlignedMTL()(J).norm(), smallest / 6**0.5)


def test_by_hand():
    """Orthogonal rows become equally long; of (1, 1) and (1, 0.5) the polar factor is computed from its angle."""
    J = torch.diag(torch.tensor([1.0, 4.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(AlignedMTL()(J), torch.full((3,), 1.0 / 3.0, dtype=torch.float64))
    J = torch.tensor([[3.0, 1.0], [1.0, 3.0]], dtype=torch.float64)  # symmetric and positive: polar factor 1
    torch.testing.assert_close(AlignedMTL()(J), torch.ones(2, dtype=torch.float64))  # singular values 4 and 2


@pytest.mark.parametrize("m", [2, 3, 40])
def test_equal_rows_give_the_row(m):
    row = randn(6)
    torch.testing.assert_close(AlignedMTL()(row.expand(m, -1)), row)


def test_opposite_rows_cancel():
    row = randn(6)
    assert float(AlignedMTL()(torch.stack([row, -row])).norm()) <= 1e-14
    torch.testing.assert_close(AlignedMTL()(torch.stack([row, -3.0 * row])), -row)  # both of length sqrt(10)


def test_a_zero_row_has_no_weight_but_counts():
    J = randn(3, 6)
    with_zero = torch.cat([J[:1], torch.zeros(1, 6, dtype=torch.float64), J[1:]])
    w = AlignedMTL().weights(with_zero @ with_zero.T)
    assert float(w[1]) == 0.0
    torch.testing.assert_close(AlignedMTL()(with_zero), 0.75 * AlignedMTL()(J))


@pytest.mark.parametrize("scale", [1e-150, 1e-30, 1e-12, 1e12, 1e150])
def test_scale(scale):
    J = randn(5, 9)
    assert_close(AlignedMTL()(scale * J) / scale, AlignedMTL()(J), tolerance=1e-12)


def test_narrow_rows_are_rounded_once():
    J = randn(4, 50).bfloat16()
    d = AlignedMTL()(J)
    assert d.dtype == torch.bfloat16
    assert_close(d.double(), naive(J.double()), tolerance=4e-3)


@pytest.mark.parametrize(("m", "n"), [(2, 5), (5, 9), (40, 100)])
def test_equals_the_peer_on_independent_rows(m, n):
    J = randn(m, n)
    assert_close(AlignedMTL()(J), torchjd.AlignedMTL()(J), tolerance=1e-9)
