"""Gramians, weighted sums and norms at any scale, in any dtype, across blocks."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from flatmtl import _linalg
from flatmtl._linalg import floats, gramian, inner, norm, products_with, subtract_each, weighted_sum

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def rows(m: int, n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(m, n, dtype=torch.float64, generator=torch.Generator().manual_seed(m + n)).to(dtype)


def exact_gramian(J: Tensor) -> Tensor:
    """The inner products of the entries as given, in rational arithmetic, rounded once."""
    fractions = [[Fraction(x) for x in row] for row in J.double().tolist()]
    products = [[float(sum(x * y for x, y in zip(a, b, strict=True))) for b in fractions] for a in fractions]
    return torch.tensor(products, dtype=torch.float64)


def assert_equal_to_rounding(actual: Tensor, expected: Tensor) -> None:
    size = expected.abs().max()
    torch.testing.assert_close(actual / size, expected / size, atol=1e-15, rtol=1e-14)


class TestGramian:
    @every_dtype
    @pytest.mark.parametrize("shape", [(1, 1), (2, 50), (5, 3), (3, 200)], ids=str)
    def test_equals_rational_arithmetic(self, shape, dtype):
        J = rows(*shape, dtype)
        G, scale = gramian(J)
        assert G.dtype == torch.float64
        assert G.device.type == "cpu"
        assert_equal_to_rounding(G * scale**2, exact_gramian(J))

    @pytest.mark.parametrize("n", [1, 3, 4, 5, 8, 9, 100])
    @every_dtype
    def test_blocks_do_not_show(self, monkeypatch, n, dtype):
        J = rows(3, n, dtype)
        G, scale = gramian(J)
        monkeypatch.setattr(_linalg, "BLOCK_IN_CACHE", 12)  # four columns
        in_blocks, same_scale = gramian(J)
        assert same_scale == scale
        assert_equal_to_rounding(in_blocks, G)

    def test_more_rows_than_fit_into_a_block(self, monkeypatch):
        monkeypatch.setattr(_linalg, "BLOCK_IN_CACHE", 2)
        J = rows(5, 4)
        G, scale = gramian(J)
        assert_equal_to_rounding(G * scale**2, exact_gramian(J))

    @pytest.mark.parametrize(
        ("dtype", "exponent"),
        [(torch.float32, -83), (torch.float32, 100), (torch.float64, -565), (torch.float64, 1000)],
    )
    def test_squares_neither_underflow_nor_overflow(self, dtype, exponent):
        """2^-83 is 1e-25, 2^-565 is 1e-170."""
        J = rows(3, 20, torch.bfloat16).to(dtype)
        G, scale = gramian(torch.ldexp(J, torch.tensor(exponent)))
        reference, unit = gramian(J)
        assert bool((G.diagonal() > 0.0).all())
        ratio = math.ldexp(scale / unit, -exponent)
        torch.testing.assert_close(G * ratio**2, reference)

    @pytest.mark.parametrize("largest", [5e-324, 1e-310, 1.0, 1.7e308])
    def test_scale_is_a_power_of_two_near_the_largest_entry(self, largest):
        _, scale = gramian(torch.tensor([[largest, 0.0], [-largest, largest / 3]], dtype=torch.float64))
        assert math.frexp(scale)[0] == 0.5
        assert scale <= largest < 2.0 * scale

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_a_row_that_is_not_finite_spoils_its_own_products_only(self, dtype, bad):
        J = rows(4, 6, dtype)
        expected = exact_gramian(J)
        J[2, 3] = bad
        G, scale = gramian(J)
        finite = torch.ones(4, 4, dtype=torch.bool)
        finite[2], finite[:, 2] = False, False
        assert torch.equal(torch.isfinite(G), finite)
        torch.testing.assert_close(G[finite] * scale**2, expected[finite])

    def test_of_views(self):
        wide = rows(6, 16)
        for J in (wide.T[::3, 1:5], wide[::2, 1::3], rows(1, 5).expand(4, 5)):
            G, scale = gramian(J)
            assert_equal_to_rounding(G * scale**2, exact_gramian(J))

    @every_dtype
    def test_of_no_columns_is_zero(self, dtype):
        G, scale = gramian(torch.zeros(3, 0, dtype=dtype))
        assert torch.equal(G, torch.zeros(3, 3, dtype=torch.float64))
        assert scale == 1.0

    def test_input_is_left_alone(self):
        J = 1e-170 * rows(3, 5)
        before = J.clone()
        gramian(J)
        assert torch.equal(J, before)


class TestWeightedSum:
    @every_dtype
    def test_is_rounded_once(self, dtype):
        """Nearly opposite rows: their sum would be lost if products were rounded to the dtype."""
        J = rows(2, 40, torch.bfloat16).to(dtype)
        J[1] = -J[0] * 1.0078125
        w = torch.tensor([1.0, 0.9921875], dtype=torch.float64)  # all products are exact in float64
        expected = (J.double() * w[:, None]).sum(dim=0).to(dtype)
        assert torch.equal(weighted_sum(J, w), expected)

    @pytest.mark.parametrize("n", [1, 3, 4, 5, 100])
    def test_blocks_do_not_show(self, monkeypatch, n):
        J, w = rows(3, n), torch.tensor([1.0, -2.0, 0.5])
        expected = weighted_sum(J, w)
        monkeypatch.setattr(_linalg, "BLOCK_IN_CACHE", 12)
        torch.testing.assert_close(weighted_sum(J, w), expected)

    def test_of_views(self):
        wide = rows(6, 16)
        J, w = wide.T[::3, 1:5], torch.arange(6, dtype=torch.float64)
        torch.testing.assert_close(weighted_sum(J, w), J.T @ w)

    def test_of_no_columns_is_empty(self):
        assert weighted_sum(torch.zeros(2, 0), torch.ones(2)).shape == (0,)

    @pytest.mark.parametrize("known", [False, True], ids=["in float64", "in float32"])
    def test_is_added_if_asked_for_and_else_replaces_what_stands_there(self, known):
        J, w = rows(3, 50).float(), torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
        place = torch.full((50,), math.nan)
        G = gramian(J) if known else None
        assert weighted_sum(J, w, gramian=G, out=place) is place
        once = place.clone()
        torch.testing.assert_close(once, (J.double().T @ w).float())
        torch.testing.assert_close(weighted_sum(J, w, gramian=G, out=place, add=True), 2.0 * once)


class TestNorm:
    @every_dtype
    def test_is_over_all_entries_of_all_tensors(self, dtype):
        tensors = [rows(3, 4, dtype), rows(1, 5, dtype)[0], torch.zeros((), dtype=dtype), torch.zeros(0, dtype=dtype)]
        found = norm(tensors)
        assert found.dtype == torch.float64
        assert float(found) == pytest.approx(math.hypot(*(x for t in tensors for x in t.double().flatten().tolist())))

    @pytest.mark.parametrize(
        ("dtype", "size"),
        [(torch.float32, 1e-25), (torch.float32, 1e30), (torch.float64, 1e-170), (torch.float64, 1e170)],
    )
    def test_at_any_scale(self, dtype, size):
        tensors = [torch.full((2, 2), size, dtype=dtype), torch.full((5,), size, dtype=dtype)]
        assert float(norm(tensors)) == pytest.approx(3.0 * float(tensors[0][0, 0]), rel=1e-14)

    def test_blocks_do_not_show(self, monkeypatch):
        t = rows(3, 33).float()
        expected = norm([t])
        monkeypatch.setattr(_linalg, "BLOCK_IN_CACHE", 8)
        torch.testing.assert_close(norm([t]), expected)

    def test_of_nothing_is_zero(self):
        assert float(norm([])) == 0.0
        assert float(norm([torch.zeros(0)])) == 0.0
        assert float(norm([torch.zeros(0, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)])) == 0.0

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_is_not_finite_if_an_entry_is_not(self, dtype):
        for bad in (math.nan, math.inf):
            assert not math.isfinite(norm([torch.ones(3, dtype=dtype), torch.tensor([1.0, bad], dtype=dtype)]))

    def test_has_no_graph(self):
        assert not norm([torch.ones(2, requires_grad=True)]).requires_grad


@every_dtype
def test_inner_product_across_blocks(monkeypatch, dtype):
    a, b = rows(3, 7, dtype), rows(3, 7, dtype).flip(0)
    expected = float((a.double() * b.double()).sum())
    monkeypatch.setattr(_linalg, "BLOCK_IN_CACHE", 5)
    found = inner([a[:1], a[1:]], [b[:1], b[1:]])
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(expected, rel=1e-14)
    assert float(inner([a[:0]], [b[:0]])) == 0.0
    assert float(inner([], [])) == 0.0


class TestProductsWith:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
    @pytest.mark.parametrize("n", [0, 7, _linalg.SHORT + 1, 3 * _linalg.BLOCK_IN_CACHE])
    def test_equals_plain_arithmetic(self, n, dtype):
        J, v = rows(3, n, dtype), rows(1, n, dtype)[0].flip(0)
        products = J.double() * v.double()
        found = products_with(J, v)
        assert found.dtype == torch.float64
        assert ((found - products.sum(dim=1)).abs() <= 1e-6 * products.abs().sum(dim=1)).all()

    @pytest.mark.parametrize("size", [1e-25, 1e25])
    def test_nothing_is_lost_where_float32_has_no_squares(self, size):
        J, v = rows(2, 2 * _linalg.SHORT).float(), rows(1, 2 * _linalg.SHORT).float()[0]
        torch.testing.assert_close(
            products_with(size * J, size * v) / size**2, products_with(J, v), rtol=1e-4, atol=0.0
        )

    def test_a_row_that_is_not_finite_spoils_its_own_product_only(self):
        J, v = rows(2, 2 * _linalg.SHORT).float(), torch.ones(2 * _linalg.SHORT)
        J[0, 5] = math.nan
        assert products_with(J, v).isfinite().tolist() == [False, True]


class TestSubtractEach:
    """Each row becomes the value minus it, and the inner product of the two is that of the whole."""

    def pieces(self, dtype=torch.float32):
        """Return rows and values of several shapes and layouts, long ones and short ones."""
        a, b = rows(2, 4 * _linalg.BLOCK_IN_CACHE + 6).float()
        left = [x.clone() for x in (a[:6].view(2, 3), a[6:6], a[6:])]
        right = [b[:6].view(3, 2).T, b[6:6], b[6:]]
        return left, [x.to(dtype) for x in right]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
    def test_equals_plain_arithmetic(self, dtype):
        left, right = self.pieces(dtype)
        expected = [(y.double() - x.double()) for x, y in zip(left, right, strict=True)]
        product = subtract_each(left, right)
        for x, y in zip(left, expected, strict=True):
            torch.testing.assert_close(x, y.float())
        true = sum(float((x.double() * y.double()).sum()) for x, y in zip(left, right, strict=True))
        size = sum(float((x.double() * y.double()).abs().sum()) for x, y in zip(left, right, strict=True))
        assert product.dtype == torch.float64
        assert abs(float(product) - true) <= 1e-6 * size

    @pytest.mark.parametrize("size", [1e-25, 1e25])
    def test_nothing_is_lost_where_float32_has_no_squares(self, size):
        left, right = self.pieces()
        plain = float(subtract_each(left, right))
        left, right = self.pieces()
        scaled = subtract_each([size * x for x in left], [size * y for y in right])
        assert float(scaled) / size**2 == pytest.approx(plain, rel=1e-4)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_the_product_is_not_finite_if_a_value_is_not(self, bad):
        left, right = self.pieces()
        right[2][5] = bad
        assert not math.isfinite(subtract_each(left, right))


class TestLongFloat32Rows:
    """They are summed in float32 within short blocks, and with care where that would lose something."""

    LENGTHS = (_linalg.SHORT + 1, 3 * _linalg.SHORT, 5 * _linalg.SHORT + 7)

    @pytest.fixture
    def careful(self, monkeypatch):
        """Call a function with and without the quick sums, and return both results."""

        def both(function):
            quick = function()
            with monkeypatch.context() as patch:
                patch.setattr(_linalg, "_is_quick", lambda tensor: False)
                return quick, function()

        return both

    @pytest.mark.parametrize("n", LENGTHS)
    @pytest.mark.parametrize("size", [1e-44, 1e-30, 1e-19, 1e-12, 1.0, 1e12, 1e18, 1e30, 1e37])
    @pytest.mark.parametrize("alike", [False, True], ids=["all of one size", "one row of size 1"])
    def test_nothing_is_lost_at_any_scale(self, careful, n, size, alike):
        J = (rows(3, n) * torch.tensor([[1.0 if alike else size], [size], [size]])).float()
        norms = J.double().norm(dim=1)
        (G, scale), (expected, _) = careful(lambda: gramian(J))
        assert scale == 1.0
        lengths = norms[:, None] * norms
        torch.testing.assert_close(G / lengths, expected / lengths, rtol=0.0, atol=3e-7)
        for found, true in (careful(lambda: inner([J[0]], [J[1]])), careful(lambda: inner([J[2]], [J[2]]))):
            assert abs(float(found - true)) <= 1e-6 * float(norms[0] * norms[1] + norms[2] ** 2)
        found, true = careful(lambda: norm([J[1], J[2]]))
        assert float(found) == pytest.approx(float(true), rel=1e-6)

    def test_one_entry_stands_out(self, careful):
        """A tiny row with one normal entry: what the others add is less than rounding."""
        J = torch.full((2, 2 * _linalg.SHORT), 1e-30)
        J[0, 5] = 1.0
        (G, _), (expected, _) = careful(lambda: gramian(J))
        torch.testing.assert_close(G, expected, rtol=3e-7, atol=0.0)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_a_row_that_is_not_finite_spoils_its_own_products_only(self, bad):
        J = rows(3, self.LENGTHS[2]).float()
        expected, _ = gramian(J)
        J[1, self.LENGTHS[2] // 2] = bad
        G, _ = gramian(J)
        finite = torch.ones(3, 3, dtype=torch.bool)
        finite[1], finite[:, 1] = False, False
        assert torch.equal(torch.isfinite(G), finite)
        torch.testing.assert_close(G[finite], expected[finite], rtol=0.0, atol=3e-7 * float(expected.max()))
        assert not math.isfinite(inner([J[0]], [J[1]]))

    @pytest.mark.parametrize("angle", [1e-6, 1e-3, 0.1, 1.0, 3.0])
    def test_the_sum_of_rows_that_cancel_is_as_good_as_the_rows(self, angle):
        """Rows at an angle of pi - ``angle``, weighted so that their sum is short."""
        n = 2 * _linalg.SHORT
        a, b = torch.linalg.qr(rows(2, n).T).Q.T
        J = torch.stack([a, math.sin(angle) * b - math.cos(angle) * a]).float()
        w = torch.tensor([0.3, 0.3], dtype=torch.float64)  # products of which float32 rounds
        expected = J.double().T @ w
        found = weighted_sum(J, w, gramian=gramian(J))
        assert float((found.double() - expected).norm() / expected.norm()) < 3e-6

    @pytest.mark.parametrize("angle", [1e-5, 1e-4, 1e-3, 1e-2, 0.3])
    @pytest.mark.parametrize("opposite", [False, True], ids=["alike", "opposite"])
    def test_products_of_rows_near_to_dependent_are_exact(self, angle, opposite):
        """Weights of exact methods go by what little the rows differ in."""
        n = _linalg.SHORT + 616
        a, b = torch.linalg.qr(rows(2, n).T).Q.T
        J = torch.stack([a, (-1.0 if opposite else 1.0) * (a + angle * b)]).float()
        G, _ = gramian(J)
        expected = J.double() @ J.double().T
        assert float((G - expected).abs().max()) < 1e-7 * min(1.0, 1e4 * angle**2)

    @pytest.mark.parametrize("weight", [1e-36, 1e-33, 1e33, 1e36, 1e42])
    def test_weights_may_be_of_any_size(self, weight):
        J = (rows(2, 2 * _linalg.SHORT) / weight).float()
        w = torch.tensor([weight, weight], dtype=torch.float64)
        expected = (J.double().T @ w).float()
        torch.testing.assert_close(weighted_sum(J, w, gramian=gramian(J)), expected)


def test_floats_are_python_numbers():
    assert floats(torch.tensor([1.5, -2.0])) == [1.5, -2.0]


def test_products_beyond_float64_are_infinite_and_no_error():
    assert float(gramian(torch.full((1, 2), 1e200, dtype=torch.float64)).products()) == math.inf
