"""Laws that hold for every aggregator; a new one joins all of them by its entry in ``AGGREGATORS``."""

import copy
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flatmtl.aggregators import IMTLG, MGDA, CAGrad, Context, Mean, PCGrad, Sum

AGGREGATORS = {
    "mean": Mean,
    "sum": Sum,
    "mgda": MGDA,
    "mgda_l2": lambda: MGDA(normalise="l2"),
    "mgda_loss": lambda: MGDA(normalise="loss"),
    "mgda_loss+": lambda: MGDA(normalise="loss+"),
    "pcgrad": PCGrad,
    "pcgrad_mean": lambda: PCGrad(reduction="mean", seed=3),
    "cagrad": CAGrad,
    "cagrad_1+c2": lambda: CAGrad(c=0.8, rescale="1+c2"),
    "cagrad_1+c": lambda: CAGrad(c=1.5, rescale="1+c"),
    "imtl_g": IMTLG,
}
SHAPES = [(1, 3), (2, 2), (2, 9), (3, 5), (5, 3), (8, 20), (16, 4), (40, 64), (64, 100)]
SCALES = [1e-12, 1e-6, 1e-3, 1e3, 1e6]

every_aggregator = pytest.mark.parametrize("make", AGGREGATORS.values(), ids=AGGREGATORS)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def task_gradients(m: int, n: int, seed: int = 0) -> Tensor:
    """Rows of lengths within a factor of ten in one half-space: some conflict, but not all with one another."""
    generator = torch.Generator().manual_seed(1000 * m + n + seed)
    rows = torch.randn(m, n, dtype=torch.float64, generator=generator)
    rows *= torch.where(rows.sum(dim=1, keepdim=True) < 0.0, -1.0, 1.0)
    return rows * 10 ** torch.rand(m, 1, dtype=torch.float64, generator=generator)


def losses(m: int) -> Tensor:
    return torch.linspace(1.0, 3.0, m, dtype=torch.float64)


def direction(make, J: Tensor, of_losses: Tensor | None = None) -> Tensor:
    """Call a new aggregator, so that what is drawn is the same each time."""
    m = len(J)
    aggregator = make()
    if not aggregator.uses_context:
        return aggregator(J)
    return aggregator(J, Context(tuple(range(m)), losses(m) if of_losses is None else of_losses))


def assert_same(actual: Tensor, expected: Tensor, size: Tensor | float, tolerance: float = 1e-9) -> None:
    """Equal up to a billionth of ``size``: an absolute tolerance would hide errors at small scale."""
    torch.testing.assert_close(actual / size, expected / size, atol=tolerance, rtol=0.0)


@every_aggregator
class TestLaws:
    @every_shape
    @pytest.mark.parametrize("scale", SCALES)
    def test_scale(self, make, shape, scale):
        J = task_gradients(*shape)
        factor = scale ** make().degree
        assert_same(direction(make, scale * J), factor * direction(make, J), size=factor * J.norm())

    @pytest.mark.parametrize("exponent", [-500, 500])
    def test_scale_where_squares_leave_float64(self, make, exponent):
        J = task_gradients(3, 5)
        scaled = torch.ldexp(direction(make, torch.ldexp(J, torch.tensor(exponent))), torch.tensor(-exponent))
        assert_same(scaled, direction(make, J), size=J.norm())

    def test_scale_where_squares_leave_float32(self, make):
        J = task_gradients(3, 5).float()
        assert_same(direction(make, 2.0**-100 * J) * 2.0**100, direction(make, J), size=J.norm(), tolerance=1e-6)

    @every_shape
    def test_task_order_does_not_matter(self, make, shape):
        m, J = shape[0], task_gradients(*shape)
        backwards = torch.arange(m - 1, -1, -1)
        if m > 2 and make().order_dependent:
            pairs = torch.zeros(m, dtype=torch.bool)
            pairs[:2] = True
            J, backwards, m = J[pairs], torch.tensor([1, 0]), 2
        assert_same(direction(make, J[backwards], losses(m)[backwards]), direction(make, J), size=J.norm())

    @every_shape
    def test_direction_is_finite_and_of_the_size_of_the_rows(self, make, shape):
        J = task_gradients(*shape)
        d = direction(make, J)
        assert d.shape == J.shape[1:]
        assert bool(torch.isfinite(d).all())

    def test_one_task_gives_a_positive_multiple_of_its_row(self, make):
        J = task_gradients(1, 6)
        factor = direction(make, torch.ones(1, 1, dtype=torch.float64))
        assert 0.5 < float(factor) <= 2.5
        assert_same(direction(make, J), factor * J[0], size=J.norm())

    @pytest.mark.parametrize("m", [2, 3, 7, 40])
    def test_equal_rows_give_a_multiple_of_the_row(self, make, m):
        row = task_gradients(1, 6)
        d = direction(make, row.expand(m, -1))
        factor = direction(make, torch.ones(m, 1, dtype=torch.float64))
        assert float(factor) > 0.5
        assert_same(d, factor * row[0], size=m * row.norm())

    @pytest.mark.parametrize("m", [2, 3, 8])
    def test_orthogonal_rows_all_gain(self, make, m):
        J = torch.diag(torch.linspace(1.0, 4.0, m, dtype=torch.float64))
        assert bool((J @ direction(make, J) > 0.0).all())

    @pytest.mark.parametrize("m", [1, 2, 3, 40])
    def test_no_gradients_give_no_direction(self, make, m):
        assert bool((direction(make, torch.zeros(m, 4)) == 0.0).all())

    def test_no_parameters_give_an_empty_direction(self, make):
        assert direction(make, torch.zeros(3, 0)).shape == (0,)

    @pytest.mark.parametrize("m", [2, 3, 8])
    def test_a_zero_row_gives_a_finite_direction_in_the_span_of_the_others(self, make, m):
        J = task_gradients(m, 3)
        J[:, 2] = 0.0
        J[m // 2] = 0.0
        d = direction(make, J)
        assert bool(torch.isfinite(d).all())
        assert abs(float(d[2])) <= 1e-12 * float(J.norm())

    @pytest.mark.parametrize("m", [2, 3, 5, 12, 40])
    def test_dependent_rows(self, make, m):
        basis = task_gradients(2, 7)
        mixing = torch.randn(m, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(m))
        J = mixing @ basis
        d = direction(make, J)
        residual = d - basis.T @ torch.linalg.lstsq(basis.T, d[:, None]).solution.squeeze(1)
        assert bool(torch.isfinite(d).all())
        assert float(residual.norm()) <= 1e-9 * float(J.norm()) * m

    @pytest.mark.parametrize("m", range(1, 65))
    def test_any_number_of_tasks(self, make, m):
        for n in (2, m + 1):
            assert bool(torch.isfinite(direction(make, task_gradients(m, n))).all())

    def test_opposite_rows_cancel(self, make):
        row = task_gradients(1, 4)
        d = direction(make, torch.cat([row, -row]), of_losses=torch.ones(2, dtype=torch.float64))
        assert float(d.norm()) <= 1e-9 * float(row.norm())

    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)], ids=str
    )
    @every_shape
    def test_narrow_dtypes_are_rounded_only_once(self, make, shape, dtype, tolerance):
        J = task_gradients(*shape).to(dtype)
        exact = direction(make, J.double())
        d = direction(make, J)
        assert d.dtype == dtype
        assert_same(
            d.double(), exact, size=float(exact.abs().max()) + 1e-3 * float(J.double().norm()), tolerance=tolerance
        )

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
    def test_weights_have_the_dtype_of_the_gramian(self, make, dtype):
        for J in (task_gradients(3, 5), torch.tensor([[1.0], [-1.0], [3.0], [-3.0]], dtype=torch.float64)):
            m = len(J)
            w = make().weights((J @ J.T).to(dtype), Context(tuple(range(m)), losses(m)))
            assert w.dtype == dtype
            assert w.shape == (m,)
            assert bool(torch.isfinite(w).all())

    def test_direction_is_the_weighted_sum_of_the_rows(self, make):
        J = task_gradients(4, 6)
        w = make().weights(J @ J.T, Context((0, 1, 2, 3), losses(4)))
        assert_same(direction(make, J), J.T @ w, size=J.norm())

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    def test_rows_that_are_not_finite_are_named(self, make, bad):
        J = task_gradients(4, 3)
        J[1, 2], J[3, 0] = bad, bad
        with pytest.raises(ValueError, match=r"task gradients \[1, 3\] \(rows, from 0\) are not finite"):
            direction(make, J)

    def test_input_is_left_alone(self, make):
        J = task_gradients(5, 7)
        before = J.clone()
        direction(make, J)
        assert torch.equal(J, before)
        G = J @ J.T
        before = G.clone()
        make().weights(G, Context(tuple(range(5)), losses(5)))
        assert torch.equal(G, before)

    def test_direction_has_memory_of_its_own_and_no_graph(self, make):
        J = task_gradients(1, 3).requires_grad_()
        d = direction(make, J)
        assert not d.requires_grad
        assert d.untyped_storage().data_ptr() != J.untyped_storage().data_ptr()

    def test_views_of_a_larger_matrix(self, make):
        J = task_gradients(4, 6)
        wide = torch.full((6, 8), torch.nan, dtype=torch.float64)
        wide.T[1:5, :] = J[:, :6]
        assert_same(direction(make, wide.T[1:5]), direction(make, J), size=J.norm())

    def test_global_random_state_is_left_alone(self, make):
        before, python = torch.get_rng_state(), random.getstate()
        direction(make, task_gradients(5, 7))
        assert torch.equal(torch.get_rng_state(), before)
        assert random.getstate() == python

    def test_copies_and_restored_states_go_on_alike(self, make):
        J, context = task_gradients(6, 9), Context(tuple(range(6)), losses(6))
        aggregator = make()
        aggregator.weights(J @ J.T, context)
        twin, restored = copy.deepcopy(aggregator), make()
        restored.load_state_dict(aggregator.state_dict())
        for _ in range(3):
            w = aggregator.weights(J @ J.T, context)
            assert torch.equal(twin.weights(J @ J.T, context), w)
            assert torch.equal(restored.weights(J @ J.T, context), w)

    def test_state_of_another_class_is_refused(self, make):
        with pytest.raises(ValueError, match="Load the state of the same aggregator"):
            make().load_state_dict({"from": "elsewhere"})

    @pytest.mark.parametrize(
        "J", [torch.ones(3), torch.ones(0, 3), torch.ones(2, 2, 2), torch.ones(2, 3, dtype=torch.int64)], ids=str
    )
    def test_what_is_no_matrix_of_task_gradients_is_refused(self, make, J):
        with pytest.raises(ValueError, match="expected a floating-point matrix"):
            make()(J)

    def test_printed_form_builds_it_again(self, make):
        aggregator = make()
        again = eval(repr(aggregator))
        assert repr(again) == repr(aggregator)
        assert type(again) is type(aggregator)


def test_no_two_methods_agree_on_conflicting_gradients():
    J = torch.tensor([[1.0, 0.2, 0.0], [-1.5, 1.0, 0.3], [0.4, 3.0, -1.0]], dtype=torch.float64)
    directions = {name: direction(make, J) for name, make in AGGREGATORS.items() if name not in ("pcgrad_mean", "sum")}
    directions = {name: d / d.norm() for name, d in directions.items()}
    for a, b in ((a, b) for a in directions for b in directions if a < b):
        assert float((directions[a] - directions[b]).norm()) > 1e-3, (a, b)


matrices = st.integers(1, 6).flatmap(
    lambda m: st.lists(
        st.tuples(st.lists(st.integers(-4, 4), min_size=3, max_size=3), st.integers(-6, 6)), min_size=m, max_size=m
    )
)


@settings(max_examples=200, deadline=None)
@given(rows=matrices)
def test_any_matrix_gives_a_finite_direction_of_the_size_of_its_rows(rows):
    J = torch.tensor([[entry * 10.0**power for entry in row] for row, power in rows], dtype=torch.float64)
    longest = float(J.norm(dim=1).max())
    for name, make in AGGREGATORS.items():
        d = direction(make, J)
        assert bool(torch.isfinite(d).all()), name
        if name != "imtl_g":  # equal projections may need large weights of both signs
            assert float(d.norm()) <= 1.000001 * len(J) * longest * 2.5, name
