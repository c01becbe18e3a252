"""Conflict on mini-batches of quadratics, whose gradients and flat gradients are known."""

import math
from itertools import chain, combinations

import numpy as np
import pytest
import torch
from tests.bench.state import state
from torch import nn

from flatmtl import SAM, FlatMTL, TaskParameters
from flatmtl.aggregators import LS, Fixed, Mean
from flatmtl_bench.analysis.batches import Batches
from flatmtl_bench.analysis.conflict import BINS, conflict

RHO = 0.2
TASKS = ("a", "b", "c")
GENERATOR = np.random.default_rng(0)


def drawn_batch(size=5):
    """Return of each task the slope and the Hessian of its loss on one mini-batch."""
    roots = GENERATOR.normal(size=(len(TASKS), size, size))
    return GENERATOR.normal(size=(len(TASKS), size)), roots + roots.transpose(0, 2, 1)


BATCHES = [drawn_batch() for _ in range(7)]
THETA = GENERATOR.normal(size=5)


@pytest.fixture
def quadratic():
    """A model of one vector, the closures of the mini-batches, and the parameters: all shared."""
    model = nn.Module()
    model.theta = nn.Parameter(torch.tensor(THETA))

    def closure_of(slopes, hessians):
        slopes, hessians = torch.tensor(slopes), torch.tensor(hessians)

        def closure(tasks):
            x = model.theta
            return {t: slopes[i] @ x + x @ hessians[i] @ x / 2 for t in tasks for i in (TASKS.index(t),)}

        return closure

    parameters = TaskParameters([model.theta], {task: [] for task in TASKS}, model)
    return model, [closure_of(*batch) for batch in BATCHES], parameters


def gradients(slopes, hessians):
    """Return loss gradients g = a + H x, and flat gradients H eps with eps = rho g / |g|, exact on a quadratic."""
    g = slopes + hessians @ THETA
    f = np.stack([RHO * H @ row / np.linalg.norm(row) for H, row in zip(hessians, g, strict=True)])
    return g, f


def cosines_of_pairs(rows):
    return [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in combinations(rows, 2)]


EXPECTED = [gradients(*batch) for batch in BATCHES]


class TestDefinition:
    @pytest.mark.parametrize(("which", "suffix"), [(0, ""), (1, "_flat")])
    def test_conflict_and_cosine_are_means_over_pairs_and_batches(self, quadratic, which, suffix):
        found = conflict(*quadratic, SAM(RHO)).means
        cosines = np.array([cosines_of_pairs(both[which]) for both in EXPECTED])
        assert found[f"conflict{suffix}"] == pytest.approx((cosines < 0).mean())
        assert found[f"cosine{suffix}"] == pytest.approx(cosines.mean())

    def test_intra_conflict_is_of_a_tasks_loss_gradient_and_flat_gradient(self, quadratic):
        found = conflict(*quadratic, SAM(RHO)).means
        shares = np.mean([(g * f).sum(axis=1) < 0 for g, f in EXPECTED], axis=0)
        assert [found[f"intra_conflict/{task}"] for task in TASKS] == pytest.approx(shares.tolist())
        assert 0 < shares.mean() < 1

    @pytest.mark.parametrize(
        ("aggregator", "weights"),
        [(None, [1 / 3, 1 / 3, 1 / 3]), (Fixed([1.0, 0.0, 5.0]), [1.0, 0.0, 5.0]), (LS(), [1.0, 1.0, 1.0])],
        ids=["mean", "fixed", "loss weighting"],
    )
    def test_inter_conflict_is_of_a_flat_gradient_and_the_direction_of_the_loss_gradients(
        self, quadratic, aggregator, weights
    ):
        found = conflict(*quadratic, SAM(RHO), aggregator=aggregator).means
        shares = np.mean([f @ (np.array(weights) @ g) < 0 for g, f in EXPECTED], axis=0)
        assert [found[f"inter_conflict/{task}"] for task in TASKS] == pytest.approx(shares.tolist())

    @pytest.mark.parametrize(("which", "name"), [(0, "cosines"), (1, "cosines_flat")])
    def test_histograms_count_the_pairs_of_all_batches(self, quadratic, which, name):
        counts, _ = np.histogram([cosines_of_pairs(both[which]) for both in EXPECTED], BINS, (-1.0, 1.0))
        assert getattr(conflict(*quadratic, SAM(RHO)), name) == counts.tolist()

    def test_gradients_that_are_parallel_are_in_the_outermost_bins(self):
        w = nn.Parameter(torch.ones(3))
        parameters = TaskParameters([w], {"up": [], "down": [], "too": []})

        def closure(tasks):
            return {task: {"up": 1.0, "down": -2.0, "too": 3.0}[task] * w.sum() for task in tasks}

        model = nn.ParameterList([w])
        assert conflict(model, [closure], parameters, None).cosines == [2] + [0] * (BINS - 2) + [1]

    def test_on_one_batch_it_is_what_a_step_tells(self, quadratic):
        model, (first, *_), parameters = quadratic
        found = conflict(model, [first], parameters, SAM(RHO)).means
        told = FlatMTL(Mean(), SAM(RHO)).backward(first, parameters).scalars()
        names = [n for n in told if "conflict" in n or "cosine" in n]
        assert {n: found[n] for n in names} == pytest.approx({n: float(told[n]) for n in names})
        assert len(names) == 10


class TestMissing:
    def test_without_a_perturbation_there_is_nothing_flat(self, quadratic):
        found = conflict(*quadratic, None)
        assert not [name for name in found.means if "flat" in name or "intra" in name or "inter" in name]
        assert found.cosines_flat == [0] * BINS

    def test_one_task_alone_has_no_pairs_but_intra_conflict(self, quadratic):
        model, closures, _ = quadratic
        found = conflict(model, closures, TaskParameters([model.theta], {"a": []}, model), SAM(RHO))
        assert math.isnan(found.means["conflict"])
        assert math.isnan(found.means["cosine"])
        assert found.means["intra_conflict/a"] == pytest.approx(np.mean([g[0] @ f[0] < 0 for g, f in EXPECTED]))
        assert sum(found.cosines) == 0

    def test_batches_without_labels_of_a_task_do_not_count_for_it(self, quadratic):
        model, closures, parameters = quadratic
        closures[1:] = [lambda tasks, c=c: {**c(tasks), "b": None} for c in closures[1:]]
        found = conflict(model, closures, parameters, SAM(RHO)).means
        g, f = EXPECTED[0]
        assert found["intra_conflict/b"] == float(g[1] @ f[1] < 0)
        assert found["intra_conflict/a"] == pytest.approx(np.mean([g[0] @ f[0] < 0 for g, f in EXPECTED]))

    def test_no_batch_is_refused(self, quadratic):
        model, _, parameters = quadratic
        with pytest.raises(ValueError, match="there is no mini-batch; expected the closure of at least one"):
            conflict(model, [], parameters, SAM(RHO))

    def test_a_loss_that_is_not_finite_is_named(self, quadratic):
        model, closures, parameters = quadratic
        closures[3] = lambda tasks: {task: model.theta.sum() * (math.nan if task == "b" else 1.0) for task in tasks}
        with pytest.raises(FloatingPointError, match="loss of task 'b' is nan"):
            conflict(model, closures, parameters, SAM(RHO))


class TestShuffledBatches:
    DATA = tuple((torch.tensor(float(i)), {"a": torch.tensor(i)}) for i in range(11))

    def items(self, **options):
        return [inputs.tolist() for inputs, _ in Batches(self.DATA, 4, **options)]

    def test_they_hold_the_same_items_in_an_order_of_the_seed(self):
        plain, first, again, other = self.items(), self.items(seed=0), self.items(seed=0), self.items(seed=1)
        assert first == again != other
        assert sorted(chain(*first)) == list(chain(*plain))
        assert first != plain
        assert [len(batch) for batch in first] == [len(batch) for batch in plain]

    def test_of_some_samples_the_same_are_chosen(self):
        assert sorted(chain(*self.items(samples=5, seed=3))) == list(chain(*self.items(samples=5)))

    def test_no_random_stream_is_touched(self):
        stood = torch.get_rng_state()
        self.items(seed=0)
        assert torch.equal(torch.get_rng_state(), stood)


@pytest.fixture
def net():
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU())
    model = nn.ModuleDict({"trunk": trunk, "left": nn.Linear(8, 2), "right": nn.Linear(8, 2)}).eval()
    model["right"].train()
    x = torch.randn(4, 6, 5)

    def closure_of(k):
        def closure(tasks):
            z = model["trunk"](x[k])
            return {task: model[task](z).square().mean() for task in tasks}

        return closure

    model["left"].weight.grad = torch.ones(2, 8)
    heads = {task: model[task].parameters() for task in ("left", "right")}
    return model, [closure_of(k) for k in range(4)], TaskParameters(trunk.parameters(), heads, model)


class TestModel:
    def test_it_is_in_training_mode(self, net):
        model, closures, parameters = net
        modes = []
        watched = [lambda tasks: modes.append([m.training for m in model.modules()]) or closures[0](tasks)]
        conflict(model, watched, parameters, SAM(RHO))
        assert modes
        assert all(all(mode) for mode in modes)

    def test_it_and_the_random_streams_are_left_alone(self, net):
        model, closures, parameters = net
        before = state(model)
        conflict(model, closures, parameters, SAM(RHO))
        assert state(model) == before

    def test_the_seed_alone_decides_what_dropout_drops(self, net):
        first = conflict(*net, SAM(RHO))
        torch.manual_seed(77)
        again = conflict(*net, SAM(RHO))
        assert again == first
        assert conflict(*net, SAM(RHO), seed=1).means["cosine"] != first.means["cosine"]

    def test_every_batch_finds_it_in_the_same_state(self, net):
        model, closures, parameters = net
        model["trunk"][2].p = 0.0
        there, back = (conflict(model, some, parameters, SAM(RHO)).means for some in (closures, closures[::-1]))
        assert there == pytest.approx(back, rel=1e-9)
