"""One step: Algorithm 1 of Phan et al. (2025) and its variants, from the passes to ``.grad``."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from flatmtl._linalg import Gramian, floats, gramian, norm
from flatmtl.aggregators.context import Context
from flatmtl.branches import Branch, Branches
from flatmtl.gradients import Gradient, add_to_grad
from flatmtl.passes import Passes, Task
from flatmtl.perturbations import SAM
from flatmtl.stats import StepResult

Combine = Literal["individual", "direct", "second", "each"]
FlatScale = Literal["linear", "raw"]
OnNonfinite = Literal["raise", "drop_task", "skip_step"]


@dataclass(frozen=True)
class Options:
    """What :class:`flatmtl.FlatMTL` was told; see there."""

    perturbation: SAM | None
    combine: Combine
    flat_scale: FlatScale
    on_nonfinite: OnNonfinite

    @property
    def active(self) -> SAM | None:
        """The perturbation, ``None`` for a plain step."""
        return None if self.perturbation is None or self.perturbation.is_none else self.perturbation


class Skipped(Exception):
    """The step ends without an update."""


@dataclass
class Step:
    """One step, followed line by line: the clean pass, the perturbed passes, the combination, then ``.grad``."""

    passes: Passes
    branches: Branches
    options: Options
    dropped: list[str] = field(default_factory=list[str])
    overflow: bool = False
    found: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    loss_gramian: Gramian | None = None

    def run(self) -> StepResult:
        """Return the result of the step, after adding to ``.grad``."""
        try:
            self.passes.clean()
            self.check_clean()
            if not self.passes.tasks:
                return self.result(skipped=True)
            direction = self.direction()
        except Skipped:
            self.passes.roll_back()
            if self.overflow:
                self.write_overflow()
            return self.result(skipped=True)
        self.passes.finish()
        self.write(direction)
        return self.result()

    def check_clean(self) -> None:
        """Form the Gramian of the loss gradients, and act on tasks that are not finite."""
        tasks = self.passes.tasks
        gramian = self.gramian(len(tasks))
        sizes = [gramian.G[i, i] + size(task.head) for i, task in enumerate(tasks)]
        finite = [self.is_finite(task, "loss", task.loss, size) for task, size in zip(tasks, sizes, strict=True)]
        self.loss_gramian = gramian.of(self.leave_out(finite))
        self.found["gramian_loss"] = self.loss_gramian.products()

    def leave_out(self, finite: Sequence[bool]) -> list[int]:
        """Leave out the present tasks that are not finite; return which of them stay."""
        good = [i for i, ok in enumerate(finite) if ok]
        self.passes.keep(good)
        if self.dropped and not good:
            raise Skipped
        return good

    def is_finite(self, task: Task, kind: str, loss: Tensor, size: Tensor) -> bool:
        """Return whether loss and gradient are finite; if not, note it and drop the task or end the step."""
        if math.isfinite(loss) and math.isfinite(size):
            return True
        if self.passes.scale is not None and math.isfinite(loss):
            self.overflow = True  # the scaler's business: it lowers the scale and skips the step
            raise Skipped
        if self.options.on_nonfinite == "raise":
            value = f"is {loss.item():g}" + (", but its gradient is not finite" if math.isfinite(loss) else "")
            raise FloatingPointError(
                f"the {kind} of task {task.name!r} {value}; expected finite numbers. To leave such a task out of "
                "the step pass on_nonfinite='drop_task', to leave out the step on_nonfinite='skip_step'."
            )
        self.dropped.append(task.name)
        if self.options.on_nonfinite == "skip_step":
            raise Skipped
        return False

    def direction(self) -> Tensor:
        """Return the direction on the shared parameters."""
        perturbation, combine = self.options.active, self.options.combine
        if perturbation is None:
            return self.aggregate("loss", self.passes.tasks, self.loss_gramian)
        if combine in ("direct", "each"):
            self.passes.perturbed(perturbation, self.take_perturbed)
            return self.aggregate("loss", self.passes.tasks)
        d_loss = self.aggregate("loss", self.passes.tasks, self.loss_gramian)
        self.passes.perturbed(perturbation, self.take_perturbed)
        d_flat = self.flat_direction()
        if d_flat is None:
            return d_loss
        return self.pair(d_loss, d_flat) if combine == "second" else d_loss.add_(d_flat)

    def take_perturbed(self, i: int, loss: Tensor, part: Gradient, head: Gradient) -> None:
        """Put task ``i``'s flat gradient, or what ``combine`` makes of it, into its row."""
        task, rows = self.passes.tasks[i], self.passes.rows
        task.perturbed_loss = loss
        task.intra = rows.inner(i, part).cpu() - self.found["gramian_loss"][i, i]
        if not self.is_finite(task, "perturbed loss", loss, task.intra + size(head)):
            return  # the row and the head's gradient stay the clean ones
        task.has_flat, task.head = True, head
        if self.options.combine == "direct":
            rows.write(i, part)
        elif self.options.combine == "each":
            g = rows.matrix[i].clone()
            rows.subtract_from(i, part)
            rows.matrix[i].copy_(self.pair(g, rows.matrix[i]))
        else:
            rows.subtract_from(i, part)

    def flat_direction(self) -> Tensor | None:
        """Return the direction of the flat gradients; ``None`` if there is none."""
        some = [i for i, task in enumerate(self.passes.tasks) if task.has_flat]
        if not some:
            return None
        self.passes.rows.keep(some)
        tasks = [self.passes.tasks[i] for i in some]
        gramian = self.gramian(len(some))
        self.found["gramian_flat"] = self.over_all_tasks(gramian.products(), tasks)
        d = self.aggregate("flat", tasks, gramian)
        if self.options.combine == "individual" and self.options.flat_scale == "linear":
            assert self.loss_gramian is not None
            d.mul_(_damping(self.loss_gramian.of(some).norms(), gramian.norms(), self.branches.degree))
            self.branches.limit(d)
        return d

    def aggregate(self, branch: Branch, tasks: Sequence[Task], G: Gramian | None = None) -> Tensor:
        """Return the direction of the rows, which are those of ``tasks``."""
        J, context = self.passes.rows.matrix[: len(tasks)], context_of(tasks)
        with self.passes.between():
            d, weights = self.branches.aggregate(branch, J, G, context)
        if weights is not None:
            self.found[f"weights_{branch}"] = self.over_all_tasks(weights, tasks)
        return d

    def pair(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the direction of two vectors."""
        context = Context((0, 1), torch.ones(2, dtype=torch.float64, device="cpu"))
        with self.passes.between():
            return self.branches.aggregate("pair", torch.stack([a, b]), None, context)[0]

    def gramian(self, count: int) -> Gramian:
        """Return the Gramian of the first ``count`` rows."""
        return gramian(self.passes.rows.matrix[:count])

    def write(self, direction: Tensor) -> None:
        """Add the direction and the heads' gradients into ``.grad``."""
        passes, parameters = self.passes, self.passes.parameters
        shared = enumerate(zip(parameters.shared, passes.rows.unflatten(direction), strict=True))
        reached = {j for task in passes.tasks for j in task.reached}
        pairs: list[tuple[Parameter, Tensor | None]] = [pair for j, pair in shared if j in reached]
        for task in passes.tasks:
            pairs += zip(parameters.heads[task.name], task.head, strict=True)
        for parameter, g in pairs:
            if g is not None:
                add_to_grad(parameter, g if passes.scale is None else g * passes.scale.to(g))

    def write_overflow(self) -> None:
        """Leave every gradient infinite, so that the scaler skips the step of whichever optimizer holds it."""
        for parameter in [*self.passes.parameters.everything, *self.branches.parameters()]:
            add_to_grad(parameter, torch.full_like(parameter, math.inf, requires_grad=False))

    def result(self, *, skipped: bool = False) -> StepResult:
        """Return the by-products of the step."""
        tasks = self.passes.tasks
        losses = torch.stack([task.loss for task in tasks]) if tasks else torch.empty(0, device="cpu")
        perturbed = [task.perturbed_loss for task in tasks if task.perturbed_loss is not None]
        intra = [task.intra for task in tasks if task.intra is not None]
        complete = len(perturbed) == len(tasks) > 0
        G = self.found.get("gramian_loss")
        return StepResult(
            tasks=self.passes.parameters.tasks,
            losses=self.over_all_tasks(losses, tasks),
            perturbed_losses=self.over_all_tasks(torch.stack(perturbed), tasks) if complete else None,
            weights_loss=self.found.get("weights_loss"),
            weights_flat=self.found.get("weights_flat"),
            gramian_loss=None if G is None else self.over_all_tasks(G, tasks),
            gramian_flat=self.found.get("gramian_flat"),
            intra=self.over_all_tasks(torch.stack(intra), tasks) if complete and intra else None,
            dropped=tuple(dict.fromkeys(self.dropped)),
            skipped=skipped,
        )

    def over_all_tasks(self, values: Tensor, tasks: Sequence[Task]) -> Tensor:
        """Return values of some tasks as a vector or matrix over all tasks, NaN for the others."""
        places = torch.tensor([task.position for task in tasks], dtype=torch.long, device="cpu")
        out = torch.full([len(self.passes.parameters.tasks)] * values.ndim, math.nan, dtype=torch.float64, device="cpu")
        out[torch.meshgrid(*[places] * values.ndim, indexing="ij")] = values.double().cpu()
        return out


def context_of(tasks: Sequence[Task]) -> Context:
    """Return what an aggregator may need to know of these tasks."""
    return Context(tuple(task.position for task in tasks), torch.stack([task.loss for task in tasks]))


def size(tensors: Iterable[Tensor | None]) -> Tensor:
    """Return a number that is finite only if every tensor is."""
    return norm(t for t in tensors if t is not None).cpu()


def _damping(norms_loss: Tensor, norms_flat: Tensor, degree: float) -> float:
    r"""Return :math:`r^{1 - degree}`, with ``r`` the geometric mean of :math:`|f_i| / |g_i|` where neither is zero."""
    if degree == 1.0:
        return 1.0
    pairs = zip(floats(norms_loss), floats(norms_flat), strict=True)
    logs = [math.log(f) - math.log(g) for g, f in pairs if f > 0 and g > 0]
    return math.exp((1.0 - degree) * sum(logs) / len(logs)) if logs else 0.0
