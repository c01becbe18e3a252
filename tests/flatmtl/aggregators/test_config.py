"""Equal cosines to all task gradients."""

import pytest
import torch
from hypothesis import given, settings
from tests.flatmtl.matrices import integer_rows, randn
from torch import Tensor
from torchjd import aggregation as torchjd

from flatmtl.aggregators.config import ConFIG
from flatmtl.aggregators.imtl_g import IMTLG

pytestmark = pytest.mark.filterwarnings("ignore:.*a task gradient is zero")


def of_many_lengths(m: int, n: int, seed: int = 0) -> Tensor:
    return randn(m, n, seed=seed) * 10 ** (
        6 * torch.rand(m, 1, generator=torch.Generator().manual_seed(m)).double() - 3
    )


def naive(J: Tensor) -> Tensor:
    """The definition, from the pseudo-inverse of the unit rows; zero rows are left out."""
    rows = J[J.norm(dim=1) > 0.0]
    if len(rows) == 0:
        return torch.zeros_like(J[0])
    u = torch.linalg.pinv(rows / rows.norm(dim=1, keepdim=True), rtol=1e-7).sum(dim=1)
    if float(u.norm()) <= 1e-8:
        return torch.zeros_like(u)
    u = u / u.norm()
    return (rows @ u).sum() * u


def assert_close(actual: Tensor, expected: Tensor, size: float, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual / size, expected / size, atol=tolerance, rtol=0.0)


@pytest.mark.parametrize(("m", "n"), [(1, 3), (2, 5), (3, 2), (5, 9), (10, 4), (40, 100), (64, 30), (64, 200)])
def test_equals_the_pseudo_inverse_of_the_unit_rows(m, n):
    for seed in range(3):
        J = of_many_lengths(m, n, seed=seed)
        assert_close(ConFIG()(J), naive(J), size=float(J.norm()))


@settings(max_examples=200, deadline=None)
@given(J=integer_rows)
def test_equals_the_pseudo_inverse_for_any_integers(J):
    assert_close(ConFIG()(J), naive(J), size=10.0)


@pytest.mark.parametrize(("m", "n"), [(1, 3), (2, 5), (3, 9), (10, 64), (40, 100), (64, 65)])
def test_independent_rows_have_equal_positive_cosines_and_no_conflict(m, n):
    J = of_many_lengths(m, n)
    d = ConFIG()(J)
    cosines = J @ d / J.norm(dim=1) / d.norm()
    assert float(cosines.min()) > 0.0
    assert float(cosines.max() - cosines.min()) <= 1e-9


def test_its_length_is_that_of_all_projections_together():
    J = randn(4, 9)
    d = ConFIG()(J)
    torch.testing.assert_close(d.norm(), (J @ d / d.norm()).sum())


def test_two_rows_in_closed_form():
    """Halfway between them, as long as both lengths times the cosine of half the angle."""
    for seed in range(10):
        J = of_many_lengths(2, 5, seed=seed)
        lengths = J.norm(dim=1)
        between = (J / lengths[:, None]).sum(dim=0)
        half = ((1.0 + J[0] @ J[1] / lengths.prod()) / 2.0).sqrt()
        assert_close(ConFIG()(J), between / between.norm() * lengths.sum() * half, size=float(lengths.max()))


def test_by_hand():
    J = torch.tensor([[1.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    torch.testing.assert_close(ConFIG()(J), torch.tensor([2.0, 2.0], dtype=torch.float64))


def test_it_lies_on_the_line_of_equal_projections():
    J = randn(5, 9)
    d, other = ConFIG()(J), IMTLG()(J)
    assert float((d @ other).abs() / d.norm() / other.norm()) == pytest.approx(1.0)


@pytest.mark.parametrize("m", [1, 2, 3, 40])
def test_equal_rows_give_their_sum(m):
    row = randn(6)
    torch.testing.assert_close(ConFIG()(row.expand(m, -1)), m * row)


def test_opposite_rows_give_zero():
    row = randn(6)
    assert ConFIG()(torch.stack([row, -row])).tolist() == [0.0] * 6
    assert ConFIG()(torch.stack([row, -3.7 * row])).tolist() == [0.0] * 6


def test_opposite_rows_have_no_say_beside_another():
    """Their cosines can only be zero, so the least squares are left to the third row."""
    J = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    torch.testing.assert_close(ConFIG()(J), torch.tensor([0.0, 2.0], dtype=torch.float64))


@pytest.mark.parametrize("distance", [1e-2, 1e-4, 1e-6])
def test_nearly_opposite_rows_gain_little_but_equally(distance):
    row = randn(20)
    J = torch.stack([row, -row + distance * randn(20, seed=1)])
    d = ConFIG()(J)
    cosines = J @ d / J.norm(dim=1) / d.norm()
    assert 0.0 < float(cosines.min()) < distance
    assert float(cosines.max() - cosines.min()) <= 1e-9


@pytest.mark.parametrize("m", [1, 3, 8])
def test_zero_rows_are_left_out(m):
    J = randn(m, 9)
    with_zeros = torch.cat([torch.zeros(1, 9, dtype=torch.float64), J, torch.zeros(2, 9, dtype=torch.float64)])
    torch.testing.assert_close(ConFIG()(with_zeros), ConFIG()(J))
    assert ConFIG()(with_zeros[[0, -1]]).tolist() == [0.0] * 9


@pytest.mark.parametrize("scale", [1e-150, 1e-30, 1e-12, 1e12, 1e150])
def test_scale(scale):
    J = of_many_lengths(5, 9)
    assert_close(ConFIG()(scale * J) / scale, ConFIG()(J), size=float(J.norm()), tolerance=1e-12)


def test_narrow_rows_are_rounded_once():
    J = randn(4, 50).bfloat16()
    d = ConFIG()(J)
    assert d.dtype == torch.bfloat16
    exact = naive(J.double())
    assert_close(d.double(), exact, size=float(exact.abs().max()), tolerance=4e-3)


@pytest.mark.parametrize(("m", "n"), [(2, 5), (5, 9), (40, 100)])
def test_equals_the_peer_on_independent_rows(m, n):
    J = of_many_lengths(m, n)
    assert_close(ConFIG()(J), torchjd.ConFIG()(J), size=float(J.norm()))
