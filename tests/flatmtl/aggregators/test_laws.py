"""Laws that hold for every aggregator; a new one joins all of them by its entry in ``AGGREGATORS``."""

import copy
import io
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flatmtl import aggregators
from flatmtl.aggregators import (
    DWA,
    FAMO,
    GLS,
    IMTLG,
    IMTLL,
    LS,
    MGDA,
    RLW,
    SI,
    UW,
    AlignedMTL,
    CAGrad,
    ConFIG,
    Context,
    DualProj,
    FairGrad,
    Fixed,
    GradDrop,
    GradVac,
    GramianAggregator,
    LossWeighting,
    Mean,
    NashMTL,
    PCGrad,
    Random,
    Sum,
    UPGrad,
)

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{said}")
    for said in ("a task gradient is zero", "no direction serves every task", "the weights are not exact")
]


def fixed() -> Fixed:
    return Fixed([1.5, 0.5, 1.0, 2.0] * 16)


def dwa() -> DWA:
    aggregator = DWA()
    aggregator.start_epoch(1)
    return aggregator


AGGREGATORS = {
    "mean": Mean,
    "sum": Sum,
    "fixed": fixed,
    "random": Random,
    "mgda": MGDA,
    "mgda_l2": lambda: MGDA(normalise="l2"),
    "mgda_loss": lambda: MGDA(normalise="loss"),
    "mgda_loss+": lambda: MGDA(normalise="loss+"),
    "upgrad": UPGrad,
    "dualproj": DualProj,
    "nash_mtl": NashMTL,
    "nash_mtl_max_norm": lambda: NashMTL(max_norm=0.7),
    "fairgrad": FairGrad,
    "fairgrad_1": lambda: FairGrad(alpha=1.0),
    "fairgrad_5": lambda: FairGrad(alpha=5.0),
    "fairgrad_half": lambda: FairGrad(alpha=0.5),
    "cagrad": CAGrad,
    "cagrad_1+c2": lambda: CAGrad(c=0.8, rescale="1+c2"),
    "cagrad_1+c": lambda: CAGrad(c=1.5, rescale="1+c"),
    "imtl_g": IMTLG,
    "config": ConFIG,
    "aligned_mtl": AlignedMTL,
    "pcgrad": PCGrad,
    "pcgrad_mean": lambda: PCGrad(reduction="mean", seed=3),
    "gradvac": GradVac,
    "graddrop": GradDrop,
    "graddrop_leak": lambda: GradDrop(leak=0.3),
    "ls": LS,
    "si": SI,
    "gls": GLS,
    "rlw": RLW,
    "dwa": dwa,
    "uw": lambda: UW(tasks=64),
    "imtl_l": lambda: IMTLL(tasks=64),
    "famo": lambda: FAMO(tasks=64),
}
SHAPES = [(1, 3), (2, 2), (2, 9), (3, 5), (5, 3), (8, 20), (16, 4), (40, 64), (64, 100)]
SCALES = [1e-12, 1e-6, 1e-3, 1e3, 1e6]

GRAMIAN = {name: make for name, make in AGGREGATORS.items() if isinstance(make(), GramianAggregator)}

every_aggregator = pytest.mark.parametrize("make", AGGREGATORS.values(), ids=AGGREGATORS)
every_gramian_aggregator = pytest.mark.parametrize("make", GRAMIAN.values(), ids=GRAMIAN)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def task_gradients(m: int, n: int, seed: int = 0) -> Tensor:
    """Rows of lengths within a factor of ten in one half-space: some conflict, but not all with one another."""
    generator = torch.Generator().manual_seed(1000 * m + n + seed)
    rows = torch.randn(m, n, dtype=torch.float64, generator=generator)
    rows *= torch.where(rows.sum(dim=1, keepdim=True) < 0.0, -1.0, 1.0)
    return rows * 10 ** torch.rand(m, 1, dtype=torch.float64, generator=generator)


def losses(m: int) -> Tensor:
    return torch.linspace(1.0, 3.0, m, dtype=torch.float64)


def context(m: int, of_losses: Tensor | None = None) -> Context:
    return Context(tuple(range(m)), losses(m) if of_losses is None else of_losses)


def direction(make, J: Tensor, of_losses: Tensor | None = None) -> Tensor:
    """Call a new aggregator, so that what is drawn is the same each time."""
    aggregator = make()
    return aggregator(J, context(len(J), of_losses)) if aggregator.uses_context else aggregator(J)


def span_residual(d: Tensor, basis: Tensor) -> float:
    """Return the length of the part of ``d`` outside the span of the rows of ``basis``."""
    return float((d - basis.T @ torch.linalg.lstsq(basis.T, d[:, None]).solution.squeeze(1)).norm())


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
        d = direction(make, J)
        assert_same(direction(make, scale * J), factor * d, size=factor * max(float(d.norm()), float(J.norm())))

    @pytest.mark.parametrize("exponent", [-500, 500])
    def test_scale_where_squares_leave_float64(self, make, exponent):
        J = task_gradients(3, 5)
        d = direction(make, torch.ldexp(J, torch.tensor(exponent)))
        assert_same(d / 2.0 ** (make().degree * exponent), direction(make, J), size=J.norm())

    def test_scale_where_squares_leave_float32(self, make):
        J = task_gradients(3, 5).float()
        d = direction(make, 2.0**-100 * J).double() * 2.0 ** (100 * make().degree)
        assert_same(d, direction(make, J).double(), size=float(J.norm()), tolerance=1e-6)

    @every_shape
    def test_task_order_does_not_matter(self, make, shape):
        m, J = shape[0], task_gradients(*shape)
        backwards = torch.arange(m - 1, -1, -1)
        d = direction(make, J)
        if make().order_dependent:
            assert bool(torch.isfinite(d).all())
        else:
            assert_same(
                direction(make, J[backwards], losses(m)[backwards]), d, size=max(float(J.norm()), float(d.norm()))
            )

    @every_shape
    def test_direction_is_finite_and_of_the_size_of_the_rows(self, make, shape):
        J = task_gradients(*shape)
        d = direction(make, J)
        assert d.shape == J.shape[1:]
        assert bool(torch.isfinite(d).all())

    def test_one_task_gives_a_positive_multiple_of_its_row(self, make):
        J = task_gradients(1, 6)
        factor = direction(make, torch.ones(1, 1, dtype=torch.float64)) * J.norm() ** (make().degree - 1.0)
        assert float(factor) > 0.0
        assert_same(direction(make, J), factor * J[0], size=factor * J.norm())

    def test_one_task_of_degree_one_gives_its_row_up_to_a_constant_of_the_method(self, make):
        if make().degree == 1.0:
            assert 0.5 < float(direction(make, torch.ones(1, 1, dtype=torch.float64))) <= 2.5

    @pytest.mark.parametrize("m", [2, 3, 7, 40])
    def test_equal_rows_give_a_multiple_of_the_row(self, make, m):
        row = task_gradients(1, 6)
        d = direction(make, row.expand(m, -1))
        factor = direction(make, torch.ones(m, 1, dtype=torch.float64)) * row.norm() ** (make().degree - 1.0)
        assert float(factor) > 0.0
        assert_same(d, factor * row[0], size=m * factor * row.norm())

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
        assert bool(torch.isfinite(d).all())
        if isinstance(make(), (GramianAggregator, LossWeighting)):
            assert span_residual(d, basis) <= 1e-9 * max(float(J.norm()), float(d.norm())) * m

    @pytest.mark.parametrize("m", range(1, 65))
    def test_any_number_of_tasks(self, make, m):
        for n in (2, m + 1):
            assert bool(torch.isfinite(direction(make, task_gradients(m, n))).all())

    def test_opposite_rows_cancel_where_no_task_is_preferred(self, make):
        if make().order_dependent and not isinstance(make(), (PCGrad, GradVac)):
            return  # one of the two is drawn, or given, more weight
        row = task_gradients(1, 4)
        d = direction(make, torch.cat([row, -row]), of_losses=torch.ones(2, dtype=torch.float64))
        if isinstance(make(), GradDrop):  # for each parameter one of the two is drawn
            assert_same(
                d.abs(), row[0].abs() if make().leak == 0.0 else (1 - make().leak) * row[0].abs(), size=row.norm()
            )
        else:
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
        J, ctx = task_gradients(6, 9), context(6)
        aggregator, restored = make(), make()
        aggregator(J, ctx)
        twin = copy.deepcopy(aggregator)
        stored = io.BytesIO()
        torch.save(aggregator.state_dict(), stored)
        stored.seek(0)
        restored.load_state_dict(torch.load(stored, weights_only=True))
        for k in range(1, 4):
            d = aggregator(k * J, ctx)
            assert torch.equal(twin(k * J, ctx), d)
            assert torch.equal(restored(k * J, ctx), d)

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
        again = eval(repr(aggregator), vars(aggregators))
        assert repr(again) == repr(aggregator)
        assert type(again) is type(aggregator)


@every_gramian_aggregator
class TestLawsOfWeights:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
    def test_weights_have_the_dtype_of_the_gramian(self, make, dtype):
        for J in (task_gradients(3, 5), torch.tensor([[1.0], [-1.0], [3.0], [-3.0]], dtype=torch.float64)):
            w = make().weights((J @ J.T).to(dtype), context(len(J)))
            assert w.dtype == dtype
            assert w.shape == (len(J),)
            assert bool(torch.isfinite(w).all())

    def test_direction_is_the_weighted_sum_of_the_rows(self, make):
        J = task_gradients(4, 6)
        w = make().weights(J @ J.T, context(4))
        assert_same(direction(make, J), J.T @ w, size=J.norm())

    def test_gramian_is_left_alone(self, make):
        J = task_gradients(5, 7)
        G = J @ J.T
        before = G.clone()
        make().weights(G, context(5))
        assert torch.equal(G, before)


NEVER_CONFLICTS = ["mgda", "upgrad", "dualproj", "nash_mtl", "fairgrad", "fairgrad_1", "fairgrad_5", "fairgrad_half"]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("make", [AGGREGATORS[name] for name in NEVER_CONFLICTS], ids=NEVER_CONFLICTS)
@every_shape
def test_never_conflicts(make, shape, dtype, tolerance):
    for seed in range(3):
        J = task_gradients(*shape, seed).to(dtype)
        d = direction(make, J).double()
        rows = J.double()
        longest = float(rows.norm(dim=1).max()) * max(float(rows.norm(dim=1).max()), float(d.norm()))
        assert float((rows @ d).min()) >= -tolerance * longest


def test_every_name_is_under_these_laws():
    assert set(aggregators.AGGREGATORS) <= set(AGGREGATORS)


def test_no_two_methods_agree_on_conflicting_gradients():
    J = torch.tensor(
        [[1.0, 0.2, 0.5, -0.3], [-3.5, 1.0, 0.3, 0.4], [0.4, -2.0, -1.0, 0.7], [0.1, 0.6, -0.7, 0.9]],
        dtype=torch.float64,
    )
    same = {
        "sum": "mean",
        "config": "imtl_g",
        "gradvac": "pcgrad",  # at its first call
        "fairgrad_1": "nash_mtl",
        "nash_mtl_max_norm": "nash_mtl",
    }
    directions = {n: direction(make, J) for n, make in AGGREGATORS.items() if not isinstance(make(), LossWeighting)}
    del directions["pcgrad_mean"]  # with another seed
    del directions["cagrad_1+c"]  # its ball holds zero, where it may have the direction of MGDA
    directions = {n: d / d.norm() for n, d in directions.items()}
    for a, b in ((a, b) for a in directions for b in directions if a < b):
        if same.get(a, a) == same.get(b, b):
            assert abs(float(directions[a] @ directions[b])) == pytest.approx(1.0), (a, b)
        else:
            assert float((directions[a] - directions[b]).norm()) > 1e-4, (a, b)


matrices = st.integers(1, 6).flatmap(
    lambda m: st.lists(
        st.tuples(st.lists(st.integers(-4, 4), min_size=3, max_size=3), st.integers(-6, 6)), min_size=m, max_size=m
    )
)


@settings(max_examples=100, deadline=None)
@given(rows=matrices)
def test_any_matrix_gives_a_finite_direction_of_the_size_of_its_rows(rows):
    J = torch.tensor([[entry * 10.0**power for entry in row] for row, power in rows], dtype=torch.float64)
    longest = float(J.norm(dim=1).max())
    for name, make in AGGREGATORS.items():
        d = direction(make, J)
        assert bool(torch.isfinite(d).all()), name
        if name != "imtl_g" and make().degree == 1.0:  # equal projections may need large weights of both signs
            assert float(d.norm()) <= 1.000001 * len(J) * longest * 2.5, name
