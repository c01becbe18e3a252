"""The training loops in examples/, each beside the ordinary loop of its framework.

All is in float64, which autocast leaves alone, so that loops can be compared to rounding.
"""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning
import pytest
import timm
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from examples import accelerate_loop, amp_loop, hf_trainer, lightning_module, timm_loop
from lightning.pytorch.plugins import MixedPrecision
from tests.flatmtl.toys import assert_same
from tests.test_project import example_in
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, NativeScaler
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, default_collate
from transformers import Trainer, TrainingArguments

from flatmtl import SAM, FlatMTL, split_parameters
from flatmtl.aggregators import DWA, CAGrad, Random, Sum

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
MARKS = {"good": 0, "overflow": 29, "nan": 28}
"""What the first entry of a step's first sample is, for a gradient that overflows and for a loss that is no number."""

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")  # Lightning's own


class Infinite(torch.autograd.Function):
    """The identity, with an infinite gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return torch.full_like(g, math.inf)


@dataclass
class Run:
    """How to train, and what came of it.

    Attributes:
        mtl: what computes the gradients; ``None`` for the framework's own loop on the sum of the losses.
        scale: with which a gradient scaler begins; ``None`` for no scaler.
        accumulate: number of micro-batches of a step, which has 8 samples.
        clip: the largest norm of a gradient; all are shorter than the default, and longer than 1.
        quiet: without dropout and batch statistics.
        steps: what the steps are: one of ``MARKS``, or ``"absent"``.
        taken: gradients that the optimizer stepped by.
        skipped: number of steps that the monitor counted as skipped.
        average: weights that are averaged over steps, where the loop has such.
    """

    mtl: FlatMTL | None = None
    scale: float | None = None
    accumulate: int = 2
    clip: float = 1000.0
    quiet: bool = False
    steps: tuple[str, ...] = ("good",) * 3
    taken: list[list[Tensor]] = field(default_factory=list)
    skipped: float = 0.0
    average: dict[str, Tensor] = field(default_factory=dict)

    def begin(self, model: nn.Module, trunk: str, head: str) -> None:
        self.model = model.double()
        seen = {}

        def look(_module, arguments):
            seen["mark"] = arguments[0].flatten()[0]

        def spoil(_module, _arguments, out):
            if seen["mark"] == MARKS["overflow"]:
                return Infinite.apply(out)
            return out * math.nan if seen["mark"] == MARKS["nan"] else out

        model.get_submodule(trunk).register_forward_pre_hook(look)
        model.get_submodule(head).register_forward_hook(spoil)
        for module in [*model.modules()] if self.quiet else ():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for name, child in module.named_children():
                if isinstance(child, nn.BatchNorm1d):
                    setattr(module, name, nn.Identity())
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.optimizer.register_step_pre_hook(self.take)
        self.schedule = LambdaLR(self.optimizer, lambda n: 0.9**n)
        self.scaler = GradScaler("cpu", init_scale=self.scale or 1.0, enabled=self.scale is not None)

    def take(self, *_) -> None:
        gradients = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.taken += [gradients] if gradients else []

    def samples(self, make: Callable[[torch.Generator], dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        generator, found = torch.Generator().manual_seed(0), []
        for kind in self.steps:
            step = [make(generator) for _ in range(8)]
            if kind != "absent":
                next(iter(step[0].values())).view(-1)[0] = MARKS[kind]
                found += step
        return found

    def batches(self, make: Callable[[torch.Generator], dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        samples, size = self.samples(make), 8 // self.accumulate
        return [default_collate(samples[i : i + size]) for i in range(0, len(samples), size)]


def vector(generator: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(10, generator=generator, dtype=torch.float64)
    return {"x": x, "sum": x.sum(0, keepdim=True), "max": x.amax(0, keepdim=True), "sign": (x[1] > 0).long()}


def picture(generator: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(3, 16, 16, generator=generator, dtype=torch.float64)
    return {"x": x, **dict(zip(("red", "green"), torch.randint(2, (2,), generator=generator), strict=True))}


def words(generator: torch.Generator) -> dict[str, Tensor]:
    w = torch.randint(28, (6,), generator=generator)
    return {"input_ids": w, "first": w[1].clone(), "even": w[2] % 2}


def total(losses: dict[str, Tensor]) -> Tensor:
    return torch.stack([*losses.values()]).sum()


def amp(run: Run) -> None:
    run.begin(amp_loop.TwoHeads(), "encoder", "heads.sum")
    model, tasks, batches = run.model, [*amp_loop.LOSS], run.batches(vector)
    if run.mtl is not None:
        parameters = split_parameters(model, partial(amp_loop.losses, model, batches[0]), tasks)
        how = (run.mtl, parameters, run.optimizer, run.schedule, run.scaler)
        monitor = amp_loop.train_epoch(model, batches, *how, accumulate=run.accumulate, clip=run.clip)
        run.skipped = monitor.compute()["skipped"]
        return
    for i, batch in enumerate(batches, start=1):
        run.scaler.scale(total(amp_loop.losses(model, batch, tasks)) / run.accumulate).backward()
        if i % run.accumulate == 0:
            run.scaler.unscale_(run.optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), run.clip)
            run.scaler.step(run.optimizer)
            run.scaler.update()
            run.schedule.step()
            run.optimizer.zero_grad()


class OrdinaryModule(lightning_module.TwoHeads):
    """Without the mixin."""

    automatic_optimization = True
    on_before_optimizer_step = on_train_epoch_start = on_train_epoch_end = lambda *_: None

    def training_step(self, batch, _):
        return total(self.losses(batch, self.tasks))


def lightning_(run: Run) -> None:
    ours = run.mtl is not None
    run.begin(
        (lightning_module.TwoHeads if ours else OrdinaryModule)(run.mtl, run.accumulate, run.clip), "trunk", "heads.sum"
    )
    schedule = {"scheduler": run.schedule, "interval": "step"}
    run.model.configure_optimizers = lambda: ([run.optimizer], [schedule])
    options = {} if ours else {"accumulate_grad_batches": run.accumulate, "gradient_clip_val": run.clip}
    if run.scale is not None:
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", run.scaler)]
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"], False)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", **quiet, **options)
    trainer.fit(run.model, DataLoader(run.samples(vector), 8 // run.accumulate))
    if ours:
        run.skipped = trainer.callback_metrics["skipped"].item()


def accelerate(run: Run) -> None:
    ours = run.mtl is not None
    options = {} if ours else {"gradient_accumulation_steps": run.accumulate}
    accelerator = Accelerator(cpu=True, mixed_precision="no" if run.scale is None else "fp16", **options)
    run.begin(accelerate_loop.TwoHeads(), "encoder", "heads.sum")
    scaled(accelerator, run)
    model, optimizer, schedule = accelerator.prepare(run.model, run.optimizer, run.schedule)
    tasks, batches = [*accelerate_loop.LOSS], run.batches(vector)
    if ours:
        parameters = split_parameters(model, partial(accelerate_loop.losses, model, batches[0]), tasks)
        how = (run.mtl, parameters, model, batches, optimizer, schedule)
        monitor = accelerate_loop.train_epoch(accelerator, *how, accumulate=run.accumulate, clip=run.clip)
        run.skipped = monitor.compute()["skipped"]
        return
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(total(accelerate_loop.losses(model, batch, tasks)))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), run.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def scaled(accelerator: Accelerator, run: Run) -> None:
    """Give Accelerate a scaler, which it has on an accelerator only."""
    if run.scale is not None:
        accelerator.scaler, accelerator.native_amp = run.scaler, True


def hugging_face(run: Run) -> None:
    run.begin(hf_trainer.TwoHeads(), "encoder", "heads.first")
    how = {
        "use_cpu": True,
        "fp16": run.scale is not None,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "max_grad_norm": run.clip,
    }
    how |= {"per_device_train_batch_size": 8 // run.accumulate, "gradient_accumulation_steps": run.accumulate}
    how |= {"train_sampling_strategy": "sequential", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    given = {"train_dataset": run.samples(words), "optimizers": (run.optimizer, run.schedule)}
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, **how)
        if run.mtl is None:
            trainer = Trainer(run.model, arguments, **given)
        else:
            trainer = hf_trainer.FlatTrainer(run.model, arguments, mtl=run.mtl, tasks=["first", "even"], **given)
        scaled(trainer.accelerator, run)
        trainer.train()
    run.skipped = sum(entry.get("skipped", 0.0) for entry in trainer.state.log_history)


def timm_(run: Run) -> None:
    torch.manual_seed(0)
    name = "test_efficientnet_ln" if run.quiet else "test_efficientnet"
    trunk = timm.create_model(name, pretrained=False, num_classes=0, drop_path_rate=0.0 if run.quiet else 0.5)
    model = nn.ModuleDict({"trunk": trunk, "red": nn.Linear(256, 2), "green": nn.Linear(256, 2)})
    run.begin(model, "trunk", "red")
    schedule, _ = create_scheduler_v2(run.optimizer, num_epochs=1, step_on_epochs=False, updates_per_epoch=9)
    ema, batches, tasks = ModelEmaV3(model, decay=0.5), run.batches(picture), ["red", "green"]
    if run.mtl is not None:
        parameters, scaler = (
            split_parameters(model, partial(timm_loop.losses, model, batches[0]), tasks),
            timm_loop.FlatScaler("cpu"),
        )
        scaler._scaler = run.scaler
        how = (run.mtl, parameters, run.optimizer, schedule, scaler, ema)
        _, monitor = timm_loop.train_epoch(model, batches, *how, accumulate=run.accumulate, clip=run.clip)
        run.skipped = monitor.compute()["skipped"]
    else:
        scaler = NativeScaler("cpu")
        for i, batch in enumerate(batches, start=1):
            loss, last = total(timm_loop.losses(model, batch, tasks)) / run.accumulate, i % run.accumulate == 0
            scaler(loss, run.optimizer, clip_grad=run.clip, parameters=model.parameters(), need_update=last)
            if last:
                run.optimizer.zero_grad()
                schedule.step_update(i // run.accumulate)
                ema.update(model, step=i // run.accumulate)
    run.average = ema.module.state_dict()


LOOPS = {"plain": amp, "Lightning": lightning_, "Accelerate": accelerate, "Hugging Face": hugging_face, "timm": timm_}


def outcome(loop: str, mtl: FlatMTL | None = None, **options) -> Run:
    """Train, from the same seed each time."""
    torch.manual_seed(0)
    run = Run(mtl, **options)
    try:
        LOOPS[loop](run)
    finally:  # Accelerate's precision is the whole process's otherwise
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    return run


def assert_close(actual: Run, expected: Run) -> None:
    """The same weights, buffers and rates, to rounding."""
    found = [(r.model.state_dict(), r.average, r.optimizer.param_groups[0]["lr"]) for r in (actual, expected)]
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("loop", LOOPS)
class TestLoops:
    def test_without_flatness_the_sum_trains_as_the_frameworks_own_loop(self, loop):
        assert_close(outcome(loop, FlatMTL(Sum())), outcome(loop))

    def test_with_a_scaler_it_is_the_same_loop_and_the_scaler_counts_each_step_once(self, loop):
        mtl = FlatMTL(CAGrad(), SAM(0.05))
        run = outcome(loop, mtl, scale=2.0**20)
        assert_close(run, outcome(loop, mtl))
        assert run.scaler._get_growth_tracker() == len(run.taken) == 3

    def test_the_optimizer_steps_by_gradients_that_are_first_unscaled_and_then_clipped(self, loop):
        taken = outcome(loop, FlatMTL(CAGrad(), SAM(0.05)), scale=2.0**20, clip=1.0).taken
        norms = [torch.cat([g.flatten() for g in step]).norm().item() for step in taken]
        assert norms == pytest.approx([1.0] * 3, rel=1e-5)

    @pytest.mark.parametrize("scale", [None, 8.0], ids=["no scaler", "scaler"])
    def test_steps_that_are_skipped_are_counted_and_leave_weights_and_schedule_alone(self, loop, scale):
        mtl = FlatMTL(Sum(), on_nonfinite="skip_step")
        bad = ("overflow", "good", "nan", "good", "overflow", "good")
        left_out = tuple("good" if kind == "good" else "absent" for kind in bad)
        run, without = (outcome(loop, mtl, scale=scale, quiet=True, steps=steps) for steps in (bad, left_out))
        assert_close(run, without)
        assert (run.skipped, len(run.taken)) == (3, 3)
        assert run.scaler.get_scale() == 1.0  # halved three times

    def test_micro_batches_are_the_whole_batch(self, loop):
        mtl = FlatMTL(CAGrad(), SAM(0.05))
        assert_close(*(outcome(loop, mtl, accumulate=k, quiet=True) for k in (4, 1)))


class Runner:
    """A trainer of which only the method that returns the loss can be changed; hooks do the rest."""

    def __init__(self, optimizer: torch.optim.Optimizer, **hooks: Callable[[], object]) -> None:
        self.optimizer, self.hooks = optimizer, hooks

    def run(self, loss_of: Callable[[dict[str, Tensor]], Tensor], batches: list[dict[str, Tensor]]) -> None:
        for batch in batches:
            (loss_of(batch) / 3.0).backward()
            self.hooks["after_backward"]()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.hooks["after_step"]()


def of_the_docs(name: str) -> dict:
    names: dict = {"torch": torch}
    exec(example_in("docs/loops.md", name), names)
    return names


def test_a_trainer_that_calls_backward_itself_gets_a_loss_that_adds_nothing():
    torch.manual_seed(0)
    run, mtl = Run(accumulate=1, clip=1.0), FlatMTL(CAGrad(), SAM(0.05))
    run.begin(amp_loop.TwoHeads(), "encoder", "heads.sum")
    batches, as_loss = run.batches(vector), of_the_docs("loss")["as_loss"]
    parameters = split_parameters(run.model, partial(amp_loop.losses, run.model, batches[0]), [*amp_loop.LOSS])
    clip = partial(nn.utils.clip_grad_norm_, [*run.model.parameters()], 1.0)
    runner = Runner(run.optimizer, after_backward=clip, after_step=run.schedule.step)
    runner.run(lambda batch: as_loss(mtl.backward(partial(amp_loop.losses, run.model, batch), parameters)), batches)
    assert_close(run, outcome("plain", mtl, accumulate=1, clip=1.0))


def test_the_checkpoints_of_the_docs_hold_the_state_of_the_aggregator():
    class Module(of_the_docs("checkpoints")["FlatCheckpoints"], lightning_module.TwoHeads):
        pass

    checkpoint: dict = {}
    old, new = (Module(FlatMTL(Random(seed=seed))) for seed in (1, 2))
    old.on_save_checkpoint(checkpoint)
    new.on_load_checkpoint(checkpoint)
    J = torch.eye(3, dtype=torch.float64)
    assert_same(*(module.mtl.aggregator(J) for module in (new, old)))


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_the_mixin_steps_schedules_as_lightning_does(interval):
    found = []
    for kind in (OrdinaryModule, lightning_module.TwoHeads):
        torch.manual_seed(0)
        module = kind(FlatMTL(Sum()), accumulate=1, clip=0.0).double()
        module.trunk[-1].p = 0.0
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        schedules = [torch.optim.lr_scheduler.StepLR(optimizer, k, 0.5) for k in (2, 3)]
        module.configure_optimizers = lambda o=optimizer, s=schedules: (
            [o],
            [{"scheduler": schedule, "interval": interval} for schedule in s],
        )
        x = torch.randn(24, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        samples = [{"x": v, "sum": v.sum(0, keepdim=True), "max": v.amax(0, keepdim=True)} for v in x]
        quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"], False)
        lightning.Trainer(max_epochs=3, accelerator="cpu", **quiet).fit(module, DataLoader(samples, 8))
        found.append((optimizer.param_groups[0]["lr"], module.state_dict()))
    assert found[0][0] < 0.1
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


def test_the_callback_of_the_docs_saves_the_aggregator_and_counts_epochs(tmp_path):
    torch.manual_seed(0)
    run = Run(accumulate=2, clip=1.0)
    mtl = FlatMTL(DWA())
    how = {"use_cpu": True, "num_train_epochs": 3, "save_strategy": "steps", "save_steps": 2, "report_to": "none"}
    how |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "disable_tqdm": True}
    given = {"train_dataset": run.samples(words), "callbacks": [of_the_docs("callback")["FlatState"](mtl)]}
    arguments = TrainingArguments(str(tmp_path), **how)
    hf_trainer.FlatTrainer(hf_trainer.TwoHeads(), arguments, mtl=mtl, tasks=["first", "even"], **given).train()
    saved = sorted(tmp_path.glob("checkpoint-*/mtl.pt"))
    assert saved
    other = FlatMTL(DWA())
    other.load_state_dict(torch.load(max(saved, key=lambda path: int(path.parent.name.split("-")[1]))))
    assert_same(other.state_dict(), mtl.state_dict())


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_has_at_most_sixty_lines(example):
    assert len(example.read_text().splitlines()) <= 60


def test_two_processes_come_to_what_one_does_with_the_whole_batch():
    example = str(next(path for path in EXAMPLES if path.name == "ddp_loop.py"))
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", example]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    one, both = (
        subprocess.run(
            [sys.executable, *words], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        for words in ([example], two)
    )
    assert one.stdout.startswith("epoch 1 loss/sum")
    assert len(one.stdout.splitlines()) == 5
    assert both.stdout == one.stdout
