"""The step within a training loop: gradients, hooks, modes, optimizers, checkpoints, and the closed forms of SAM."""

import copy
import io
import math
import pickle

import pytest
import torch
from tests.flatmtl.test_step import COMBINE
from tests.flatmtl.toys import EVERY, TASKS, Toy, aggregator, assert_same
from torch import Tensor, nn
from torch.optim import lr_scheduler

from flatmtl import ASAM, SAM, FlatMTL, TaskParameters
from flatmtl.aggregators import AGGREGATORS, MGDA, UW, CAGrad, GramianAggregator, LossWeighting, Mean, PCGrad, Sum

WEIGHTINGS = [name for name in EVERY if issubclass(AGGREGATORS[name], LossWeighting)]
WAYS = [(name, how) for name in EVERY for how in (["direct"] if name in WEIGHTINGS else COMBINE)]


class Scalar:
    """One task, one weight ``w``, and the loss ``w^2 / 2``."""

    def __init__(self, w: float) -> None:
        self.w = nn.Parameter(torch.tensor([w], dtype=torch.float64))
        self.parameters = TaskParameters([self.w], {"only": []})

    def closure(self, tasks):
        return {task: self.w.square().sum() / 2 for task in tasks}


def gradients_of(toy: Toy, *, mtl: FlatMTL | None = None, closure=None) -> dict[str, Tensor | None]:
    """Return the gradients of one flat step."""
    toy.zero_grad()
    (mtl or FlatMTL(CAGrad(), SAM(0.1))).backward(closure or toy.closure, toy.split())
    return toy.gradients()


class TestClosedForms:
    @pytest.mark.parametrize("name", ["mean", "mgda", "pcgrad", "ls"])
    @pytest.mark.parametrize("combine", ["individual", "direct"])
    def test_a_square_is_stepped_from_where_the_radius_leads(self, name, combine):
        """No gradient of the clean pass is left in that of the perturbed one: w - (w + rho), not w - (2w + rho)."""
        toy, rho = Scalar(3.0), 0.5
        optimizer = torch.optim.SGD([toy.w], lr=1.0)
        FlatMTL(aggregator(name, tasks=1), SAM(rho), combine=combine).backward(toy.closure, toy.parameters)
        optimizer.step()
        assert toy.w.item() == pytest.approx(-rho, rel=1e-12)

    def test_the_adaptive_radius_grows_with_the_weight(self):
        """T^2 g / |T g| is |w| for one weight."""
        toy = Scalar(3.0)
        FlatMTL(Mean(), ASAM(0.5)).backward(toy.closure, toy.parameters)
        assert toy.w.grad.item() == pytest.approx(3.0 + 0.5 * 3.0)

    def test_the_norm_is_over_what_is_perturbed(self):
        """Only the norm layer of the trunk is trained: the whole step within the radius is its own."""
        toy, moved = Toy(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))), []
        for frozen in (toy.trunk[0], toy.trunk[2]):
            frozen.requires_grad_(False)
        parameters, before = toy.split(), toy.contents()
        toy.trunk.register_forward_pre_hook(
            lambda m, inputs: moved.append([p.detach() - before[f"trunk.{n}"] for n, p in m.named_parameters()])
        )
        FlatMTL(Mean(), SAM(0.3)).backward(toy.closure, parameters)
        for steps in moved[1:]:
            assert [float(s.norm()) > 0.0 for s in steps] == [False, False, True, True, False, False]
            assert float(torch.cat(steps[2:4]).norm()) == pytest.approx(0.3, rel=1e-12)

    def test_the_radius_can_be_read(self):
        mtl = FlatMTL(Mean(), ASAM(0.5, rho_heads=0.1))
        assert (mtl.options.perturbation.rho, mtl.options.perturbation.rho_heads) == (0.5, 0.1)

    def test_clipping_concerns_the_final_gradient_alone(self):
        """Perturbed points are the same for any gradients and bound, and the update is lr times the bound long."""
        found = []
        for scale, clip in ((1e6, 1.0), (1e6, 1e-3), (1.0, 1e-3)):
            toy, points = Toy(), []
            parameters, before = toy.split(), toy.contents()
            toy.trunk[0].register_forward_pre_hook(lambda m, _, seen=points: seen.append(m.weight.detach().clone()))
            FlatMTL(MGDA(), SAM(0.5)).backward(
                lambda tasks, toy=toy, scale=scale: {t: scale * v for t, v in toy.closure(tasks).items()}, parameters
            )
            nn.utils.clip_grad_norm_(toy.parameters(), clip)
            torch.optim.SGD(toy.parameters(), lr=0.1).step()
            update = torch.cat([(p.detach() - before[name]).reshape(-1) for name, p in toy.named_parameters()])
            assert float(update.norm()) == pytest.approx(0.1 * clip, rel=1e-3)
            found.append((points, update / update.norm()))
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-8)


class TestReach:
    """A parameter that only one of the two passes reaches."""

    @pytest.mark.parametrize("when", ["clean", "perturbed"])
    @pytest.mark.parametrize("perturbation", [SAM(0.5), ASAM(0.5), SAM(0.5, local=0.0)], ids=repr)
    def test_every_weight_comes_back(self, when, perturbation):
        toy, calls = Toy(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 5))), []
        parameters, before = toy.split(), toy.contents()

        def closure(tasks):
            calls.append(tasks)
            z = toy.trunk[0](toy.x)
            if (len(calls) == 1) == (when == "clean"):
                z = toy.trunk[1](z)
            return {t: toy.heads[t](z).square().mean() for t in tasks}

        optimizer = torch.optim.AdamW(toy.parameters(), lr=0.0, weight_decay=0.0)
        FlatMTL(Mean(), perturbation).backward(closure, parameters)
        assert_same(toy.contents(), before)
        optimizer.step()
        assert toy.trunk[2].weight.grad is None

    def test_a_first_gradient_may_come_late(self):
        """A layer that joins in the second step has no state in the optimizer until then."""
        toy, joined = Toy(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5))), []
        parameters = toy.split()
        optimizer = torch.optim.Adam(toy.parameters())
        mtl = FlatMTL(PCGrad(), ASAM(0.5))

        def closure(tasks):
            z = toy.trunk[0](toy.x)
            z = toy.trunk[1](z) if joined else z
            return {t: toy.heads[t](z).square().mean() for t in tasks}

        for _ in range(3):
            optimizer.zero_grad()
            mtl.backward(closure, parameters)
            optimizer.step()
            assert (toy.trunk[1].weight in optimizer.state) == bool(joined)
            joined.append(True)


class TestCaches:
    """A closure that keeps something of the clean pass for the perturbed ones."""

    @pytest.mark.parametrize("name", ["mean", "ls"])
    @pytest.mark.parametrize(
        ("keep", "message"),
        [
            (lambda z: z, "Run the whole forward pass inside the closure"),
            (lambda z: z.detach(), "no gradient of task .* reaches any shared parameter.*nothing is detached"),
        ],
        ids=["graph", "detached"],
    )
    def test_kept_features_are_refused(self, name, keep, message):
        toy, kept = Toy(), []
        parameters, before = toy.split(), toy.contents()

        def closure(tasks):
            z = keep(kept[0]) if kept else toy.trunk(toy.x)
            kept.append(z)
            return {t: toy.heads[t](z).square().mean() for t in tasks}

        with pytest.raises((RuntimeError, ValueError), match=message):
            FlatMTL(aggregator(name), SAM(0.1)).backward(closure, parameters)
        assert_same(toy.contents(), before)
        assert all(p.grad is None for p in toy.parameters())


class TestGrad:
    def test_gradients_have_the_strides_of_a_turned_parameter(self):
        toy = Toy(nn.Linear(4, 5))
        toy.trunk.weight = nn.Parameter(toy.trunk.weight.detach().t().contiguous().t())
        assert toy.trunk.weight.stride() == (1, 5)
        expected = gradients_of(Toy(nn.Linear(4, 5)))
        torch.testing.assert_close(gradients_of(toy), expected)
        assert toy.trunk.weight.grad.stride() == (1, 5)

    def test_a_gradient_that_is_there_keeps_its_memory_and_strides(self):
        toy = Toy(nn.Linear(4, 5))
        expected = gradients_of(toy)
        there = torch.ones(4, 5, dtype=torch.float64).t()
        toy.trunk.weight.grad = there
        FlatMTL(CAGrad(), SAM(0.1)).backward(toy.closure, toy.split())
        assert toy.trunk.weight.grad is there
        torch.testing.assert_close(there, expected["trunk.weight"] + 1.0)

    def test_setting_gradients_to_zero_or_to_none_is_the_same(self):
        toy = Toy()
        parameters, mtl = toy.split(), FlatMTL(CAGrad(), SAM(0.1))
        found = []
        for to_none in (True, False):
            mtl.backward(toy.closure, parameters)
            toy.zero_grad(set_to_none=to_none)
            mtl.backward(toy.closure, parameters)
            found.append(toy.gradients())
        assert_same(found[1], found[0])

    def test_gradients_have_no_graph_and_belong_to_nobody_else(self):
        toy, rows = Toy(), []
        parameters = toy.split()
        FlatMTL(lambda J: rows.append(J) or J.sum(0), SAM(0.1)).backward(toy.closure, parameters)
        before = toy.gradients()
        for J in rows:
            J.fill_(math.nan)
        assert_same(toy.gradients(), before)
        assert not any(p.grad.requires_grad for p in toy.parameters())

    def test_a_leaf_outside_the_parameters_gets_no_gradient(self):
        toy = Toy()
        parameters = toy.split()
        toy.x.requires_grad_()
        FlatMTL(Mean(), SAM(0.1)).backward(toy.closure, parameters)
        assert toy.x.grad is None


class TestModes:
    @pytest.mark.parametrize("grad", [torch.no_grad, lambda: torch.set_grad_enabled(False)])
    def test_gradients_switched_off_around_the_step_do_not_matter(self, grad):
        toy = Toy()
        expected = gradients_of(toy)
        with grad():
            assert_same(gradients_of(toy), expected)
            assert not torch.is_grad_enabled()

    @pytest.mark.filterwarnings("ignore:Anomaly Detection")
    def test_anomaly_detection_changes_nothing(self):
        toy = Toy()
        expected = gradients_of(toy)
        with torch.autograd.detect_anomaly():
            assert_same(gradients_of(toy), expected)

    def test_deterministic_algorithms_change_nothing(self):
        """They fill fresh memory with NaN, too, so that nothing unwritten is read."""
        toy = Toy(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)))
        expected = [gradients_of(toy, mtl=FlatMTL(MGDA(), SAM(0.1), combine=combine)) for combine in COMBINE]
        torch.use_deterministic_algorithms(True)
        try:
            found = [gradients_of(toy, mtl=FlatMTL(MGDA(), SAM(0.1), combine=combine)) for combine in COMBINE]
        finally:
            torch.use_deterministic_algorithms(False)
        assert_same(found, expected)

    @pytest.mark.parametrize("name", EVERY)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
    def test_the_default_dtype_does_not_matter(self, name, dtype):
        toy = Toy().float()
        expected = gradients_of(toy, mtl=FlatMTL(aggregator(name), SAM(0.1)))
        torch.set_default_dtype(dtype)
        try:
            found = gradients_of(toy, mtl=FlatMTL(aggregator(name), SAM(0.1)))
        finally:
            torch.set_default_dtype(torch.float32)
        assert_same(found, expected)


class TestHooks:
    """What hooks see: every task's own gradient in every pass, where an ordinary backward pass shows their sum once."""

    def test_hooks_of_a_parameter_see_the_gradient_of_each_task_in_each_pass(self):
        toy, seen = Toy(), {"trunk": [], "head": []}
        parameters, rows = toy.split(), []
        bias = toy.trunk[2].bias
        bias.register_hook(lambda g: seen["trunk"].append(g.clone()))
        toy.heads["right"].weight.register_hook(lambda g: seen["head"].append(g.clone()))
        mtl = FlatMTL(lambda J: rows.append(J[:, -5:].clone()) or J.sum(0), SAM(0.1), combine="individual")
        mtl.backward(toy.closure, parameters)
        assert len(seen["trunk"]) == 2 * len(TASKS)
        assert_same(torch.stack(seen["trunk"][:3]), rows[0])
        torch.testing.assert_close(torch.stack(seen["trunk"][3:]) - rows[0], rows[1])
        assert len(seen["head"]) == 2
        assert_same(seen["head"][1], toy.heads["right"].weight.grad)

    def test_a_hook_that_masks_a_gradient_masks_the_step_and_its_perturbation(self):
        toy, moved = Toy(), []
        parameters, weight = toy.split(), toy.trunk[0].weight
        mask = torch.arange(24).reshape(6, 4) % 2
        weight.register_hook(lambda g: g * mask)
        before = weight.detach().clone()
        toy.trunk.register_forward_hook(lambda m, inputs, out: moved.append(weight.detach() != before))
        FlatMTL(CAGrad(), SAM(0.1)).backward(toy.closure, parameters)
        assert_same(weight.grad != 0.0, mask.bool())
        assert_same(torch.stack(moved[1:]), mask.bool().expand(3, 6, 4))

    @pytest.mark.filterwarnings("ignore:Full backward hook is firing")
    @pytest.mark.parametrize(("perturbation", "passes"), [(None, 1), (SAM(0.1), 2)], ids=repr)
    def test_hooks_of_modules_run_once_for_each_forward_and_for_each_tasks_backward_pass(self, perturbation, passes):
        toy, count = Toy(), dict.fromkeys(["forward", "backward", "head forward", "head backward"], 0)
        parameters = toy.split()

        def counts(name):
            def hook(*arguments):
                count[name] += 1

            return hook

        for module, name in ((toy.trunk[0], ""), (toy.heads["left"], "head ")):
            module.register_forward_hook(counts(f"{name}forward"))
            module.register_full_backward_hook(counts(f"{name}backward"))
        FlatMTL(Mean(), perturbation).backward(toy.closure, parameters)
        assert count == {
            "forward": 1 if passes == 1 else 4,
            "backward": 3 * passes,
            "head forward": passes,
            "head backward": passes,
        }

    def test_a_module_whose_input_needs_a_gradient_that_no_parameter_needs_shows_no_backward_pass(self):
        """PyTorch computes nothing for the batch, so the hook of the first module has nothing to see."""
        toy, seen = Toy(), []
        parameters = toy.split()
        toy.x.requires_grad_()
        toy.trunk[0].register_full_backward_hook(lambda m, inputs, outputs: seen.append(m))
        toy.trunk[2].register_full_backward_hook(lambda m, inputs, outputs: seen.append(m))
        FlatMTL(Mean()).backward(toy.closure, parameters)
        assert seen == [toy.trunk[2]] * 3

    def test_features_retain_the_gradient_of_the_sum_in_the_clean_pass_and_of_one_task_in_each_other(self):
        toy, features, seen = Toy(), [], []
        parameters = toy.split()

        def watch(module, inputs, out):
            out.register_hook(lambda g: seen.append(g.clone()))
            out.retain_grad()
            features.append(out)

        toy.trunk.register_forward_hook(watch)
        sum(toy.closure(TASKS).values()).backward()
        expected = features.pop().grad
        toy.zero_grad()
        seen.clear()
        FlatMTL(Mean(), SAM(0.1)).backward(toy.closure, parameters)
        assert len(seen) == 2 * len(TASKS)
        torch.testing.assert_close(features[0].grad, expected)
        assert_same([z.grad for z in features[1:]], seen[3:])

    def test_hooks_after_accumulation_run_once_for_each_parameter(self):
        toy, seen = Toy(), []
        parameters = toy.split()
        for p in toy.parameters():
            p.register_post_accumulate_grad_hook(lambda p: seen.append((p, p.grad.clone())))
        FlatMTL(Mean(), SAM(0.1)).backward(toy.closure, parameters)
        assert len(seen) == len(list(toy.parameters()))
        for p, g in seen:
            assert_same(g, p.grad)


class Proxy:
    """Forwards attributes, as the optimizers that trainers hand out."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)


class TestLoops:
    @pytest.mark.parametrize("perturbation", [None, SAM(0.5), ASAM(0.5)], ids=repr)
    def test_the_closure_runs_once_and_once_more_for_each_task_and_losses_are_the_clean_ones(self, perturbation):
        toy = Toy()
        parameters, losses = toy.split(), toy.closure(TASKS)
        toy.asked.clear()
        result = FlatMTL(CAGrad(), perturbation).backward(toy.closure, parameters)
        assert len(toy.asked) == (1 if perturbation is None else 1 + len(TASKS))
        assert_same(result.losses, torch.stack([losses[t].detach() for t in TASKS]))

    @pytest.mark.parametrize(
        "schedule",
        [
            lambda o: lr_scheduler.StepLR(o, 2),
            lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=6),
            lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
            lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
        ],
    )
    def test_any_scheduler_and_a_proxy_of_the_optimizer_work(self, schedule):
        toy = Toy()
        parameters, optimizer = toy.split(), torch.optim.SGD(toy.parameters(), lr=0.1, momentum=0.9)
        scheduler, proxy, rates = schedule(optimizer), Proxy(optimizer), []
        mtl = FlatMTL(MGDA(), SAM(0.1))
        for _ in range(5):
            proxy.zero_grad()
            result = mtl.backward(toy.closure, parameters)
            before = toy.contents()
            proxy.step()
            assert toy.trunk[0].weight.ne(before["trunk.0.weight"]).any()
            plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([result.losses.sum() + 1e3 * len(rates)] if plateau else []))
            rates.append(proxy.param_groups[0]["lr"])
        assert len(set(rates)) > 1

    @pytest.mark.parametrize("name", EVERY)
    @pytest.mark.filterwarnings("ignore:the parameters of .* still hold the gradient")
    def test_a_model_may_change_its_dtype_between_steps(self, name):
        toy = Toy().float()
        mtl = FlatMTL(aggregator(name), SAM(0.1))
        found = [gradients_of(toy.to(dtype), mtl=mtl) for dtype in (torch.float32, torch.float64, torch.float32)]
        for gradients, dtype in zip(found, (torch.float32, torch.float64, torch.float32), strict=True):
            assert all(g.dtype == dtype and g.isfinite().all() for g in gradients.values())

    @pytest.mark.parametrize("name", ["uw", "imtl_l"])
    def test_weights_of_losses_that_are_in_an_optimizer_are_trained(self, name):
        toy, mtl = Toy(), FlatMTL(aggregator(name), SAM(0.1))
        parameters, trained = toy.split(), list(mtl.parameters())
        before = copy.deepcopy(trained)
        optimizer = torch.optim.Adam([*toy.parameters(), *trained], lr=0.01)
        for _ in range(10):
            optimizer.zero_grad()
            mtl.backward(toy.closure, parameters)
            optimizer.step()
        assert trained
        assert all((p != b).all() for p, b in zip(trained, before, strict=True))

    @pytest.mark.parametrize("name", ["uw", "imtl_l"])
    def test_those_that_are_in_none_are_noticed_once(self, name):
        toy, mtl = Toy(), FlatMTL(aggregator(name))
        parameters, optimizer = toy.split(), torch.optim.SGD(toy.parameters(), lr=0.01)

        def step() -> None:
            optimizer.zero_grad()
            mtl.backward(toy.closure, parameters)
            optimizer.step()

        step()
        with pytest.warns(UserWarning, match="are in no optimizer, or not cleared with it"):
            step()
        step()  # warnings are errors


class TestResults:
    """What a step returned is not touched by what comes after it."""

    def test_weights_are_not_the_aggregators_own_memory(self):
        class Counting(GramianAggregator):
            def __init__(self) -> None:
                self.w = torch.ones(len(TASKS), dtype=torch.float64)

            def weights(self, gramian, context=None):
                self.w += 1.0
                return self.w

        toy, mtl = Toy(), FlatMTL(Counting())
        results = [mtl.backward(toy.closure, toy.split()) for _ in range(2)]
        assert [r.weights_loss.tolist() for r in results] == [[2.0] * 3, [3.0] * 3]

    @pytest.mark.parametrize("combine", COMBINE)
    @pytest.mark.parametrize("name", EVERY)
    def test_nothing_of_it_changes_with_the_next_step(self, name, combine):
        toy, mtl = Toy(), FlatMTL(aggregator(name), SAM(0.1), combine=combine)
        parameters = toy.split()
        result = mtl.backward(toy.closure, parameters)
        gradients, before = toy.gradients(), copy.deepcopy(result.statistics())
        torch.optim.SGD([*toy.parameters(), *mtl.parameters()], lr=0.1).step()
        for p in mtl.parameters():
            p.grad = None
        mine = [p.grad for p in toy.parameters()]
        toy.zero_grad()
        mtl.backward(toy.closure, parameters)
        assert_same(result.statistics(), before)
        assert_same(mine, list(gradients.values()))

    def test_a_copy_made_within_a_closure_is_free(self):
        toy, mtl, copies = Toy(), FlatMTL(CAGrad()), []

        def closure(tasks):
            copies.append(copy.deepcopy(mtl))
            return toy.closure(tasks)

        mtl.backward(closure, toy.split())
        copies[0].backward(toy.closure, toy.split())


class Run:
    """A training run on one batch that can be saved, as a user would save it."""

    def __init__(self, name: str, combine: str) -> None:
        self.toy = Toy(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.2)))
        self.mtl = FlatMTL(aggregator(name), SAM(0.1), combine=combine)
        self.parameters = self.toy.split()
        self.optimizer = torch.optim.Adam([*self.toy.parameters(), *self.mtl.parameters()], lr=0.01)
        self.steps = 0

    def train(self, steps: int) -> dict[str, Tensor]:
        for _ in range(steps):
            if self.steps % 2 == 0:
                self.mtl.start_epoch(self.steps // 2 + 1, total=3)
            self.optimizer.zero_grad()
            self.mtl.backward(self.toy.closure, self.parameters)
            self.optimizer.step()
            self.mtl.after_step(self.toy.closure)
            self.steps += 1
        return self.toy.contents()

    def save(self) -> io.BytesIO:
        file = io.BytesIO()
        torch.save(
            {
                "model": self.toy.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "mtl": self.mtl.state_dict(),
                "random": torch.get_rng_state(),
            },
            file,
        )
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> None:
        state = torch.load(file, weights_only=True)
        self.toy.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.mtl.load_state_dict(state["mtl"])
        torch.set_rng_state(state["random"])
        self.steps = 3


class TestCheckpoints:
    @pytest.mark.parametrize(("name", "combine"), WAYS)
    def test_a_run_that_is_resumed_goes_on_bit_for_bit(self, name, combine):
        run, resumed = Run(name, combine), Run(name, combine)
        resumed.train(1)
        run.train(3)
        file = run.save()
        expected = run.train(3)
        resumed.load(file)
        assert_same(resumed.train(3), expected)

    @pytest.mark.parametrize("name", EVERY)
    def test_a_state_does_not_change_while_training_goes_on(self, name):
        run = Run(name, "individual")
        run.train(3)
        state = run.mtl.state_dict()
        kept = copy.deepcopy(state)
        run.train(1)
        assert_same(state, kept)

    @pytest.mark.parametrize("name", [n for n in EVERY if hasattr(aggregator(n), "state_dict")])
    def test_the_state_of_another_method_is_refused(self, name):
        mtl = FlatMTL(aggregator(name), SAM(0.1))
        other = {"branches": {"loss": {"momentum": 1.0}, "flat": {"momentum": 1.0}}, "asks_all": False}
        if name in WEIGHTINGS:
            other["branches"].pop("flat")
        with pytest.raises(ValueError, match="expected|state"):
            mtl.load_state_dict(other)

    @pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copied", "pickled"])
    @pytest.mark.parametrize("name", EVERY)
    def test_a_copy_goes_on_like_the_original(self, name, how):
        run = Run(name, "individual")
        run.train(2)
        toy, parameters, mtl, optimizer = how((run.toy, run.parameters, run.mtl, run.optimizer))
        other = Run(name, "individual")
        other.toy, other.parameters, other.mtl, other.optimizer, other.steps = toy, parameters, mtl, optimizer, 2
        torch.manual_seed(4)
        expected = run.train(2)
        torch.manual_seed(4)
        assert_same(other.train(2), expected)

    def test_a_copy_of_the_parameters_still_names_them(self):
        original = Toy()
        toy, parameters = copy.deepcopy((original, original.split()))
        toy.trunk[0].weight.requires_grad_(False)
        with pytest.raises(ValueError, match=r"'trunk.0.weight' no longer requires a gradient"):
            FlatMTL(Sum()).backward(toy.closure, parameters)


def test_the_parameters_of_a_weighting_stay_where_they_are_when_a_state_is_loaded():
    """The optimizer holds them."""
    mtl = FlatMTL(UW(tasks=3))
    before = list(mtl.parameters())
    mtl.load_state_dict(FlatMTL(UW(tasks=3)).state_dict())
    assert all(p is b for p, b in zip(mtl.parameters(), before, strict=True))
