"""The laws of a step with a loss weighting: training on the weighted sum of the losses, plain or by SAM."""

import copy
import gc
import math
import pickle
import weakref

import pytest
import torch
from tests.flatmtl.toys import TASKS, Toy, assert_same, spoilt, two_of
from torch import Tensor, nn

from flatmtl import ASAM, SAM, FlatMTL
from flatmtl.aggregators import LossWeighting
from flatmtl.aggregators.weightings import FAMO, LS, RLW, SI, UW

PERTURBATIONS = [
    None,
    SAM(0.3),
    ASAM(0.5, rho_heads=0.1),
    SAM(0.3, norm="joint"),
    SAM(0.3, local=0.4),
    SAM(0.3, local=1),
]
every_perturbation = pytest.mark.parametrize("perturbation", PERTURBATIONS, ids=repr)
once = pytest.mark.parametrize("perturbation", [None, SAM(0.3)], ids=repr)


class Preference(LossWeighting):
    """Weights that depend on the losses and differ clearly, as a user would write them."""

    def weights(self, losses, context=None):
        return losses.square() + 0.5


def step(toy: Toy, mtl: FlatMTL, closure=None, **options):
    toy.zero_grad()
    return mtl.backward(closure or toy.closure, toy.split(), **options), toy.gradients()


def descend(toy: Toy, lr: float = 0.05) -> None:
    with torch.no_grad():
        for p in toy.parameters():
            p -= lr * p.grad


def total(toy: Toy, weights: Tensor) -> Tensor:
    return sum(w * loss for w, loss in zip(weights, toy.closure(TASKS).values(), strict=True))


def ordinary_backward(toy: Toy, weights: Tensor) -> dict[str, Tensor]:
    toy.zero_grad()
    total(toy, weights).backward()
    return toy.gradients()


def ordinary_sam(toy: Toy, weights: Tensor, rho: float, groups: list[list[nn.Parameter]]) -> dict[str, Tensor]:
    """SAM as its users write it, with one norm for each group of parameters."""
    ordinary_backward(toy, weights)
    kept = [p.detach().clone() for p in toy.parameters()]
    with torch.no_grad():
        for group in groups:
            length = torch.stack([p.grad.norm() for p in group]).norm()
            for p in group:
                p += rho * p.grad / length
    gradients = ordinary_backward(toy, weights)
    with torch.no_grad():
        for p, value in zip(toy.parameters(), kept, strict=True):
            p.copy_(value)
    return gradients


def weights_of(toy: Toy) -> Tensor:
    return Preference().weights(torch.stack(list(toy.closure(TASKS).values())).detach())


class TestPlain:
    def test_is_one_ordinary_backward_pass_of_the_weighted_sum(self):
        toy = Toy()
        expected = ordinary_backward(toy, weights_of(toy))
        parameters, passes = toy.split(), []
        toy.trunk.register_forward_hook(
            lambda _m, _i, out: out.register_hook(lambda g: passes.append("backward")) and None
        )
        toy.asked.clear()
        toy.zero_grad()
        result = FlatMTL(Preference()).backward(toy.closure, parameters)
        assert passes == ["backward"]
        assert toy.asked == [list(TASKS)]
        torch.testing.assert_close(toy.gradients(), expected)
        torch.testing.assert_close(result.weights_loss, weights_of(toy))
        assert (result.gramian_loss, result.conflict, result.perturbed_losses, result.intra) == (None,) * 4

    def test_linear_scalarisation_is_the_sum_of_the_losses(self):
        toy = Toy()
        torch.testing.assert_close(step(toy, FlatMTL(LS()))[1], ordinary_backward(toy, torch.ones(3)))

    @every_perturbation
    @pytest.mark.parametrize("combine", ["direct", "second", "each"])
    def test_all_ways_to_combine_are_one(self, perturbation, combine):
        toy = Toy()
        expected = step(toy, FlatMTL(Preference(), perturbation))[1]
        assert_same(step(toy, FlatMTL(Preference(), perturbation, combine=combine))[1], expected)

    def test_radius_zero_is_the_plain_method_bit_for_bit(self):
        toy = Toy()
        expected = step(toy, FlatMTL(Preference()))[1]
        assert_same(step(toy, FlatMTL(Preference(), SAM(0.0)))[1], expected)

    def test_gradients_are_added_to_those_that_are_there(self):
        toy, mtl = Toy(), FlatMTL(Preference())
        _, once = step(toy, mtl)
        mtl.backward(toy.closure, toy.split())
        torch.testing.assert_close(toy.gradients(), {name: 2 * g for name, g in once.items()})


class TestSam:
    def test_is_sam_on_the_weighted_sum_in_two_passes(self):
        toy = Toy()
        groups = [list(toy.trunk.parameters()), *(list(toy.heads[t].parameters()) for t in TASKS)]
        expected = ordinary_sam(toy, weights_of(toy), 0.3, groups)
        parameters = toy.split()
        toy.asked.clear()
        toy.zero_grad()
        result = FlatMTL(Preference(), SAM(0.3)).backward(toy.closure, parameters)
        assert toy.asked == [list(TASKS)] * 2
        torch.testing.assert_close(toy.gradients(), expected)
        torch.testing.assert_close(result.weights_loss, weights_of(toy))  # of the clean losses
        assert bool((result.sharpness * result.weights_loss).sum() > 0)

    def test_joint_norm_is_that_of_the_whole_network(self):
        toy = Toy()
        expected = ordinary_sam(toy, weights_of(toy), 0.3, [list(toy.parameters())])
        torch.testing.assert_close(step(toy, FlatMTL(Preference(), SAM(0.3, norm="joint")))[1], expected)

    def test_one_task_is_sam_for_every_local(self):
        toy = Toy()
        parameters = toy.split(["left"])
        found = []
        for local in (None, 0.0, 0.5, 1.0):
            toy.zero_grad()
            FlatMTL(LS(), SAM(0.3, local=local)).backward(toy.closure, parameters)
            found.append(toy.gradients())
        for gradients in found[1:]:
            torch.testing.assert_close(gradients, found[0])

    def test_local_one_perturbs_each_task_along_its_own_gradient(self):
        """The sum over tasks of each one's own SAM gradient, trunk and head alike."""
        toy, w = Toy(), weights_of(Toy())
        alone = []
        for i, task in enumerate(TASKS):
            groups = [list(toy.trunk.parameters()), list(toy.heads[task].parameters())]
            alone.append(ordinary_sam(toy, torch.eye(3)[i] * w[i], 0.3, groups))
        expected = {name: sum(g[name] for g in alone) for name in alone[0]}
        torch.testing.assert_close(step(toy, FlatMTL(Preference(), SAM(0.3, local=1.0)))[1], expected)

    def test_weights_come_back_bit_for_bit(self):
        toy = Toy()
        before = toy.contents()
        step(toy, FlatMTL(Preference(), ASAM(0.5)))
        assert_same(toy.contents(), before)

    def test_both_passes_see_the_same_masks_and_buffers_change_once(self):
        toy = Toy(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.BatchNorm1d(5)))
        parameters = toy.split()
        torch.manual_seed(1)
        FlatMTL(LS()).backward(toy.closure, parameters)
        plain, buffers, streams = toy.gradients(), toy.contents(), torch.get_rng_state()
        toy.zero_grad()
        toy.trunk[2].reset_running_stats()
        torch.manual_seed(1)
        FlatMTL(LS(), SAM(1e-7)).backward(toy.closure, parameters)
        torch.testing.assert_close(toy.gradients(), plain, rtol=1e-4, atol=1e-5)
        assert_same((toy.contents(), torch.get_rng_state()), (buffers, streams))


@every_perturbation
def test_micro_batches_equal_the_whole_batch(perturbation):
    toy, mtl = Toy(), FlatMTL(Preference(), perturbation)
    whole, expected = step(toy, mtl)
    parts = [lambda tasks, r=slice(2 * i, 2 * i + 2): toy.closure(tasks, r) for i in range(4)]
    result, gradients = step(toy, mtl, closure=parts)
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(result.losses, whole.losses)
    torch.testing.assert_close(result.weights_loss, whole.weights_loss)


@every_perturbation
def test_an_absent_task_takes_no_part(perturbation):
    toy = Toy()
    result, gradients = step(
        toy, FlatMTL(Preference(), perturbation), lambda t: toy.closure(two_of(t)) | {"right": None}
    )
    parameters = toy.split(["left", "third"])
    toy.zero_grad()
    FlatMTL(Preference(), perturbation).backward(toy.closure, parameters)
    torch.testing.assert_close(gradients, toy.gradients())
    assert result.weights_loss.isnan().tolist() == [False, True, False]
    assert gradients["heads.right.weight"] is None


@once
@pytest.mark.parametrize("gradient", [False, True], ids=["loss", "gradient"])
class TestNonfinite:
    """What is not finite is found out task by task."""

    always = (1, 2, 3, 4, 5, 6, 7, 8)

    def test_the_task_is_named(self, perturbation, gradient):
        toy = Toy()
        closure = spoilt(toy, "right", math.nan, calls=self.always, gradient=gradient)
        with pytest.raises(FloatingPointError, match="'right'.*expected finite"):
            step(toy, FlatMTL(Preference(), perturbation), closure)
        assert all(p.grad is None for p in toy.parameters())

    def test_the_task_is_dropped(self, perturbation, gradient):
        toy = Toy()
        closure = spoilt(toy, "right", math.nan, calls=self.always, gradient=gradient)
        result, gradients = step(toy, FlatMTL(RLW(), perturbation, on_nonfinite="drop_task"), closure)
        expected = step(toy, FlatMTL(RLW(), perturbation), lambda t: toy.closure(two_of(t)) | {"right": None})[1]
        torch.testing.assert_close(gradients, expected)
        assert result.dropped == ("right",)

    def test_the_step_is_skipped(self, perturbation, gradient):
        toy = Toy(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.BatchNorm1d(5)))
        mtl, parameters = FlatMTL(RLW(), perturbation, on_nonfinite="skip_step"), toy.split()
        before = toy.contents(), mtl.state_dict()
        result = mtl.backward(spoilt(toy, "right", math.inf, calls=self.always, gradient=gradient), parameters)
        assert_same((toy.contents(), mtl.state_dict()), before)
        assert result.skipped
        assert result.dropped == ("right",)
        assert all(p.grad is None for p in toy.parameters())


@pytest.mark.parametrize("gradient", [False, True], ids=["loss", "gradient"])
def test_in_the_perturbed_pass_only_the_flat_part_of_a_task_is_dropped(gradient):
    toy = Toy()
    # Calls: the sum clean and perturbed, then once more with a row for each task.
    closure = spoilt(toy, "right", math.nan, calls=(2, 4), gradient=gradient)
    result, gradients = step(toy, FlatMTL(LS(), SAM(0.3), on_nonfinite="drop_task"), closure)
    plain = step(toy, FlatMTL(LS()))[1]
    assert result.dropped == ("right",)
    for name in ("weight", "bias"):
        torch.testing.assert_close(gradients[f"heads.right.{name}"], plain[f"heads.right.{name}"])
    assert not torch.allclose(gradients["heads.left.weight"], plain["heads.left.weight"])


class TestScaler:
    @once
    @pytest.mark.parametrize("scale", [1.0, 4096.0, 2.0**40])
    def test_the_scale_does_not_change_the_step(self, perturbation, scale):
        toy = Toy()
        toy.float()
        weighting = UW(tasks=3)
        expected = step(toy, FlatMTL(weighting, perturbation))[1]
        own = [p.grad.clone() for p in weighting.parameters()]
        weighting = UW(tasks=3)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        _, gradients = step(toy, FlatMTL(weighting, perturbation), scaler=scaler)
        assert_same({name: g / scale for name, g in gradients.items()}, expected)
        assert_same([p.grad / scale for p in weighting.parameters()], own)

    @pytest.mark.parametrize("call", [1, 2], ids=["clean pass", "perturbed pass"])
    def test_overflow_skips_the_step_of_every_optimizer(self, call):
        toy = Toy()
        toy.float()
        weighting = UW(tasks=3)
        mtl, parameters = FlatMTL(weighting, SAM(0.1)), toy.split()
        optimizers = [torch.optim.SGD(p, lr=0.1) for p in (toy.parameters(), mtl.parameters())]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = toy.contents(), mtl.state_dict()
        result = mtl.backward(spoilt(toy, "right", 0.0, calls=(call,), gradient=True), parameters, scaler=scaler)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert result.skipped
        assert_same((toy.contents(), mtl.state_dict()), before)
        assert scaler.get_scale() == 2.0


class TestTrained:
    def test_own_parameters_get_the_gradient_of_the_stated_objective(self):
        toy, weighting = Toy(), UW(tasks=3)
        with torch.no_grad():
            for s, value in zip(weighting.parameters(), (0.1, -0.2, 0.3), strict=True):
                s.fill_(value)
        _, gradients = step(toy, FlatMTL(weighting))
        s = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64, requires_grad=True)
        toy.zero_grad()
        (total(toy, (-s).exp()) + s.sum()).backward()
        torch.testing.assert_close(gradients, toy.gradients(), rtol=1e-6, atol=1e-8)
        own = torch.stack([p.grad for p in weighting.parameters()])
        torch.testing.assert_close(own.double(), s.grad, rtol=1e-6, atol=1e-8)

    def test_an_optimizer_trains_them_with_the_network(self):
        toy, weighting = Toy(), UW(tasks=3)
        mtl = FlatMTL(weighting, SAM(0.05))
        optimizer = torch.optim.Adam([*toy.parameters(), *mtl.parameters()], lr=0.05)
        for _ in range(20):
            optimizer.zero_grad()
            mtl.backward(toy.closure, toy.split())
            optimizer.step()
        assert all(p.item() != 0.0 for p in weighting.parameters())

    def test_parameters_that_nobody_trains_are_said_once(self):
        toy, mtl = Toy(), FlatMTL(UW(tasks=3))
        parameters = toy.split()
        for _ in range(100):
            mtl.backward(toy.closure, parameters)
        with pytest.warns(
            UserWarning, match="UW: the trained numbers have not moved in 100 steps: give mtl.parameters"
        ):
            mtl.backward(toy.closure, parameters)
        mtl.backward(toy.closure, parameters)

    def test_those_of_an_absent_task_are_left_alone(self):
        toy, weighting = Toy(), UW(tasks=3)
        step(toy, FlatMTL(weighting), lambda t: toy.closure(two_of(t)) | {"right": None})
        assert [p.grad is None for p in weighting.parameters()] == [False, True, False]

    def test_resuming_goes_on_exactly(self):
        toy = Toy()
        first, second = FlatMTL(UW(tasks=3), SAM(0.1)), FlatMTL(UW(tasks=3), SAM(0.1))
        with torch.no_grad():
            next(iter(first.parameters())).fill_(0.7)
        second.load_state_dict(first.state_dict())
        assert_same(step(toy, second)[1], step(toy, first)[1])


class TestAfterStep:
    """FAMO learns from what the step did to the losses of the same batch."""

    def test_it_sees_the_same_batch_masks_and_buffers_at_the_new_weights(self):
        toy = Toy(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.BatchNorm1d(5)))
        mtl, seen = FlatMTL(FAMO(tasks=3)), []
        mtl.aggregator.after_step = lambda losses, context: seen.append((losses, context.rows))
        result, _ = step(toy, mtl)
        after = toy.contents(), torch.get_rng_state()
        mtl.after_step(toy.closure)
        (losses, rows), *rest = seen
        assert rest == []
        assert rows == (0, 1, 2)
        torch.testing.assert_close(losses, result.losses)  # nothing has stepped yet
        assert_same((toy.contents(), torch.get_rng_state()), after)
        mtl.after_step(toy.closure)  # there is nothing new to tell
        assert len(seen) == 1

    def test_a_step_along_the_gradient_lowers_what_it_sees(self):
        toy, mtl, seen = Toy(), FlatMTL(FAMO(tasks=3), SAM(0.01)), []
        mtl.aggregator.after_step = lambda losses, context: seen.append(losses)
        result, _ = step(toy, mtl)
        descend(toy, lr=1e-3)
        mtl.after_step(toy.closure)
        assert bool(seen[0].log().sum() < result.losses.log().sum())

    def test_micro_batches_and_absent_tasks(self):
        toy, mtl, seen = Toy(), FlatMTL(FAMO(tasks=3)), []
        mtl.aggregator.after_step = lambda losses, context: seen.append((losses, context.rows))
        parts = [lambda t, r=slice(4 * i, 4 * i + 4): toy.closure(two_of(t), r) | {"right": None} for i in range(2)]
        result, _ = step(toy, mtl, parts)
        mtl.after_step(parts)
        losses, rows = seen[0]
        assert rows == (0, 2)
        torch.testing.assert_close(losses, result.losses[[0, 2]])
        step(toy, mtl, parts)
        with pytest.raises(ValueError, match="after_step got 1 closures; expected the 2 of backward"):
            mtl.after_step(parts[0])

    def test_losses_that_are_not_finite_are_for_the_next_step_to_tell(self):
        toy, mtl = Toy(), FlatMTL(FAMO(tasks=3))
        for tasks in (["right"], TASKS):
            step(toy, mtl)
            mtl.after_step(lambda t, bad=tasks: toy.closure(t) | {k: toy.closure(t)[k] * math.nan for k in bad})
        fresh = FlatMTL(FAMO(tasks=3))
        step(toy, fresh)
        assert torch.equal(step(toy, mtl)[0].weights_loss, step(toy, fresh)[0].weights_loss)  # nothing was learnt

    @pytest.mark.parametrize("aggregator", [LS(), lambda J: J.sum(0)])
    def test_it_is_nothing_for_others(self, aggregator):
        toy, mtl = Toy(), FlatMTL(aggregator)
        step(toy, mtl)
        toy.asked.clear()
        mtl.after_step(toy.closure)
        assert toy.asked == []


@pytest.mark.parametrize(("perturbation", "good_calls"), [(None, 0), (SAM(0.3), 0), (SAM(0.3), 1)])
def test_a_closure_that_raises_leaves_everything_as_it_was(perturbation, good_calls):
    toy, mtl = Toy(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))), FlatMTL(RLW(), perturbation)
    parameters, before = toy.split(), (toy.contents(), mtl.state_dict())
    toy.asked.clear()

    def closure(tasks):
        if len(toy.asked) == good_calls:
            raise OSError("the batch is gone")
        return toy.closure(tasks)

    with pytest.raises(OSError, match="gone"):
        mtl.backward(closure, parameters)
    assert_same((toy.contents(), mtl.state_dict()), before)
    assert all(p.grad is None for p in toy.parameters())


def test_weights_that_are_no_weights_are_refused():
    class Broken(LossWeighting):
        def weights(self, losses, context=None):
            return losses[:1]

    with pytest.raises(
        ValueError, match=r"the weights of the aggregator Broken are .* expected a tensor of shape \(3,\)"
    ):
        step(Toy(), FlatMTL(Broken()))


@every_perturbation
@pytest.mark.parametrize("closures", [1, 2])
def test_weighted_gradients_that_overflow_are_found(perturbation, closures):
    """A loss of 1e-41 has the weight 1e41 in SI, which float32 does not hold."""
    toy = Toy()
    toy.float()
    parameters = toy.split()

    def closure(tasks):
        return {t: loss * (1e-41 if t == "right" else 1.0) for t, loss in toy.closure(tasks).items()}

    given = closure if closures == 1 else [closure] * closures
    with pytest.raises(FloatingPointError, match="task 'right'.*expected finite"):
        FlatMTL(SI(), perturbation).backward(given, parameters)
    assert all(p.grad is None for p in toy.parameters())
    assert FlatMTL(SI(), perturbation, on_nonfinite="skip_step").backward(given, parameters).skipped
    assert all(p.grad is None for p in toy.parameters())


def test_own_gradients_that_are_not_finite_or_fail_leave_everything_as_it_was():
    class Failing(UW):
        def own_gradients(self, losses, context=None):
            raise OSError("no")

    toy = Toy()
    parameters = toy.split()
    with pytest.raises(OSError, match="no"):
        FlatMTL(Failing(tasks=3)).backward(toy.closure, parameters)
    with pytest.raises(FloatingPointError, match="gradients of the parameters of UW are not finite"):
        FlatMTL(UW(tasks=3)).backward(
            lambda tasks: {t: loss * 1e300 for t, loss in toy.closure(tasks).items()}, parameters
        )
    assert all(p.grad is None for p in toy.parameters())


def test_famo_keeps_no_batch_and_can_be_copied_between_backward_and_after_step():
    toy, mtl = Toy(), FlatMTL(FAMO(tasks=3))

    class Batch:
        pass

    def make():
        batch = Batch()
        return weakref.ref(batch), lambda tasks: (batch, toy.closure(tasks))[1]

    alive, closure = make()
    step(toy, mtl, closure)
    del closure
    gc.collect()
    assert alive() is None
    twin = pickle.loads(pickle.dumps(mtl))
    assert_same(step(toy, copy.deepcopy(mtl))[1], step(toy, twin)[1])


def test_a_corrected_after_step_is_taken():
    toy, mtl = Toy(), FlatMTL(FAMO(tasks=3))
    step(toy, mtl)
    with pytest.raises(ValueError, match="after_step got 2 closures"):
        mtl.after_step([toy.closure] * 2)
    toy.asked.clear()
    mtl.after_step(toy.closure)
    assert len(toy.asked) == 1


def test_the_printed_form_does_not_speak_of_what_does_not_matter():
    assert repr(FlatMTL(LS(), SAM(0.1), combine="second")) == "FlatMTL(LS(), SAM(rho=0.1))"


def test_losses_that_cannot_be_weighted_are_refused():
    toy = Toy()
    with pytest.raises(ValueError, match="not positive"):
        step(toy, FlatMTL(SI()), lambda tasks: {t: -loss for t, loss in toy.closure(tasks).items()})
    assert all(p.grad is None for p in toy.parameters())
