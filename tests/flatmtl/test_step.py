"""The laws of one step, on toy models; the golden traces are in ``test_golden_steps.py``."""

import copy
import math
import random
import sys

import numpy as np
import pytest
import torch
from tests.flatmtl.toys import EVERY, TASKS, Toy, aggregator, assert_same, spoilt, two_of
from tests.reference import algorithm1
from torch import Tensor, nn

from flatmtl import ASAM, SAM, FlatMTL, TaskParameters, perturbations, split_parameters
from flatmtl.aggregators import IMTLG, MGDA, CAGrad, GramianAggregator, Mean, NashMTL, PCGrad, Sum

AGGREGATORS = [Mean(), Sum(), MGDA(), PCGrad(), CAGrad(), IMTLG()]
COMBINE = ["individual", "direct", "second", "each"]


def shared_gradient(parameters: TaskParameters) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in parameters.shared])


def step(toy: Toy, mtl: FlatMTL, closure=None, **options):
    toy.zero_grad()
    parameters = toy.split()
    result = mtl.backward(closure or toy.closure, parameters, **options)
    return result, shared_gradient(parameters)


class TestPlain:
    @pytest.mark.parametrize("aggregator", AGGREGATORS, ids=repr)
    def test_without_a_perturbation_the_direction_is_the_aggregated_gradient(self, aggregator):
        toy = Toy()
        result, d = step(toy, FlatMTL(copy.deepcopy(aggregator)))
        rows = algorithm1.step(
            toy.closure,
            list(toy.trunk.parameters()),
            {t: list(toy.heads[t].parameters()) for t in TASKS},
            aggregator,
            rho_sh=0.0,
            rho_ns=0.0,
        )["loss_gradients"]
        torch.testing.assert_close(d, aggregator(rows), rtol=1e-10, atol=1e-14)
        assert result.perturbed_losses is None
        assert result.sharpness is None

    @pytest.mark.parametrize("combine", COMBINE)
    @pytest.mark.parametrize("perturbation", [SAM(0.0), ASAM(0.0)], ids=repr)
    def test_radius_zero_is_the_plain_method_bit_for_bit(self, combine, perturbation):
        plain, zero = Toy(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5))), None
        zero = copy.deepcopy(plain)
        torch.manual_seed(1)
        step(plain, FlatMTL(PCGrad()))
        after_plain = torch.get_rng_state()
        torch.manual_seed(1)
        step(zero, FlatMTL(PCGrad(), perturbation, combine=combine))
        assert_same(zero.gradients(), plain.gradients())
        assert_same(torch.get_rng_state(), after_plain)

    def test_any_function_of_the_rows_is_an_aggregator(self):
        toy = Toy()
        _, expected = step(toy, FlatMTL(Sum(), SAM(0.1)))
        _, d = step(toy, FlatMTL(lambda J: J.sum(dim=0), SAM(0.1)))
        torch.testing.assert_close(d, expected)

    def test_a_gramian_aggregator_of_a_user_needs_weights_alone(self):
        class Strongest(GramianAggregator):
            """The longest task gradient."""

            def weights(self, gramian):
                return (gramian.diagonal() == gramian.diagonal().max()).to(gramian)

        toy = Toy()
        rows: list[Tensor] = []
        step(toy, FlatMTL(lambda J: rows.append(J.clone()) or J[0]))
        _, d = step(toy, FlatMTL(Strongest()))
        assert_same(d, rows[0][rows[0].norm(dim=1).argmax()])
        assert_same(Strongest()(rows[0]), d)

    def test_a_function_may_return_one_of_the_rows_itself(self):
        toy = Toy()
        _, expected = step(toy, FlatMTL(lambda J: J[0].clone(), SAM(0.1)))
        _, d = step(toy, FlatMTL(lambda J: J[0], SAM(0.1)))
        assert_same(d, expected)

    def test_the_memory_of_a_function_is_its_own(self):
        kept = []

        def mean(J):
            kept.append(J.mean(0))
            return kept[-1]

        toy = Toy()
        step(toy, FlatMTL(mean, SAM(0.5)))
        _, plain = step(toy, FlatMTL(mean))
        assert_same(kept[0], plain)

    def test_a_sparse_gradient_that_is_there_becomes_a_dense_one(self):
        toy = Toy()
        parameters = toy.split()
        weight = toy.trunk[0].weight
        weight.grad = torch.ones_like(weight).to_sparse()
        FlatMTL(Mean()).backward(toy.closure, parameters)
        added = weight.grad - 1.0
        toy.zero_grad()
        FlatMTL(Mean()).backward(toy.closure, parameters)
        torch.testing.assert_close(added, weight.grad)

    @pytest.mark.parametrize("aggregator", [Mean(), MGDA(), CAGrad(), IMTLG(), PCGrad()], ids=repr)
    def test_the_default_device_does_not_matter(self, aggregator):
        toy = Toy()
        parameters = toy.split()
        torch.set_default_device("meta")
        try:
            FlatMTL(aggregator, SAM(0.1)).backward(toy.closure, parameters)
        finally:
            torch.set_default_device(None)
        assert toy.trunk[0].weight.grad.norm() > 0

    def test_gradients_are_added_to_those_that_are_there(self):
        toy, mtl = Toy(), FlatMTL(Mean(), SAM(0.1))
        parameters = toy.split()
        mtl.backward(toy.closure, parameters)
        once = toy.gradients()
        memory = {n: p.grad.data_ptr() for n, p in toy.named_parameters()}
        mtl.backward(toy.closure, parameters)
        assert_same(toy.gradients(), {name: 2 * g for name, g in once.items()})
        assert {n: p.grad.data_ptr() for n, p in toy.named_parameters()} == memory


class TestLimits:
    def test_mean_makes_individual_equal_direct(self):
        toy = Toy()
        _, individual = step(toy, FlatMTL(Mean(), SAM(0.3)))
        _, direct = step(toy, FlatMTL(Mean(), SAM(0.3), combine="direct"))
        torch.testing.assert_close(individual, direct, rtol=1e-12, atol=1e-14)

    @pytest.mark.parametrize("name", EVERY)
    def test_one_task_is_parallel_to_sam(self, name):
        """Single-task learning is one task in the same engine; its flat form is SAM on the whole network."""
        toy = Toy()
        parameters = toy.split(["left"])
        assert parameters.heads == {"left": ()}
        method = aggregator(name, tasks=1)
        FlatMTL(method, SAM(0.2), combine="direct").backward(toy.closure, parameters)
        every = parameters.shared
        weights = [p.detach().clone() for p in every]
        g = torch.autograd.grad(toy.closure(["left"])["left"], every)
        size = torch.cat([part.reshape(-1) for part in g]).norm()
        with torch.no_grad():
            for p, part in zip(every, g, strict=True):
                p += 0.2 * part / size
        expected = torch.cat([p.reshape(-1) for p in torch.autograd.grad(toy.closure(["left"])["left"], every)])
        with torch.no_grad():
            for p, w in zip(every, weights, strict=True):
                p.copy_(w)
        d = shared_gradient(parameters)
        factor = float(d @ expected / (expected @ expected))
        assert factor > 0.0
        torch.testing.assert_close(d, factor * expected, rtol=1e-10, atol=1e-13)
        if method.degree == 1.0 and name not in ("cagrad", "si", "gls", "famo"):
            assert factor == pytest.approx(1.0)

    @pytest.mark.parametrize("name", EVERY)
    def test_flat_part_vanishes_linearly_with_the_radius(self, name):
        """With the default flat_scale, whatever the degree of the aggregator."""
        toy = Toy(seed=3)
        _, plain = step(toy, FlatMTL(aggregator(name)))
        flat = [step(toy, FlatMTL(aggregator(name), SAM(rho, rho_heads=0.0)))[1] - plain for rho in (1e-3, 1e-4)]
        assert float(flat[0].norm() / flat[1].norm()) == pytest.approx(10.0, rel=0.05)
        torch.testing.assert_close(flat[1] * 10.0, flat[0], rtol=0.0, atol=0.05 * float(flat[0].norm()))

    @pytest.mark.parametrize("name", [n for n in EVERY if aggregator(n).degree != 1.0])
    def test_flat_part_as_printed_does_not(self, name):
        toy = Toy(seed=3)
        _, plain = step(toy, FlatMTL(aggregator(name)))
        raw = [step(toy, FlatMTL(aggregator(name), SAM(r), flat_scale="raw"))[1] - plain for r in (1e-3, 1e-4)]
        degree = aggregator(name).degree
        assert float(raw[0].norm() / raw[1].norm()) == pytest.approx(10.0**degree, rel=0.05)

    @pytest.mark.parametrize("flat_scale", ["linear", "raw"])
    @pytest.mark.parametrize("perturbation", [None, SAM(0.3), ASAM(0.5)], ids=repr)
    def test_nash_is_invariant_to_the_scale_of_one_loss(self, flat_scale, perturbation):
        toy = Toy()

        def louder(tasks):
            return {t: loss * (1000.0 if t == "right" else 1.0) for t, loss in toy.closure(tasks).items()}

        _, d = step(toy, FlatMTL(NashMTL(), perturbation, flat_scale=flat_scale))
        _, same = step(toy, FlatMTL(NashMTL(), perturbation, flat_scale=flat_scale), closure=louder)
        torch.testing.assert_close(same, d, rtol=0.0, atol=1e-8 * float(d.norm()))

    @pytest.mark.parametrize("rho", [0.01, 3.0])
    def test_no_part_is_longer_than_max_norm(self, rho):
        toy, parts = Toy(), []
        mtl = FlatMTL(NashMTL(max_norm=0.1), SAM(rho))
        _, d = step(toy, mtl)
        _, loss_part = step(toy, FlatMTL(NashMTL(max_norm=0.1)))
        parts = [float(loss_part.norm()), float((d - loss_part).norm())]
        assert parts[0] == pytest.approx(0.1)
        assert parts[1] <= 0.1 * (1 + 1e-12)

    def test_flat_gradient_tends_to_the_hessian_along_the_gradient(self):
        """For rho -> 0 with unperturbed heads, f / rho -> H g / |g|."""
        toy, rho = Toy(), 1e-5
        parameters = toy.split(["left", "right"])
        rows: list[Tensor] = []
        FlatMTL(lambda J: rows.append(J.clone()) or J[0], SAM(rho, rho_heads=0.0)).backward(toy.closure, parameters)
        loss = toy.closure(["left"])["left"]
        g = torch.autograd.grad(loss, parameters.shared, create_graph=True)
        vector = torch.cat([part.reshape(-1) for part in g])
        unit = (vector / vector.norm()).detach()
        Hu = torch.cat([part.reshape(-1) for part in torch.autograd.grad(vector @ unit, parameters.shared)])
        torch.testing.assert_close(rows[1][0] / rho, Hu, rtol=1e-3, atol=1e-4 * float(Hu.norm()))

    def test_adaptive_radius_ignores_a_change_of_scale_between_layers(self):
        toy = Toy(nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 5, bias=False)))
        other = copy.deepcopy(toy)
        with torch.no_grad():
            other.trunk[0].weight.mul_(8.0)
            other.trunk[2].weight.div_(8.0)
        same, _ = step(toy, FlatMTL(Mean(), ASAM(0.1)))
        scaled, _ = step(other, FlatMTL(Mean(), ASAM(0.1)))
        torch.testing.assert_close(scaled.sharpness, same.sharpness)


class Draws(nn.Linear):
    """A head that draws from every random stream on the CPU."""

    def forward(self, z: Tensor) -> Tensor:
        return super().forward(z * (torch.rand(()) + random.random() + np.random.random()))


class TestWorld:
    """The second pass sees the first one's random streams and buffers, and leaves nothing behind."""

    def test_weights_come_back_bit_for_bit(self):
        toy = Toy()
        before = toy.contents()
        step(toy, FlatMTL(CAGrad(), ASAM(0.7)))
        assert_same(toy.contents(), before)

    @pytest.mark.parametrize("head", [nn.Linear, Draws], ids=["plain heads", "heads that draw"])
    def test_flat_gradient_sees_the_same_masks(self, head):
        """At a tiny radius the flat gradient is tiny only if nothing but the weights has changed."""
        toy = Toy(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5)), head=head)
        result, _ = step(toy, FlatMTL(Mean(), SAM(1e-7)))
        assert (result.norms_flat < 1e-5 * result.norms).all()

    @pytest.mark.parametrize("head", [nn.Linear, Draws], ids=["plain heads", "heads that draw"])
    def test_random_streams_end_where_one_clean_pass_ends(self, head):
        toy = Toy(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5)), head=head)
        streams = []
        for perturbation in (None, SAM(0.1)):
            torch.manual_seed(3)
            random.seed(3)
            np.random.seed(3)
            step(toy, FlatMTL(Mean(), perturbation))
            streams.append((torch.rand(()).item(), random.random(), np.random.random()))
        assert streams[0] == streams[1]

    def test_heads_that_draw_are_found_once(self):
        toy, mtl = Toy(head=Draws), FlatMTL(Mean(), SAM(0.1))
        parameters = toy.split()
        toy.asked.clear()
        mtl.backward(toy.closure, parameters)
        assert len(toy.asked) == 1 + 1 + 3
        toy.asked.clear()
        mtl.backward(toy.closure, parameters)
        assert toy.asked == [list(TASKS)] * 4

    def test_perturbed_passes_ask_for_one_task_at_a_time(self):
        toy = Toy()
        parameters = toy.split()
        toy.asked.clear()
        FlatMTL(Mean(), SAM(0.1)).backward(toy.closure, parameters)
        assert toy.asked == [list(TASKS), ["left"], ["right"], ["third"]]

    def test_one_perturbation_for_all_tasks_needs_one_perturbed_forward_pass(self):
        toy = Toy()
        parameters = toy.split()
        toy.asked.clear()
        FlatMTL(Mean(), SAM(0.1, local=0.0)).backward(toy.closure, parameters)
        assert toy.asked == [list(TASKS), list(TASKS)]

    @pytest.mark.parametrize("known", [True, False], ids=["with the model", "without the model"])
    @pytest.mark.parametrize("momentum", [0.1, None])
    def test_buffers_are_those_of_one_clean_pass(self, known, momentum):
        trunk = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=momentum), Counter())
        toy = Toy(trunk)
        once = copy.deepcopy(toy)
        once.closure(TASKS)
        parameters = toy.split()
        parameters = TaskParameters(parameters.shared, parameters.heads, model=toy if known else None)
        FlatMTL(Mean(), SAM(0.5)).backward(toy.closure, parameters)
        assert_same(toy.contents(), once.contents())
        assert toy.training

    @pytest.mark.parametrize(
        "wrap", [torch.jit.script, lambda m: torch.compile(m, backend="eager")], ids=["script", "compile"]
    )
    @pytest.mark.parametrize("known", [True, False], ids=["with the model", "without the model"])
    @pytest.mark.filterwarnings("ignore")
    def test_buffers_of_a_compiled_trunk_are_those_of_one_clean_pass(self, wrap, known):
        toy = Toy(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)))
        parameters, plain = toy.split(), toy.trunk
        parameters = TaskParameters(parameters.shared, parameters.heads, model=toy if known else None)
        toy.trunk = wrap(plain)
        FlatMTL(Mean(), SAM(0.5)).backward(toy.closure, parameters)
        assert plain[1].num_batches_tracked == 1

    def test_buffers_of_modules_outside_the_model_are_put_back_too(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)  # as if nothing had been compiled
        toy, backbone = Toy(), nn.BatchNorm1d(4).double()
        parameters = toy.split()

        def closure(tasks):
            z = toy.trunk(backbone(toy.x))
            return {t: toy.heads[t](z).square().mean() for t in tasks}

        FlatMTL(Mean(), SAM(0.5)).backward(closure, parameters)
        assert backbone.num_batches_tracked == 1

    def test_perturbed_pass_starts_from_the_buffers_of_the_clean_one(self):
        """Spectral norm takes one power iteration a pass: a second one would look like a flat gradient."""
        toy = Toy(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)))
        result, _ = step(toy, FlatMTL(Mean(), SAM(1e-7)))
        assert (result.norms_flat < 1e-5 * result.norms).all()

    @pytest.mark.parametrize("failing_call", [1, 2, 4])
    def test_a_closure_that_raises_leaves_everything_as_it_was(self, failing_call):
        toy = Toy(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)))
        parameters, mtl = toy.split(), FlatMTL(PCGrad(), SAM(0.5))
        mtl.backward(toy.closure, parameters)
        before = toy.contents(), toy.gradients(), mtl.state_dict()
        calls = []

        def closure(tasks):
            losses = toy.closure(tasks)
            calls.append(tasks)
            if len(calls) == failing_call:
                raise KeyboardInterrupt
            return losses

        with pytest.raises(KeyboardInterrupt):
            mtl.backward(closure, parameters)
        assert_same((toy.contents(), toy.gradients(), mtl.state_dict()), before)

    @pytest.mark.parametrize("copy", [3, 4], ids=["head", "trunk"])  # the first two keep the weights
    def test_weights_come_back_when_a_signal_comes_while_they_are_put_back(self, copy, monkeypatch):
        toy, copies = Toy(), []
        parameters, before = toy.split(), toy.contents()

        @torch.no_grad()
        def copy_(source, *, to):
            copies.append(len(to))
            if len(copies) == copy:  # the first to be put back
                to[0].copy_(source[0])
                raise KeyboardInterrupt
            for place, tensor in zip(to, source, strict=True):
                place.copy_(tensor)

        monkeypatch.setattr(perturbations, "copy_each", copy_)
        with pytest.raises(KeyboardInterrupt):
            FlatMTL(Mean(), SAM(0.5)).backward(toy.closure, parameters)
        assert_same(toy.contents(), before)

    def test_a_step_within_a_step_of_the_same_object_is_refused(self):
        toy, mtl = Toy(), FlatMTL(Mean(), SAM(0.1))
        parameters = toy.split()

        def closure(tasks):
            mtl.backward(toy.closure, parameters)
            return toy.closure(tasks)

        with pytest.raises(RuntimeError, match="by a closure of the same FlatMTL"):
            mtl.backward(closure, parameters)
        mtl.backward(toy.closure, parameters)

    def test_works_within_no_grad(self):
        toy = Toy()
        _, expected = step(toy, FlatMTL(Mean(), SAM(0.1)))
        parameters = toy.split()
        toy.zero_grad()
        with torch.no_grad():
            FlatMTL(Mean(), SAM(0.1)).backward(toy.closure, parameters)
        assert_same(shared_gradient(parameters), expected)


class Counter(nn.Module):
    """A module whose buffer is replaced, not written, and which has a buffer that cannot be written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("fixed", torch.ones(1).expand(3))

    def forward(self, z: Tensor) -> Tensor:
        self.count = self.count + z.detach().mean()
        return z


class TestLabels:
    """Tasks without labels take no part."""

    def test_a_task_without_labels_takes_no_part(self):
        toy, mtl = Toy(), FlatMTL(MGDA(), SAM(0.1))
        parameters = toy.split()
        two = toy.split(["left", "third"])
        mtl.backward(lambda tasks: toy.closure(two_of(tasks)) | {"right": None}, parameters)
        some = toy.gradients()
        toy.zero_grad()
        FlatMTL(MGDA(), SAM(0.1)).backward(toy.closure, two)
        assert_same(some, toy.gradients())
        assert toy.heads["right"].weight.grad is None

    def test_statistics_of_an_absent_task_are_nan(self):
        toy = Toy()
        parameters = toy.split()
        closure = lambda tasks: toy.closure(two_of(tasks)) | {"right": None}  # noqa: E731
        result = FlatMTL(Mean(), SAM(0.1)).backward(closure, parameters)
        for vector in (result.losses, result.sharpness, result.norms, result.weights_flat, result.intra):
            assert vector.isnan().tolist() == [False, True, False]
        assert result.cosines.isnan().sum() == 5
        assert result.conflict in (0.0, 1.0)

    def test_a_batch_without_labels_is_skipped(self):
        toy = Toy()
        parameters = toy.split()
        result = FlatMTL(Mean(), SAM(0.1)).backward(dict.fromkeys, parameters)
        assert result.skipped
        assert result.losses.isnan().all()
        assert all(p.grad is None for p in toy.parameters())

    def test_parameters_that_no_present_task_reaches_keep_their_gradient(self):
        toy = Toy()
        side = nn.Parameter(torch.ones(5, dtype=torch.float64))
        shared = [*toy.trunk.parameters(), side]
        parameters = TaskParameters(shared, {t: toy.heads[t].parameters() for t in TASKS})
        FlatMTL(Mean(), SAM(0.1)).backward(toy.closure, parameters)
        assert side.grad is None


@pytest.mark.parametrize("gradient", [False, True], ids=["loss", "gradient"])
class TestNonfinite:
    def test_the_task_is_named(self, gradient):
        toy = Toy()
        with pytest.raises(FloatingPointError, match="'right'.*expected finite"):
            step(toy, FlatMTL(Mean(), SAM(0.1)), spoilt(toy, "right", math.nan, gradient=gradient))
        assert all(p.grad is None for p in toy.parameters())

    def test_the_task_is_dropped(self, gradient):
        toy = Toy()
        mtl = FlatMTL(MGDA(), SAM(0.1), on_nonfinite="drop_task")
        result, d = step(toy, mtl, spoilt(toy, "right", math.nan, gradient=gradient))
        _, expected = step(toy, FlatMTL(MGDA(), SAM(0.1)), lambda t: toy.closure(two_of(t)) | {"right": None})
        assert_same(d, expected)
        assert result.dropped == ("right",)
        assert not result.skipped

    def test_the_step_is_skipped(self, gradient):
        toy = Toy(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)))
        mtl = FlatMTL(PCGrad(), SAM(0.1), on_nonfinite="skip_step")
        parameters = toy.split()
        before = toy.contents(), mtl.state_dict()
        result = mtl.backward(spoilt(toy, "right", math.inf, gradient=gradient), parameters)
        assert_same((toy.contents(), mtl.state_dict()), before)
        assert result.skipped
        assert result.dropped == ("right",)
        assert all(p.grad is None for p in toy.parameters())

    def test_dropping_every_task_leaves_the_buffers_as_they_were(self, gradient):
        toy = Toy(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)))
        parameters, before = toy.split(["right"]), toy.contents()
        mtl = FlatMTL(Mean(), SAM(0.1), on_nonfinite="drop_task")
        result = mtl.backward(spoilt(toy, "right", math.nan, gradient=gradient), parameters)
        assert result.skipped
        assert_same(toy.contents(), before)

    @pytest.mark.parametrize("combine", COMBINE)
    def test_in_the_perturbed_pass_only_the_flat_part_is_dropped(self, gradient, combine):
        toy = Toy()
        mtl = FlatMTL(Sum(), SAM(0.1), on_nonfinite="drop_task", combine=combine)
        result, d = step(toy, mtl, spoilt(toy, "right", math.nan, calls=(3,), gradient=gradient))
        own = [p.grad.clone() for p in toy.heads["right"].parameters()]
        _, plain = step(toy, FlatMTL(Sum()))
        torch.testing.assert_close(own, [p.grad for p in toy.heads["right"].parameters()])
        flat = sum(algorithm1_flat(toy, task) for task in ("left", "third"))
        torch.testing.assert_close(d, plain + flat, rtol=1e-9, atol=1e-12)
        assert result.dropped == ("right",)


def algorithm1_flat(toy: Toy, task: str) -> Tensor:
    out = algorithm1.step(
        toy.closure,
        list(toy.trunk.parameters()),
        {task: list(toy.heads[task].parameters())},
        lambda J: J[0],
        rho_sh=0.1,
        rho_ns=0.1,
    )
    return out["flat_gradients"][0]


class TestScaler:
    """With a gradient scaler the loop is the ordinary one: unscale, clip, step and update once a step."""

    @pytest.mark.parametrize("perturbation", [None, ASAM(0.5)], ids=repr)
    @pytest.mark.parametrize("scale", [1.0, 4096.0, 2.0**40])
    def test_the_scale_does_not_change_the_step(self, perturbation, scale):
        toy = Toy()
        toy.float()
        _, expected = step(toy, FlatMTL(CAGrad(), perturbation))
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer = torch.optim.SGD(toy.parameters(), lr=0.1)
        result, d = step(toy, FlatMTL(CAGrad(), perturbation), scaler=scaler)
        assert_same(d / scale, expected)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert not result.skipped

    def test_a_scaler_that_is_switched_off_is_none(self):
        toy = Toy()
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        with pytest.raises(FloatingPointError, match="'right'"):
            step(toy, FlatMTL(Mean(), SAM(0.1)), spoilt(toy, "right", 0.0, gradient=True), scaler=scaler)
        assert all(p.grad is None for p in toy.parameters())

    def test_a_loss_that_is_not_finite_follows_the_option(self):
        toy = Toy()
        scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(FloatingPointError, match="'left' is nan"):
            step(toy, FlatMTL(Mean()), spoilt(toy, "left", math.nan), scaler=scaler)


class TestPrecision:
    def test_gradients_have_the_strides_of_their_parameter(self):
        trunk = nn.Sequential(nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 5, (1, 1)), nn.Flatten())
        toy = Toy(trunk).to(memory_format=torch.channels_last)
        step(toy, FlatMTL(Mean(), SAM(0.1)))
        weight = toy.trunk[1].weight
        assert weight.grad.stride() == weight.stride()

    @pytest.mark.parametrize("kind", [SAM, ASAM])
    @pytest.mark.parametrize("size", [1e-39, 1e-42])
    def test_gradients_of_denormal_numbers_give_a_step_of_the_radius(self, kind, size):
        toy = Toy()
        toy.float()
        moved = []

        def closure(tasks):
            moved.append(torch.cat([p.detach().reshape(-1) for p in toy.trunk.parameters()]))
            return {t: loss * size for t, loss in toy.closure(tasks).items()}

        parameters = toy.split()
        FlatMTL(Mean(), kind(0.1)).backward(closure, parameters)
        steps = [float((m - moved[-4]).norm()) for m in moved[-3:]]
        assert all(math.isfinite(s) and s > 0.0 for s in steps)
        if kind is SAM:
            assert steps == pytest.approx([0.1] * 3, rel=0.02)

    def test_tiny_gradients_give_a_full_step_and_zero_ones_none(self):
        toy = Toy()
        toy.float()
        result, _ = step(toy, FlatMTL(Mean(), SAM(0.1)), lambda t: {k: v * 1e-25 for k, v in toy.closure(t).items()})
        normal, _ = step(toy, FlatMTL(Mean(), SAM(0.1)))
        torch.testing.assert_close(result.sharpness * 1e25, normal.sharpness, rtol=1e-4, atol=0.0)
        zero, _ = step(toy, FlatMTL(Mean(), SAM(0.1)), lambda t: {k: v * 0.0 for k, v in toy.closure(t).items()})
        assert (zero.sharpness == 0).all()


class TestState:
    def test_resuming_goes_on_exactly(self):
        first, second = FlatMTL(PCGrad(seed=1), SAM(0.1)), FlatMTL(PCGrad(seed=2), SAM(0.1))
        toy = Toy()
        step(toy, first)
        second.load_state_dict(first.state_dict())
        assert_same(step(toy, second)[1], step(toy, first)[1])

    def test_branches_do_not_share_state(self):
        aggregator = PCGrad(seed=1)
        toy, mtl = Toy(), FlatMTL(aggregator, SAM(0.1))
        step(toy, mtl)
        alone = PCGrad(seed=1)
        alone(torch.randn(3, 4))
        assert_same(aggregator.state_dict(), alone.state_dict())

    def test_a_foreign_state_is_refused(self):
        with pytest.raises(ValueError, match="expected what FlatMTL"):
            FlatMTL(Mean()).load_state_dict({"momentum": 1})
        with pytest.raises(ValueError, match="same combine"):
            FlatMTL(Mean()).load_state_dict(FlatMTL(Mean(), combine="second").state_dict())


class TestRefusals:
    """Each message says what was given, what is expected and what to do."""

    @pytest.mark.parametrize(
        ("returned", "error", "message"),
        [
            (torch.ones(()), TypeError, r"closure\(\['left', 'right'\]\) returned a Tensor; expected a mapping"),
            ({"left": torch.ones((), requires_grad=True)}, KeyError, "no loss for task 'right'"),
            ({"left": 1.0, "right": 1.0}, TypeError, "'left' is a float; expected a scalar tensor"),
            ({"left": torch.ones(8, 1), "right": None}, ValueError, r"shape \(8, 1\).*Did you forget .mean\(\)"),
            ({"left": torch.ones(()), "right": None}, ValueError, "has no graph.*return None"),
            ({"left": torch.ones((), dtype=torch.cfloat), "right": None}, ValueError, "dtype torch.complex64"),
        ],
    )
    def test_bad_losses(self, returned, error, message):
        toy = Toy()
        parameters = toy.split(["left", "right"])
        with pytest.raises(error, match=message):
            FlatMTL(Mean()).backward(lambda tasks: returned, parameters)

    @pytest.mark.parametrize(
        ("weights", "error", "message"),
        [
            (
                lambda G: torch.full((3,), math.nan),
                FloatingPointError,
                "weights of the aggregator Odd are .*nan.*finite",
            ),
            (
                lambda G: torch.ones(4),
                ValueError,
                r"Odd are a tensor of shape \(4,\).*expected a tensor of shape \(3,\)",
            ),
            (lambda G: [1.0, 2.0, 3.0], ValueError, r"Odd are \[1.0, 2.0, 3.0\] for 3 tasks; expected a tensor"),
        ],
    )
    def test_weights_that_are_no_weights(self, weights, error, message):
        class Odd(GramianAggregator):
            def weights(self, gramian, context=None):
                return weights(gramian)

        with pytest.raises(error, match=message):
            step(Toy(), FlatMTL(Odd()))

    def test_a_gramian_that_is_changed_is_not_the_steps(self):
        class Careless(GramianAggregator):
            degree = 0.0

            def weights(self, gramian, context=None):
                return 1.0 / gramian.zero_().add_(2.0).diagonal()

        toy = Toy()
        result, _ = step(toy, FlatMTL(Careless(), SAM(0.1)))
        assert_same(result.gramian_loss, step(toy, FlatMTL(Mean(), SAM(0.1)))[0].gramian_loss)

    def test_a_direction_that_is_not_finite(self):
        with pytest.raises(FloatingPointError, match="direction that is not finite"):
            step(Toy(), FlatMTL(lambda J: J[0] / 0.0))

    def test_a_closure_without_an_argument_and_one_that_fails_within(self):
        toy = Toy()
        with pytest.raises(TypeError, match="given; expected a function of one argument, the names of the tasks"):
            FlatMTL(Mean()).backward(lambda: toy.closure(TASKS), toy.split())

        def closure(tasks):
            return toy.closure(tasks, None, None, None)

        with pytest.raises(TypeError, match="given$"):
            FlatMTL(Mean()).backward(closure, toy.split())

    def test_a_closure_that_can_be_iterated_over_is_one_closure(self):
        class Closure(nn.Sequential):
            def forward(self, tasks):
                return toy.closure(tasks)

        toy = Toy()
        FlatMTL(Mean()).backward(Closure(nn.Identity(), nn.Identity()), toy.split())
        assert toy.asked[-1] == list(TASKS)

    def test_a_warning_points_at_the_users_line(self):
        toy = Toy().bfloat16()
        parameters = toy.split()
        with pytest.warns(UserWarning, match="half precision") as said:
            FlatMTL(Mean(), SAM(1e-6)).backward(toy.closure, parameters)
        assert said[0].filename == __file__

    def test_a_task_that_shares_nothing(self):
        toy = Toy()
        parameters = toy.split(["left", "right"])

        def closure(tasks):
            z = toy.trunk(toy.x)
            return {t: toy.heads[t](z.detach() if t == "right" else z).sum() for t in tasks}

        with pytest.raises(ValueError, match="no gradient of task 'right' reaches any shared parameter"):
            FlatMTL(Mean()).backward(closure, parameters)

    def test_a_closure_that_keeps_its_forward_pass(self):
        toy = Toy()
        parameters = toy.split(["left", "right"])
        z = toy.trunk(toy.x)
        with pytest.raises(RuntimeError, match="Run the whole forward pass inside the closure"):
            FlatMTL(Mean(), SAM(0.1)).backward(lambda ts: {t: toy.heads[t](z).sum() for t in ts}, parameters)

    def test_a_task_that_loses_its_labels_between_the_passes(self):
        toy, calls = Toy(), []
        parameters = toy.split(["left", "right"])

        def closure(tasks):
            calls.append(tasks)
            return toy.closure(tasks) if len(calls) == 1 else dict.fromkeys(tasks)

        with pytest.raises(ValueError, match="'left' in the clean pass and None when it was called again"):
            FlatMTL(Mean(), SAM(0.1)).backward(closure, parameters)

    def test_several_processes_are_refused_rather_than_left_to_drift_apart(self, monkeypatch):
        toy = Toy()
        parameters = toy.split()
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        with pytest.raises(ValueError, match="2 processes train, but.*process_group=torch.distributed.group.WORLD"):
            FlatMTL(Mean()).backward(toy.closure, parameters)

    def test_a_parameter_that_was_frozen_since(self):
        toy = Toy()
        parameters = toy.split()
        toy.trunk[0].weight.requires_grad_(False)
        with pytest.raises(ValueError, match="'trunk.0.weight' no longer requires a gradient.*split_parameters"):
            FlatMTL(Mean()).backward(toy.closure, parameters)

    def test_bad_options(self):
        with pytest.raises(TypeError, match="aggregator is MGDA; expected an instance"):
            FlatMTL(MGDA)
        with pytest.raises(TypeError, match=r"aggregator is 'mgda'.*build\(name\)"):
            FlatMTL("mgda")
        with pytest.raises(TypeError, match=r"perturbation is 0.5; expected SAM\(rho\)"):
            FlatMTL(Mean(), 0.5)
        with pytest.raises(TypeError, match="process_group is 'x'; expected a torch.distributed process group"):
            FlatMTL(Mean(), process_group="x")
        for option in ("combine", "flat_scale", "schedule", "on_nonfinite"):
            with pytest.raises(ValueError, match=f"unknown {option} 'x'. Known"):
                FlatMTL(Mean(), **{option: "x"})

    @pytest.mark.parametrize(
        ("aggregator", "message"),
        [
            (lambda J: J, r"returned a tensor of shape \(3, 74\).*expected one direction of shape \(74,\)"),
            (lambda J: 0.0, "returned a float"),
            (lambda J: J.mul_(2.0)[0], "changed its input"),
        ],
    )
    def test_bad_aggregators(self, aggregator, message):
        toy = Toy()
        nn.init.zeros_(toy.trunk[0].bias)
        with pytest.raises(ValueError, match=message.replace("74", r"\d+")):
            step(toy, FlatMTL(aggregator))

    def test_what_is_no_closure_and_what_are_no_parameters(self):
        toy = Toy()
        parameters, mtl = toy.split(), FlatMTL(Mean())
        with pytest.raises(TypeError, match="closure is a NoneType; expected a function"):
            mtl.backward(None, parameters)
        with pytest.raises(TypeError, match="closure is a dict; .*not what it returns"):
            mtl.backward(toy.closure(TASKS), parameters)
        with pytest.raises(TypeError, match="parameters is a list; expected TaskParameters"):
            mtl.backward(toy.closure, list(toy.parameters()))
        with pytest.raises(TypeError, match="scaler is 1024.0; expected a torch.amp.GradScaler"):
            mtl.backward(toy.closure, parameters, scaler=1024.0)

    def test_no_closures_and_inference_mode(self):
        toy = Toy()
        parameters = toy.split()
        with pytest.raises(ValueError, match="list of closures is empty"):
            FlatMTL(Mean()).backward([], parameters)
        with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
            FlatMTL(Mean()).backward(toy.closure, parameters)


def test_split_parameters_is_all_that_a_user_needs():
    toy = Toy()
    parameters = split_parameters(toy, toy.closure, TASKS)
    optimizer = torch.optim.SGD(toy.parameters(), lr=0.05)
    mtl = FlatMTL(CAGrad(), SAM(0.05))
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        losses.append(mtl.backward(toy.closure, parameters).losses.sum())
        optimizer.step()
    assert losses[-1] < losses[0]
