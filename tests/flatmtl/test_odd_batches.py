"""Missing labels, losses and gradients that are not finite or are zero, and batches in pieces."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tests.flatmtl.toys import EVERY, TASKS, SpoilGradient, Toy, aggregator, assert_same, two_of
from tests.reference import algorithm1
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from flatmtl import ASAM, SAM, FlatMTL, Monitor
from flatmtl.aggregators import AGGREGATORS, MGDA, CAGrad, LossWeighting, Mean, NashMTL
from flatmtl.aggregators.weightings import FAMO, UW

WEIGHTINGS = [name for name, kind in AGGREGATORS.items() if issubclass(kind, LossWeighting)]
COMBINE = ["individual", "direct", "second", "each"]

METHODS = {  # with state where there is some: these must come back
    "plain pcgrad": ("pcgrad", None, "individual"),
    "pcgrad": ("pcgrad", SAM(0.3), "individual"),
    "gradvac each": ("gradvac", SAM(0.3), "each"),
    "nash_mtl second": ("nash_mtl", ASAM(0.3, norm="joint"), "second"),
    "graddrop direct": ("graddrop", SAM(0.3, local=0.0), "direct"),
    "plain dwa": ("dwa", None, "individual"),
    "rlw": ("rlw", SAM(0.3), "individual"),
    "famo": ("famo", SAM(0.3, local=1.0), "individual"),
    "uw": ("uw", ASAM(0.3, norm="joint"), "individual"),
}
every_method = pytest.mark.parametrize("method", METHODS)
perturbed_methods = pytest.mark.parametrize("method", [name for name in METHODS if "plain" not in name])
loss_or_gradient = pytest.mark.parametrize("gradient", [False, True], ids=["loss", "gradient"])
some_closures = pytest.mark.parametrize("count", [1, 2], ids=["one batch", "two micro-batches"])


def make(method: str, **options: Any) -> FlatMTL:
    name, perturbation, combine = METHODS[method]
    return FlatMTL(aggregator(name), perturbation, combine=combine, **options)


def noisy() -> Toy:
    """A toy whose trunk has buffers and draws random numbers."""
    return Toy(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.3)))


def pieces(closure: Callable, count: int) -> list[Callable]:
    """The batch of a toy in equal micro-batches."""
    size = 8 // count
    return [lambda tasks, r=slice(size * i, size * (i + 1)): closure(tasks, r) for i in range(count)]


def absent(toy: Toy, *tasks: str) -> Callable:
    """The closure of a batch without labels of these tasks."""
    return lambda asked, *rows: toy.closure([t for t in asked if t not in tasks], *rows) | dict.fromkeys(tasks)


def spoilt(toy: Toy, task: str, *, gradient: bool, perturbed: bool = False) -> Callable:
    """A closure in which a task's loss, or its gradient alone, is not finite at the clean or the perturbed weights."""
    clean = toy.trunk[0].weight.detach().clone()

    def closure(tasks, rows=slice(None)):
        losses = toy.closure(tasks, rows)
        if task in losses and torch.equal(toy.trunk[0].weight, clean) != perturbed:
            loss = losses[task]
            losses[task] = loss + (SpoilGradient.apply(loss) if gradient else loss * math.nan)
        return losses

    return closure


def some(closure: Callable, toy: Toy, count: int) -> Callable | list[Callable]:
    """The closure itself, or micro-batches of which the last one alone is odd."""
    return closure if count == 1 else [*pieces(toy.closure, count)[:-1], pieces(closure, count)[-1]]


def backward(toy: Toy, mtl: FlatMTL, closure=None):
    toy.zero_grad()
    result = mtl.backward(closure or toy.closure, toy.split())
    return result, toy.gradients()


def of_task(state: Any, i: int) -> Any:
    """What a state holds of task ``i``: in tables by task, in vectors over the tasks, and in matrices of pairs."""
    if isinstance(state, Mapping):
        by_task = all(isinstance(key, int) for key in state)
        return state.get(i) if by_task else {key: of_task(value, i) for key, value in state.items()}
    if isinstance(state, Tensor) and state.ndim and set(state.shape) == {len(TASKS)}:
        return [state.select(axis, i).clone() for axis in range(state.ndim)]
    return None


class TestTasksThatComeAndGo:
    presence = (TASKS, ("left", "third"), ("left",), (), ("right",), TASKS)

    @pytest.mark.parametrize("perturbation", [None, SAM(0.1)], ids=repr)
    @pytest.mark.parametrize("name", [name for name in EVERY if name != "nash_mtl"])
    def test_an_absent_task_keeps_its_head_and_its_state(self, name, perturbation):
        toy, mtl = Toy(), FlatMTL(aggregator(name), perturbation)
        parameters = toy.split()
        optimizer = torch.optim.SGD([*toy.parameters(), *mtl.parameters()], lr=0.05, momentum=0.9, weight_decay=0.1)
        for epoch, present in enumerate(self.presence, start=1):
            gone = [t for t in TASKS if t not in present]
            mtl.start_epoch(epoch)
            before = {t: (of_task(mtl.state_dict(), TASKS.index(t)), toy.heads[t].state_dict()) for t in gone}
            before = {t: (state, {k: v.clone() for k, v in head.items()}) for t, (state, head) in before.items()}
            optimizer.zero_grad()
            result = mtl.backward(absent(toy, *gone), parameters)
            optimizer.step()
            mtl.after_step(absent(toy, *gone))
            after = {t: (of_task(mtl.state_dict(), TASKS.index(t)), dict(toy.heads[t].state_dict())) for t in gone}
            assert_same(after, before)
            assert result.losses.isnan().tolist() == [t in gone for t in TASKS]
            assert result.skipped == (not present)
        assert all(p.isfinite().all() for p in toy.parameters())

    def test_nash_weights_of_other_tasks_are_not_used_again(self):
        toy, mtl = Toy(), FlatMTL(NashMTL(update_every=10), SAM(0.1))
        for present in (TASKS, ("left", "third"), TASKS, ("right", "third")):
            gone = [t for t in TASKS if t not in present]
            expected = backward(toy, FlatMTL(NashMTL(), SAM(0.1)), absent(toy, *gone))
            assert_same(backward(toy, mtl, absent(toy, *gone))[1], expected[1])

    def test_an_absent_task_is_no_zero_row(self):
        """The shortest convex combination with a zero row is zero; without it, it has a closed form for two tasks."""
        toy, kept = Toy(), []
        backward(toy, FlatMTL(lambda J: kept.append(J.clone()) or J[0]), absent(toy, "right"))
        (a, b), trunk = kept[0], dict(toy.trunk.named_parameters())
        w = float(((b - a) @ b / (b - a).square().sum()).clamp(0, 1))
        _, gradients = backward(toy, FlatMTL(MGDA()), absent(toy, "right"))
        d = torch.cat([gradients[f"trunk.{name}"].reshape(-1) for name in trunk])
        torch.testing.assert_close(d, w * a + (1 - w) * b)
        zero = backward(toy, FlatMTL(MGDA()), lambda t: toy.closure(t) | {"right": toy.closure(t)["right"] * 0.0})[1]
        assert all((zero[f"trunk.{name}"] == 0.0).all() for name in trunk)


class TestNonfinite:
    @pytest.mark.parametrize(
        ("method", "perturbed"),
        [(m, p) for m in METHODS for p in ((False,) if "plain" in m else (False, True))],
        ids=lambda value: value if isinstance(value, str) else ["clean pass", "perturbed pass"][value],
    )
    @some_closures
    @loss_or_gradient
    @pytest.mark.parametrize("policy", ["raise", "skip_step"])
    def test_everything_is_as_it_was(self, method, perturbed, count, gradient, policy):
        """Weights, buffers, state and gradients; random streams stand where one clean pass leaves them."""
        toy, mtl = noisy(), make(method, on_nonfinite=policy)
        parameters, monitor = toy.split(), Monitor()
        mtl.backward(toy.closure, parameters)
        before = toy.contents(), toy.gradients(), mtl.state_dict()
        torch.manual_seed(1)
        for closure in pieces(toy.closure, count):
            closure(TASKS)
        streams = torch.get_rng_state()
        toy.load_state_dict(before[0])
        torch.manual_seed(1)
        closure = some(spoilt(toy, "right", gradient=gradient, perturbed=perturbed), toy, count)
        if policy == "raise":
            with pytest.raises(FloatingPointError, match="loss of task 'right' is .*expected finite.*'drop_task'"):
                mtl.backward(closure, parameters)
        else:
            result = mtl.backward(closure, parameters)
            monitor.update(result)
            assert (result.skipped, result.dropped) == (True, ("right",))
            assert (monitor.compute()["skipped"], monitor.compute()["dropped"]) == (1.0, 1.0)
            assert "dropped: right; skipped" in repr(result)
        assert_same((toy.contents(), toy.gradients(), mtl.state_dict()), before)
        assert_same(torch.get_rng_state(), streams)

    @every_method
    @some_closures
    @loss_or_gradient
    def test_a_dropped_task_is_an_absent_one(self, method, count, gradient):
        """For gradients and state alike, also if it is odd in one of several micro-batches only."""
        found = []
        for odd in (True, False):
            toy, mtl, monitor = Toy(), make(method, on_nonfinite="drop_task"), Monitor()
            bad, gone = spoilt(toy, "right", gradient=gradient), absent(toy, "right")
            result, gradients = backward(toy, mtl, some(bad, toy, count) if odd else pieces(gone, count))
            found.append((gradients, mtl.state_dict()["branches"], toy.contents(), result.weights_loss))
            monitor.update(result)
            assert result.dropped == (("right",) if odd else ())
            assert monitor.compute()["dropped"] == float(odd)
        torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-15, equal_nan=True)

    @perturbed_methods
    @some_closures
    @loss_or_gradient
    def test_in_the_perturbed_pass_a_task_keeps_its_loss_part(self, method, count, gradient):
        toy, mtl = Toy(), make(method, on_nonfinite="drop_task")
        bad = spoilt(toy, "right", gradient=gradient, perturbed=True)
        result, gradients = backward(toy, mtl, some(bad, toy, count))
        name, *_ = METHODS[method]
        plain = backward(toy, FlatMTL(aggregator(name)))[1]
        for own in ("heads.right.weight", "heads.right.bias"):
            torch.testing.assert_close(gradients[own], plain[own])
        assert not torch.allclose(gradients["heads.left.weight"], plain["heads.left.weight"])
        assert (result.dropped, result.skipped) == (("right",), False)
        assert result.losses.isfinite().all()

    @loss_or_gradient
    def test_no_aggregator_sees_what_is_not_finite(self, gradient):
        toy, seen = Toy(), []
        mtl = FlatMTL(lambda J: seen.append(J) or J[0], SAM(0.1))
        with pytest.raises(FloatingPointError, match="'third'"):
            backward(toy, mtl, spoilt(toy, "third", gradient=gradient))
        assert seen == []

    def test_every_event_of_an_epoch_is_counted(self):
        toy, monitor = Toy(), Monitor()
        parameters = toy.split()
        bad = spoilt(toy, "left", gradient=False)
        for policy in ("drop_task", "skip_step", "drop_task", "raise"):
            mtl = FlatMTL(CAGrad(), on_nonfinite=policy)
            monitor.update(mtl.backward(toy.closure if policy == "raise" else bad, parameters))
        totals = monitor.compute()
        assert (totals["steps"], totals["skipped"], totals["dropped"]) == (4, 1, 3)
        assert totals["loss/left"] == pytest.approx(toy.closure(TASKS)["left"].item())


class Classes(Toy):
    """A toy that classifies; labels of -100 are ignored."""

    def __init__(self, ignored: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.labels = {t: torch.full((8,), -100) if t in ignored else torch.arange(8) % 2 for t in TASKS}

    def closure(self, tasks, rows=slice(None)):
        z = self.trunk(self.x[rows])
        return {t: F.cross_entropy(self.heads[t](z), self.labels[t][rows]) for t in tasks}


class TestIgnoredLabels:
    """A mean over no labels is NaN, and its gradient zero: what looks at losses is poisoned first."""

    def test_is_a_loss_that_is_not_finite(self):
        with pytest.raises(FloatingPointError, match="loss of task 'right' is nan"):
            backward(Classes(ignored=("right",)), FlatMTL(Mean()))

    @pytest.mark.parametrize("perturbation", [None, SAM(0.1)], ids=repr)
    @pytest.mark.parametrize("name", EVERY)
    def test_the_state_is_that_without_the_task(self, name, perturbation):
        found = []
        for policy in ("drop_task", "raise"):
            toy = Classes(ignored=("right",) if policy == "drop_task" else ())
            mtl = FlatMTL(aggregator(name), perturbation, on_nonfinite=policy)
            backward(toy, mtl, None if policy == "drop_task" else absent(toy, "right"))
            found.append((toy.gradients(), mtl.state_dict()["branches"], [p.grad for p in mtl.parameters()]))
        torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-15)


class TestMaskedTargets:
    """Targets that are NaN where there is no label."""

    @staticmethod
    def regression(toy: Toy, mean: Callable[[Tensor, Tensor], Tensor]) -> Callable:
        y = {t: toy.y[t].clone() for t in TASKS}
        y["right"][::2] = math.nan

        def closure(tasks):
            z = toy.trunk(toy.x)
            return {t: mean(toy.heads[t](z), y[t]) for t in tasks}

        return closure

    def test_a_mean_over_those_that_are_there_is_that_of_the_smaller_batch(self):
        toy, mtl = Toy(), FlatMTL(MGDA(), SAM(0.1))
        masked = self.regression(toy, lambda out, y: (out - y)[~y.isnan()].square().mean())
        result, gradients = backward(toy, mtl, masked)

        def by_hand(tasks):
            return toy.closure(two_of(tasks)) | (toy.closure(["right"], slice(1, None, 2)) if "right" in tasks else {})

        expected = backward(toy, mtl, by_hand)
        torch.testing.assert_close(gradients, expected[1])
        torch.testing.assert_close(result.losses, expected[0].losses)

    def test_a_mask_after_the_square_has_a_gradient_that_is_not_finite(self):
        """The loss is finite, so nobody who looks at losses alone would notice."""
        toy = Toy()
        trap = self.regression(toy, lambda out, y: torch.where(y.isnan(), 0.0, (out - y).square().sqrt()).mean())
        with pytest.raises(FloatingPointError, match="task 'right' is .*but its gradient is not finite"):
            backward(toy, FlatMTL(MGDA(), SAM(0.1)), trap)


@pytest.mark.filterwarnings("ignore:.*a task gradient is zero:UserWarning", "ignore:.*no direction:UserWarning")
class TestZeroGradients:
    perturbations = pytest.mark.parametrize(
        "perturbation", [None, SAM(0.3), ASAM(0.3, norm="joint", local=0.5)], ids=repr
    )

    @staticmethod
    def without_gradient(toy: Toy, *tasks: str) -> Callable:
        """Losses of these tasks are 1 and do not depend on the weights, but they have a graph."""
        return lambda asked: {t: loss * 0.0 + 1.0 if t in tasks else loss for t, loss in toy.closure(asked).items()}

    @perturbations
    @pytest.mark.parametrize("name", EVERY)
    def test_of_one_task_spoils_no_other(self, name, perturbation):
        toy = Toy()
        result, gradients = backward(toy, FlatMTL(aggregator(name), perturbation), self.without_gradient(toy, "right"))
        assert all(g.isfinite().all() for g in gradients.values())
        assert (gradients["heads.right.weight"] == 0.0).all()
        assert (gradients["heads.left.weight"] != 0.0).any()
        if perturbation is not None:
            assert result.sharpness[1] == 0.0
            assert result.sharpness[0] > 0.0

    @perturbations
    @pytest.mark.parametrize("name", EVERY)
    def test_of_all_tasks_are_no_step(self, name, perturbation):
        toy = Toy()
        seen = []

        def closure(tasks):
            seen.append({k: v.clone() for k, v in toy.state_dict().items()})
            return self.without_gradient(toy, *TASKS)(tasks)

        _, gradients = backward(toy, FlatMTL(aggregator(name), perturbation), closure)
        assert all((g == 0.0).all() for g in gradients.values())
        for contents in seen:
            assert_same(contents, seen[0])

    @pytest.mark.parametrize("size", [1e-30, 1e30])
    @pytest.mark.parametrize("perturbation", [None, SAM(0.3)], ids=repr)
    @pytest.mark.parametrize("name", EVERY)
    def test_the_size_of_all_losses_changes_the_length_of_the_step_alone(self, name, perturbation, size):
        """By the aggregator's degree, in float32, where the squares of such numbers are zero or infinite."""
        toy = Toy()
        toy.float()
        made = aggregator(name)
        _, ordinary = backward(toy, FlatMTL(made, perturbation))
        _, found = backward(
            toy,
            FlatMTL(aggregator(name), perturbation),
            lambda tasks: {t: loss * size for t, loss in toy.closure(tasks).items()},
        )
        degree = 0.0 if name == "si" else made.degree  # the weights of SI are 1 / loss
        for key, g in found.items():
            factor = size**degree if key.startswith("trunk") or name == "si" else size
            expected = ordinary[key].double() * factor
            torch.testing.assert_close(g.double(), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


class Once(torch.autograd.Function):
    """The exponential linear unit as kernels of libraries have it: its backward pass has no derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.elu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * torch.where(x > 0.0, 1.0, x.exp())


class Kernel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Once.apply(x)


@pytest.mark.parametrize("name", EVERY)
def test_no_gradient_is_differentiated(name):
    """Neither for weights of losses nor for flat gradients, so that any layer will do."""
    found = []
    for unit in (nn.ELU(), Kernel()):
        toy = Toy(nn.Sequential(nn.Linear(4, 5), unit))
        found.append(backward(toy, FlatMTL(aggregator(name), SAM(0.3)))[1])
    torch.testing.assert_close(*found)


class TestUncertainty:
    """Trained weights of losses."""

    def test_a_learning_rate_that_is_far_too_large_leaves_them_finite(self):
        toy, mtl = Toy(), FlatMTL(UW(tasks=3))
        optimizer = torch.optim.SGD(mtl.parameters(), lr=10.0)
        for _ in range(50):
            optimizer.zero_grad()
            result, gradients = backward(toy, mtl)
            optimizer.step()
            assert (result.weights_loss >= 0.0).all()
            assert all(g.isfinite().all() for g in gradients.values())
        assert all(s.isfinite() and s != 0.0 for s in mtl.parameters())

    def test_reported_losses_are_the_users_own_where_the_objective_is_negative(self):
        toy, mtl = Toy(), FlatMTL(UW(tasks=3), SAM(0.1))

        def small(tasks):
            return {t: loss * 0.01 for t, loss in toy.closure(tasks).items()}

        losses = torch.stack(list(small(TASKS).values())).detach()
        with torch.no_grad():
            for s, loss in zip(mtl.parameters(), losses, strict=True):
                s.copy_(loss.log())
        assert (losses / losses + losses.log()).sum() < 0.0
        assert_same(backward(toy, mtl, small)[0].losses, losses)


class TestMicroBatches:
    @pytest.mark.parametrize("combine", COMBINE)
    @pytest.mark.parametrize(
        "perturbation",
        [
            None,
            SAM(0.3),
            ASAM(0.3, rho_heads=0.1),
            SAM(0.3, norm="joint"),
            SAM(0.3, local=0.0),
            ASAM(0.3, local=0.5, norm="joint"),
        ],
        ids=repr,
    )
    def test_equal_micro_batches_equal_the_whole_batch(self, combine, perturbation):
        self.check("mgda", perturbation, combine)

    @pytest.mark.parametrize("name", [name for name in EVERY if name not in WEIGHTINGS])
    def test_for_every_aggregator(self, name):
        self.check(name, SAM(0.3), "individual")

    @pytest.mark.parametrize("name", WEIGHTINGS)
    @pytest.mark.parametrize(
        "perturbation", [None, SAM(0.3), ASAM(0.3, norm="joint"), SAM(0.3, local=0.5), SAM(0.3, local=1.0)], ids=repr
    )
    def test_for_loss_weightings_too(self, name, perturbation):
        self.check(name, perturbation, "individual")

    @staticmethod
    def check(name, perturbation, combine):
        found = []
        for count in (1, 4):
            toy, mtl = Toy(), FlatMTL(aggregator(name), perturbation, combine=combine)
            result, gradients = backward(toy, mtl, pieces(toy.closure, count))
            own = [p.grad for p in mtl.parameters()]
            found.append((gradients, own, mtl.state_dict(), result.losses, result.perturbed_losses))
        torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)

    @pytest.mark.parametrize("present", [0, 1], ids=["in the first", "in the second"])
    @pytest.mark.parametrize("name", ["mean", "ls"])
    def test_a_task_in_one_of_two_is_not_weighed_down(self, name, present):
        """Its gradients are those of the micro-batch that has it."""
        toy, mtl = Toy(), FlatMTL(aggregator(name), SAM(0.1, local=1.0))
        there, gone = pieces(toy.closure, 2), pieces(absent(toy, "right"), 2)
        both = [there[i] if i == present else gone[i] for i in range(2)]
        result, gradients = backward(toy, mtl, both)
        alone, expected = backward(toy, mtl, there[present])
        for own in ("heads.right.weight", "heads.right.bias"):
            torch.testing.assert_close(gradients[own], expected[own])
        torch.testing.assert_close(result.losses[1], alone.losses[1])
        torch.testing.assert_close(result.perturbed_losses[1], alone.perturbed_losses[1])

    @pytest.mark.parametrize("combine", COMBINE)
    def test_unequal_presence_equals_the_plain_reference(self, combine):
        """Means over the micro-batches that have the task, of losses and gradients, clean and perturbed."""
        toy = Toy()
        parts = [absent(toy, "left"), toy.closure, absent(toy, "left", "third"), absent(toy, "right")]
        parts = [lambda t, c=c, i=i: c(t, slice(2 * i, 2 * i + 2)) for i, c in enumerate(parts)]

        def mean_of_those_that_have_it(tasks):
            found = [part(tasks) for part in parts]
            return {t: torch.stack([f[t] for f in found if f.get(t) is not None]).mean() for t in tasks}

        result, gradients = backward(toy, FlatMTL(CAGrad(), SAM(0.3), combine=combine), parts)
        self.equals_reference(toy, mean_of_those_that_have_it, result, gradients, combine)

    @pytest.mark.parametrize("head", [nn.Linear, None], ids=["plain heads", "heads that draw"])
    def test_each_one_is_replayed_with_its_own_masks(self, head):
        """The oracle is the whole batch with the masks that one clean pass through all of them draws."""

        class Masked(nn.Linear):
            def forward(self, z):
                return super().forward(F.dropout(z, 0.3))

        toy = Toy(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.4)), head=head or Masked)
        parts = pieces(toy.closure, 4)

        def fixed(tasks):
            torch.manual_seed(5)
            losses = [part(TASKS) for part in parts]
            return {t: torch.stack([one[t] for one in losses]).mean() for t in tasks}

        toy.split()
        torch.manual_seed(5)
        result, gradients = backward(toy, FlatMTL(CAGrad(), SAM(0.3)), parts)
        after = torch.get_rng_state()
        self.equals_reference(toy, fixed, result, gradients, "individual")
        fixed(TASKS)
        assert_same(torch.get_rng_state(), after)

    @staticmethod
    def equals_reference(toy, closure, result, gradients, combine):
        expected = algorithm1.step(
            closure,
            list(toy.trunk.parameters()),
            {t: list(toy.heads[t].parameters()) for t in TASKS},
            CAGrad(),
            rho_sh=0.3,
            rho_ns=0.3,
            combine=combine,
        )
        d = torch.cat([g.reshape(-1) for name, g in gradients.items() if name.startswith("trunk")])
        torch.testing.assert_close(d, expected["direction"], rtol=1e-9, atol=1e-12)
        for task in TASKS:
            own = torch.cat([gradients[f"heads.{task}.{name}"].reshape(-1) for name in ("weight", "bias")])
            torch.testing.assert_close(own, expected["heads"][task], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(result.losses, expected["losses"])
        torch.testing.assert_close(result.perturbed_losses, expected["perturbed_losses"])

    def test_may_come_from_a_generator(self):
        toy, mtl = Toy(), FlatMTL(MGDA(), SAM(0.3))
        parameters, parts = toy.split(), pieces(toy.closure, 4)
        expected = backward(toy, mtl, parts)[1]
        toy.zero_grad()
        mtl.backward((part for part in parts), parameters)
        assert_same(toy.gradients(), expected)

    def test_one_without_any_labels_changes_nothing(self):
        toy, mtl = Toy(), FlatMTL(MGDA(), SAM(0.3))
        expected = backward(toy, mtl, pieces(toy.closure, 2))[1]
        assert_same(backward(toy, mtl, [*pieces(toy.closure, 2), dict.fromkeys])[1], expected)

    @pytest.mark.parametrize("name", ["mgda", "ls"])
    @pytest.mark.parametrize(
        "perturbation",
        [
            None,
            SAM(0.3, local=1.0),
            SAM(0.3, local=0.0),
        ],
        ids=repr,
    )
    def test_activations_are_those_of_one_at_a_time(self, name, perturbation):
        assert peak_of_saved(name, perturbation, 4) == peak_of_saved(name, perturbation, 1)


def peak_of_saved(name: str, perturbation: SAM | None, count: int) -> int:
    """Return how many numbers autograd keeps at most for a step of so many micro-batches of two rows."""

    class Kept:
        live, peak = 0, 0

        def __init__(self, tensor: Tensor) -> None:
            self.tensor, self.size = tensor.detach(), 0 if isinstance(tensor, nn.Parameter) else tensor.numel()
            Kept.live += self.size
            Kept.peak = max(Kept.peak, Kept.live)

        def __del__(self) -> None:
            Kept.live -= self.size

    class Deep(nn.Sequential):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__(nn.Linear(inputs, 30), nn.Tanh(), nn.Linear(30, outputs))

    toy = Toy(head=Deep)
    parameters = toy.split()
    parts = [lambda tasks, r=slice(2 * i, 2 * i + 2): toy.closure(tasks, r) for i in range(count)]
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        FlatMTL(aggregator(name), perturbation).backward(parts, parameters)
    assert Kept.live == 0
    return Kept.peak


class TestNoGraph:
    """A loss that nothing can learn from is a fault, and the message says whose."""

    def test_a_constant_is_no_loss(self):
        toy = Toy()
        with pytest.raises(ValueError, match="'left' has no graph.*not a constant.*return None"):
            backward(toy, FlatMTL(Mean()), lambda tasks: toy.closure(tasks) | {"left": torch.tensor(0.0)})

    @pytest.mark.parametrize("call", ["split", "backward", "after_step"])
    def test_inference_mode_is_told_from_a_missing_graph(self, call):
        toy, mtl = Toy(), FlatMTL(FAMO(tasks=3))
        parameters = toy.split()
        mtl.backward(toy.closure, parameters)
        before = mtl.state_dict()
        within = torch.inference_mode()(toy.closure)
        calls = {
            "split": torch.inference_mode()(toy.split),
            "backward": lambda: mtl.backward(within, parameters),
            "after_step": lambda: torch.inference_mode()(mtl.after_step)(toy.closure),
        }
        with pytest.raises(RuntimeError, match=r"'left' was computed within torch.inference_mode\(\)"):
            calls[call]()
        assert_same(mtl.state_dict(), before)

    def test_after_step_works_within_no_grad(self):
        toy, mtl = Toy(), FlatMTL(FAMO(tasks=3))
        backward(toy, mtl)
        before = mtl.state_dict()["branches"]["loss"]["steps"].clone()
        with torch.no_grad():
            mtl.after_step(toy.closure)
        assert (mtl.state_dict()["branches"]["loss"]["steps"] == before + 1).all()
