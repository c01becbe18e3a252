"""Reduced precision: autocast, weights in half precision, and gradient scalers in the loops that users write."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from tests.flatmtl.test_odd_batches import COMBINE, METHODS, WEIGHTINGS, absent, backward, make, pieces, spoilt
from tests.flatmtl.toys import EVERY, TASKS, Toy, aggregator, assert_same
from torch import Tensor, nn
from torch.amp import GradScaler

from flatmtl import ASAM, SAM, FlatMTL, Monitor, TaskParameters
from flatmtl.aggregators import MGDA, CAGrad, Mean
from flatmtl.aggregators.context import Context
from flatmtl.aggregators.weightings import UW

halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
SCALES = [2.0**-4, 1.0, 4096.0, 2.0**16]


def narrow(trunk: nn.Module | None = None) -> Toy:
    toy = Toy(trunk)
    toy.float()
    return toy


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.double().reshape(-1) for g in gradients.values()])


def cosine(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return float(torch.cosine_similarity(flat(a), flat(b), dim=0))


class TestAutocast:
    @staticmethod
    def step(name, perturbation, dtype, where: str, *, cached: bool = True) -> dict[str, Tensor]:
        toy = narrow()

        def cast(place: str):
            return torch.autocast("cpu", dtype, cache_enabled=cached) if where in (place, "both") else nullcontext()

        def closure(tasks):
            with cast("inside"):
                return toy.closure(tasks)

        parameters, mtl = toy.split(), FlatMTL(aggregator(name), perturbation)
        with cast("around"):
            mtl.backward(closure, parameters)
        return toy.gradients()

    @halves
    @pytest.mark.parametrize("name", ["cagrad", "uw"])
    @pytest.mark.parametrize("perturbation", [SAM(0.3), ASAM(0.3), SAM(0.3, local=0.0), SAM(0.3, local=1.0)], ids=repr)
    def test_the_perturbed_pass_casts_the_perturbed_weights(self, name, perturbation, dtype):
        """Casts of weights are kept while autocast lasts: around the step, both passes might see the first ones."""
        expected = self.step(name, perturbation, dtype, "inside", cached=False)
        for where in ("inside", "around", "both"):
            assert_same(self.step(name, perturbation, dtype, where), expected)

    @halves
    @pytest.mark.parametrize("name", EVERY)
    def test_directions_are_near_those_in_full_precision(self, name, dtype):
        full, half = (self.step(name, SAM(0.3), dtype, where) for where in ("nowhere", "inside"))
        assert cosine(full, half) > 0.99

    @halves
    def test_rows_gradients_and_losses_are_in_full_precision(self, dtype):
        toy, kinds = narrow(), []
        mtl = FlatMTL(lambda J: kinds.append(J.dtype) or J.sum(0), SAM(0.3))
        with torch.autocast("cpu", dtype):
            result, gradients = backward(toy, mtl)
        assert kinds == [torch.float32] * 2
        assert {g.dtype for g in gradients.values()} == {torch.float32}
        with torch.autocast("cpu", dtype):
            assert_same(result.losses, torch.stack(list(toy.closure(TASKS).values())).detach().double())

    @pytest.mark.parametrize("perturbation", [None, SAM(0.3)], ids=repr)
    @pytest.mark.parametrize("name", ["pcgrad", "graddrop", "uw"])
    def test_around_the_step_it_is_for_the_closure_alone(self, name, perturbation):
        """What a closure takes out of autocast goes back in full precision too."""
        found = []
        for around in (torch.autocast("cpu", torch.bfloat16), nullcontext()):
            toy = narrow()

            def closure(tasks, toy=toy):
                with torch.autocast("cpu", enabled=False):
                    return toy.closure(tasks)

            parameters = toy.split()
            with around:
                FlatMTL(aggregator(name), perturbation).backward(closure, parameters)
            found.append(toy.gradients())
        assert_same(*found)

    def test_a_function_of_the_rows_works_in_their_precision(self):
        toy = narrow()
        weights = torch.tensor([[0.1, 0.7, 0.2]])
        mean = FlatMTL(lambda J: (weights @ J)[0])
        expected = backward(toy, mean)[1]

        def closure(tasks):
            with torch.autocast("cpu", enabled=False):
                return toy.closure(tasks)

        parameters = toy.split()
        toy.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            mean.backward(closure, parameters)
        assert_same(toy.gradients(), expected)

    @pytest.mark.parametrize("perturbed", [False, True], ids=["clean pass", "perturbed pass"])
    def test_a_loss_that_overflows_float16_is_its_tasks_own(self, perturbed):
        toy = narrow()
        clean = toy.trunk[0].weight.detach().clone()

        def closure(tasks):
            with torch.autocast("cpu", torch.float16):
                losses = toy.closure(tasks)
                if "right" in tasks and torch.equal(toy.trunk[0].weight, clean) != perturbed:
                    losses["right"] = (toy.heads["right"](toy.trunk(toy.x.float())) * 30000.0).sum()
            return losses

        with pytest.raises(FloatingPointError, match="loss of task 'right' is"):
            backward(toy, FlatMTL(CAGrad(), SAM(0.1)), closure)
        result, gradients = backward(toy, FlatMTL(CAGrad(), SAM(0.1), on_nonfinite="drop_task"), closure)
        assert result.dropped == ("right",)
        assert all(g is None or g.isfinite().all() for g in gradients.values())


@halves
class TestHalfPrecisionWeights:
    @pytest.mark.parametrize("name", EVERY)
    def test_plain_directions_are_near_those_in_full_precision(self, name, dtype):
        found = []
        for kind in (torch.float32, dtype):
            toy = Toy()
            toy.to(kind)
            found.append(backward(toy, FlatMTL(aggregator(name)))[1])
            assert {g.dtype for g in found[-1].values()} == {kind}
        assert cosine(*found) > 0.99

    @pytest.mark.parametrize("name", [name for name in EVERY if name not in WEIGHTINGS])
    def test_directions_are_formed_in_float32_and_rounded_once(self, name, dtype):
        toy, rows = Toy(), []
        toy.to(dtype)
        backward(toy, FlatMTL(lambda J: rows.append(J.clone()) or J[0]))
        _, gradients = backward(toy, FlatMTL(aggregator(name)))
        assert rows[0].dtype == torch.float32
        losses = Context((0, 1, 2), torch.ones(3, dtype=torch.float64))
        method = aggregator(name)
        expected = method(rows[0], losses) if method.uses_context else method(rows[0])
        found = torch.cat([g.reshape(-1) for key, g in gradients.items() if key.startswith("trunk")])
        torch.testing.assert_close(found, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=0.0)

    @pytest.mark.parametrize("perturbation", [SAM(1.0), ASAM(100.0)], ids=repr)
    @pytest.mark.filterwarnings("ignore:.*perturb.*:UserWarning")
    def test_tiny_gradients_give_a_step_of_the_radius(self, perturbation, dtype):
        """On weights of 0.01, beside which the step is long, so that rounding leaves it as it is."""
        toy, seen = Toy(nn.Linear(4, 5)), []
        toy.to(dtype)
        tiny = 1e-3 if dtype == torch.float16 else 1e-25
        for p in toy.trunk.parameters():
            nn.init.constant_(p, 0.01)

        def closure(tasks):
            seen.append(torch.cat([p.detach().double().reshape(-1) for p in toy.trunk.parameters()]))
            return {t: loss * tiny for t, loss in toy.closure(tasks).items()}

        result, gradients = backward(toy, FlatMTL(Mean(), perturbation), closure)
        assert [float((weights - seen[-4]).norm()) for weights in seen[-3:]] == pytest.approx([1.0] * 3, rel=0.01)
        assert all(g.isfinite().all() for g in gradients.values())
        assert result.sharpness.isfinite().all()

    def test_a_perturbation_that_few_weights_feel_is_said_once_with_their_share(self, dtype):
        toy = Toy()
        toy.to(dtype)
        parameters, mtl = toy.split(), FlatMTL(Mean(), SAM(1e-4))
        mine, trunk = [], lambda: torch.cat([p.detach().reshape(-1) for p in toy.trunk.parameters()])

        def closure(tasks):
            mine.append(trunk())
            return toy.closure(tasks)

        with pytest.warns(UserWarning, match="lost on .* of the shared weights that are kept in half") as said:
            mtl.backward(closure, parameters)
        unmoved = (mine[1] == mine[0]).double().mean()
        assert unmoved > 0.01
        assert f"lost on {unmoved:.2%} of" in str(said[0].message)
        mtl.backward(closure, parameters)  # warnings are errors

    def test_nothing_is_said_without_a_perturbation_or_if_the_weights_move(self, dtype):
        for perturbation in (None, SAM(0.0), SAM(30.0)):
            toy = Toy()
            toy.to(dtype)
            backward(toy, FlatMTL(Mean(), perturbation))


@pytest.mark.parametrize("name", ["cagrad", "uw"])
@pytest.mark.parametrize("perturbation", [None, SAM(0.1)], ids=repr)
def test_heads_in_float64_keep_their_precision_beside_a_trunk_in_float32(name, perturbation):
    toy, found = Toy(), []
    toy.trunk.float()
    heads = {task: head.parameters() for task, head in toy.heads.items()}
    parameters = TaskParameters(toy.trunk.parameters(), heads, model=toy)

    def closure(tasks, rows=slice(None)):
        z = toy.trunk(toy.x[rows].float()).double()
        return {t: (toy.heads[t](z) - toy.y[t][rows]).square().mean() for t in tasks}

    for count, scaler in ((1, None), (2, None), (1, GradScaler("cpu", init_scale=1024.0))):
        toy.zero_grad()
        halves = [lambda tasks, r=slice(i * 8 // count, (i + 1) * 8 // count): closure(tasks, r) for i in range(count)]
        FlatMTL(aggregator(name), perturbation).backward(halves, parameters, scaler=scaler)
        scale = 1.0 if scaler is None else 1024.0
        found.append([p.grad / scale for p in toy.heads.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found[2], found[0], rtol=1e-12, atol=0.0)


class TestLossScale:
    """A scale of the losses that is a power of two changes no bit of the step."""

    @pytest.mark.parametrize(
        ("perturbation", "count"), [(None, 2), (SAM(0.3), 1), (ASAM(0.3, norm="joint", local=0.5), 2)], ids=repr
    )
    @pytest.mark.parametrize("name", EVERY)
    def test_changes_nothing(self, name, perturbation, count):
        found = []
        for scale in (None, *SCALES):
            toy, mtl = narrow(), FlatMTL(aggregator(name), perturbation)
            scaler = None if scale is None else GradScaler("cpu", init_scale=scale)
            result = mtl.backward(pieces(toy.closure, count), toy.split(), scaler=scaler)
            own = {f"own {i}": p.grad for i, p in enumerate(mtl.parameters())}
            gradients = {k: g / (scale or 1.0) for k, g in (toy.gradients() | own).items()}
            found.append((gradients, mtl.state_dict(), result.losses, result.sharpness, result.norms))
        for other in found[1:]:
            assert_same(other, found[0])

    @pytest.mark.parametrize("combine", COMBINE)
    def test_changes_nothing_for_any_combine(self, combine):
        found = []
        for scale in SCALES:
            toy = narrow()
            FlatMTL(CAGrad(), SAM(0.3), combine=combine).backward(
                toy.closure, toy.split(), scaler=GradScaler("cpu", init_scale=scale)
            )
            found.append({k: g / scale for k, g in toy.gradients().items()})
        for other in found[1:]:
            assert_same(other, found[0])

    @pytest.mark.parametrize("perturbation", [None, SAM(0.3)], ids=repr)
    @pytest.mark.parametrize("name", ["cagrad", "ls"])
    def test_saves_gradients_that_float16_does_not_hold(self, name, perturbation):
        found = []
        for scale in (None, 1.0, 2.0**16):
            toy = narrow()

            def closure(tasks, toy=toy, half=scale is not None):
                with torch.autocast("cpu", torch.float16, enabled=half):
                    return {t: loss * 1e-8 for t, loss in toy.closure(tasks).items()}

            scaler = None if scale is None else GradScaler("cpu", init_scale=scale)
            FlatMTL(aggregator(name), perturbation).backward(closure, toy.split(), scaler=scaler)
            found.append(toy.gradients())
        assert cosine(found[2], found[0]) > 0.99
        assert flat(found[1]).norm() < 0.5 * flat(found[0]).norm()


class Loop:
    """The loop of a user with a scaler, who may keep optimizers for trunk, heads and weights of losses apart."""

    def __init__(self, toy: Toy, mtl: FlatMTL, scaler: GradScaler | None, *, apart: bool = False) -> None:
        self.toy, self.mtl, self.scaler = toy, mtl, scaler
        self.parameters = toy.split()
        groups = [list(group) for group in (toy.trunk.parameters(), toy.heads.parameters(), mtl.parameters())]
        groups = [group for group in groups if group] if apart else [[p for group in groups for p in group]]
        self.optimizers = [torch.optim.Adam(group, lr=0.02, weight_decay=0.1) for group in groups]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.5) for o in self.optimizers]
        self.monitor = Monitor()

    def step(self, closure: Callable | list[Callable] | None = None):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        result = self.mtl.backward(closure or self.toy.closure, self.parameters, scaler=self.scaler)
        for optimizer in self.optimizers:
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.5)
            optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        self.mtl.after_step(closure or self.toy.closure)
        if not result.skipped:
            for scheduler in self.schedulers:
                scheduler.step()
        self.monitor.update(result)
        return result

    def state(self):
        return (
            self.toy.contents(),
            self.mtl.state_dict(),
            [o.state_dict() for o in self.optimizers],
            [s.state_dict() for s in self.schedulers],
        )


optimizers = pytest.mark.parametrize("apart", [False, True], ids=["one optimizer", "one for each part"])


class TestLoop:
    @pytest.mark.parametrize(
        ("name", "apart"), [("gradvac", True), ("nash_mtl", False), *((name, name == "uw") for name in WEIGHTINGS)]
    )
    def test_is_the_loop_without_a_scaler_bit_for_bit(self, name, apart):
        """Weights of the network, of the losses, and of the optimizers, after twenty steps in which the scale grows."""
        states = []
        for scaler in (None, GradScaler("cpu", init_scale=4.0, growth_interval=3)):
            mtl = FlatMTL(aggregator(name), SAM(0.1))
            loop = Loop(narrow(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))), mtl, scaler, apart=apart)
            for epoch in range(20):
                mtl.start_epoch(epoch)
                loop.step()
            states.append(loop.state())
        assert_same(*states)
        assert scaler.get_scale() == 4.0 * 2.0**6

    @optimizers
    def test_the_scaler_counts_one_step_for_each(self, apart):
        scaler = GradScaler("cpu", init_scale=4.0)
        loop = Loop(narrow(), FlatMTL(CAGrad(), SAM(0.1)), scaler, apart=apart)
        for count in range(1, 4):
            loop.step(pieces(loop.toy.closure, 2))
            assert scaler._get_growth_tracker() == count

    @optimizers
    def test_an_optimizer_sees_gradients_that_are_unscaled(self, apart):
        seen = []
        for scaler in (None, GradScaler("cpu")):
            loop = Loop(narrow(), FlatMTL(CAGrad(), SAM(0.1)), scaler, apart=apart)
            for optimizer in loop.optimizers:
                optimizer.register_step_pre_hook(
                    lambda one, *_: seen.append([p.grad.clone() for p in one.param_groups[0]["params"]])
                )
            loop.step()
        assert_same(seen[: len(seen) // 2], seen[len(seen) // 2 :])


def overflowing(toy: Toy, count: int, *, perturbed: bool) -> Callable | list[Callable]:
    bad = spoilt(toy, "right", gradient=True, perturbed=perturbed)
    return bad if count == 1 else [*pieces(toy.closure, count)[:-1], pieces(bad, count)[-1]]


@optimizers
class TestOverflow:
    @pytest.mark.parametrize(
        ("method", "perturbed"), [(m, p) for m in METHODS for p in ((False,) if "plain" in m else (False, True))]
    )
    @pytest.mark.parametrize("count", [1, 2], ids=["one batch", "two micro-batches"])
    def test_leaves_everything_as_it_was_and_halves_the_scale(self, method, perturbed, count, apart):
        toy, mtl = narrow(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))), make(method)
        scaler = GradScaler("cpu", init_scale=4.0)
        loop = Loop(toy, mtl, scaler, apart=apart)
        loop.step()
        before = copy.deepcopy(loop.state())
        result = loop.step(overflowing(toy, count, perturbed=perturbed))
        assert_same(loop.state(), before)
        assert (result.skipped, result.dropped) == (True, ())
        assert scaler.get_scale() == 2.0

    @pytest.mark.parametrize("method", METHODS)
    def test_the_next_steps_are_as_if_it_had_not_been(self, method, apart):
        states = []
        for steps in ("ok ok", "ok bad bad ok"):
            toy = narrow()
            loop = Loop(toy, make(method), GradScaler("cpu", init_scale=16.0), apart=apart)
            for kind in steps.split():
                loop.step(overflowing(toy, 1, perturbed=False) if kind == "bad" else None)
            states.append(loop.state())
        assert_same(*states)

    def test_three_of_them_are_counted(self, apart):
        loop = Loop(narrow(), FlatMTL(CAGrad(), SAM(0.1)), GradScaler("cpu", init_scale=64.0), apart=apart)
        for bad in (True, False, True, True, False):
            loop.step(overflowing(loop.toy, 1, perturbed=True) if bad else None)
        assert (loop.monitor.compute()["skipped"], loop.monitor.compute()["steps"]) == (3, 5)
        assert loop.scaler.get_scale() == 8.0
        assert [s.last_epoch for s in loop.schedulers] == [2] * len(loop.schedulers)

    def test_a_scale_that_is_too_large_comes_down_by_itself(self, apart):
        """In float16 gradients of losses scaled by 2^40 are infinite, truly."""
        toy = narrow()

        def closure(tasks):
            with torch.autocast("cpu", torch.float16):
                return toy.closure(tasks)

        scaler = GradScaler("cpu", init_scale=2.0**40)
        loop = Loop(toy, FlatMTL(CAGrad(), SAM(0.1)), scaler, apart=apart)
        before, skipped = copy.deepcopy(loop.state()), []
        while not skipped or skipped[-1]:
            assert_same(loop.state(), before)
            skipped.append(loop.step(closure).skipped)
        assert 10 < len(skipped) < 40
        assert scaler.get_scale() == 2.0 ** (41 - len(skipped))
        assert not torch.equal(toy.trunk[0].weight, before[0]["trunk.0.weight"])


class TestScalerAndLabels:
    @pytest.mark.parametrize("policy", ["raise", "drop_task"])
    def test_an_overflow_is_the_scalers_business_whatever_the_policy(self, policy):
        toy = narrow()
        mtl = FlatMTL(CAGrad(), SAM(0.1), on_nonfinite=policy)
        loop = Loop(toy, mtl, GradScaler("cpu", init_scale=4.0))
        assert loop.step(overflowing(toy, 1, perturbed=False)).skipped

    def test_a_task_whose_loss_is_not_finite_is_dropped(self):
        steps = []
        for scaler in (None, GradScaler("cpu", init_scale=4.0)):
            toy = narrow()
            loop = Loop(toy, FlatMTL(CAGrad(), SAM(0.1), on_nonfinite="drop_task"), scaler)
            result = loop.step(spoilt(toy, "right", gradient=False))
            assert (result.dropped, result.skipped) == (("right",), False)
            steps.append(loop.state())
        assert_same(*steps)
        assert scaler.get_scale() == 4.0

    @pytest.mark.parametrize("perturbed", [False, True], ids=["clean pass", "perturbed pass"])
    def test_a_step_skipped_for_a_loss_is_skipped_by_the_scaler_too(self, perturbed):
        toy = narrow()
        loop = Loop(toy, FlatMTL(CAGrad(), SAM(0.1), on_nonfinite="skip_step"), GradScaler("cpu", init_scale=4.0))
        loop.step()
        before = copy.deepcopy(loop.state())
        assert loop.step(spoilt(toy, "right", gradient=False, perturbed=perturbed)).dropped == ("right",)
        assert_same(loop.state(), before)

    def test_nothing_is_learnt_from_a_step_that_overflowed(self):
        toy, mtl = narrow(), FlatMTL(aggregator("famo"), SAM(0.1))
        result = mtl.backward(overflowing(toy, 1, perturbed=True), toy.split(), scaler=GradScaler("cpu"))
        assert result.skipped
        toy.asked.clear()
        mtl.after_step(toy.closure)
        assert toy.asked == []

    def test_a_batch_without_labels_leaves_the_scale_alone(self):
        toy, scaler = narrow(), GradScaler("cpu", init_scale=4.0)
        loop = Loop(toy, FlatMTL(CAGrad(), SAM(0.1)), scaler)
        loop.step()
        tracker = scaler._get_growth_tracker()
        for optimizer in loop.optimizers:
            optimizer.zero_grad()
        result = loop.mtl.backward(absent(toy, *TASKS), loop.parameters, scaler=scaler)
        assert result.skipped
        assert all(p.grad is None for p in toy.parameters())
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (4.0, tracker)
        assert not loop.step().skipped

    @pytest.mark.parametrize("bad", [None, 0, 1], ids=["both finite", "the first overflows", "the second overflows"])
    def test_two_objects_may_share_one_scaler(self, bad):
        """Their gradients add up on one network, and either one's overflow skips the step."""
        toy, scaler = narrow(), GradScaler("cpu", init_scale=4.0)
        parameters = toy.split()
        optimizer = torch.optim.SGD(toy.parameters(), lr=1.0)
        before, expected = toy.contents(), 0.0
        makers = [lambda: FlatMTL(MGDA(), SAM(0.1)), lambda: FlatMTL(UW(tasks=3), ASAM(0.2))]
        for make_one in makers:
            expected = expected + flat(backward(toy, make_one())[1])
        toy.zero_grad()
        for i, make_one in enumerate(makers):
            closure = overflowing(toy, 1, perturbed=True) if i == bad else toy.closure
            make_one().backward(closure, parameters, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        moved = flat(before) - flat(toy.contents())
        if bad is None:
            torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-6)
        else:
            assert (moved == 0.0).all()
        assert scaler.get_scale() == (4.0 if bad is None else 2.0)
