"""One step: Algorithm 1 of Phan et al. (2025) and its variants, from the passes to ``.grad``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from flatmtl._linalg import Gramian, floats, products_with
from flatmtl.aggregators.context import Context
from flatmtl.branches import Branch, Branches
from flatmtl.gradients import Gradient, add_to_grad
from flatmtl.passes import Passes
from flatmtl.perturbations import SAM
from flatmtl.shards import memory_of
from flatmtl.stats import StepResult
from flatmtl.task import Task
from flatmtl.transfer import Transfer

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

    @property
    def ascends_by_rank(self) -> bool:
        """Whether each rank perturbs along its own gradients."""
        return self.active is not None and self.active.scope == "rank"


class Skipped(Exception):
    """The step ends without an update."""


@dataclass
class Step:
    """One step, followed line by line: the clean pass, the perturbed passes, the combination, then ``.grad``.

    What the host must know comes in one transfer after the clean pass and one after the perturbed passes. Where the
    device works by itself, the first is waited for only when task 1's perturbed pass has been given to it.
    """

    passes: Passes
    branches: Branches
    options: Options
    dropped: list[str] = field(default_factory=list[str])
    found: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    loss_gramian: Gramian | None = None
    loss_direction: Tensor | None = None
    _coming: Transfer | None = None

    def run(self) -> StepResult:
        """Return the result of the step, after adding to ``.grad``."""
        try:
            self.passes.clean(keep_own=self.options.ascends_by_rank and self.passes.ranks.send_gradients)
            if not self.passes.tasks:
                return self.result(skipped=True)
            self.look()
            direction = self.direction()
        except Skipped:
            self.passes.roll_back()
            if self.passes.scale is not None:
                self.write_overflow()
            return self.result(skipped=True)
        self.passes.finish()
        self.write(direction)
        return self.result()

    def look(self) -> None:
        """Form the Gramian of the loss gradients, and let the host know of it."""
        tasks = self.passes.tasks
        gramian = self.gramian(len(tasks))
        for task, length in zip(tasks, gramian.norms(), strict=True):
            task.length, task.head_length = length, self.passes.size(task.head)
        sizes = [task.head_length for task in tasks if task.head_length is not None]
        self._coming = Transfer([gramian.G, torch.stack([task.loss for task in tasks]), *sizes])
        self.loss_gramian = gramian
        if self._coming.is_here or not self.passes.ranks.alone:
            self.settle()

    def settle(self) -> None:
        """Act on tasks that are not finite, and aggregate the loss gradients where they are aggregated apart."""
        if self._coming is None:
            return
        tasks = self.passes.tasks
        G, losses, *sizes = self._coming.wait()
        self._coming = None
        finite: list[bool] = []
        for task, loss in zip(tasks, losses, strict=True):
            task.loss = loss
        for task, length in zip(tasks, floats(G.diagonal() + torch.stack(sizes)), strict=True):
            finite.append(self.is_finite(task, "loss", float(task.loss), length))
        assert self.loss_gramian is not None
        self.loss_gramian = Gramian(G, self.loss_gramian.scale).of(self.leave_out(finite))
        self.found["gramian_loss"] = self.loss_gramian.products()
        if self.options.active is None or self.options.combine in ("individual", "second"):
            self.aggregate_losses()

    def aggregate_losses(self) -> None:
        """Aggregate the loss gradients."""
        self.loss_direction = self.aggregate(
            "loss", self.passes.tasks, self.loss_gramian, out=self.passes.rows.direction
        )

    def leave_out(self, finite: Sequence[bool]) -> list[int]:
        """Leave out the present tasks that are not finite; return which of them stay."""
        good = [i for i, ok in enumerate(finite) if ok]
        self.passes.keep(good)
        if self.dropped and not good:
            raise Skipped
        return good

    def is_finite(self, task: Task, kind: str, loss: float, size: float) -> bool:
        """Return whether loss and gradient are finite; if not, note it and drop the task or end the step."""
        if math.isfinite(loss) and math.isfinite(size):
            return True
        if self.passes.scale is not None and math.isfinite(loss):
            raise Skipped  # the scaler's business: it lowers the scale and skips the step
        if self.options.on_nonfinite == "raise":
            value = f"is {loss:g}" + (", but its gradient is not finite" if math.isfinite(loss) else "")
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
        if perturbation is None or combine in ("direct", "each") or perturbation.local_of(weighted=False) < 1.0:
            self.settle()
        if perturbation is not None and combine in ("direct", "each"):
            self.passes.perturbed(perturbation, self.take_sam_gradient)
            return self.aggregate("loss", self.passes.tasks, out=self.passes.rows.direction)
        if perturbation is not None:
            if self._coming is not None:
                self.passes.make_finite(self.passes.tasks[0])
            self.passes.perturbed(perturbation, self.take_flat_gradient, early=self.passes.rows.subtracting)
            return self.with_flat_direction()
        assert self.loss_direction is not None
        return self.loss_direction

    def take_flat_gradient(self, task: Task, loss: Tensor, part: Gradient, head: Gradient) -> None:
        """Put the flat gradient of a task into its row; :meth:`flat_direction` looks whether it is finite."""
        self.settle()
        if task in self.passes.tasks:
            task.perturbed_loss, task.sam_head = loss, head
            product = self.passes.rows.subtract_from(self.passes.tasks.index(task), part)
            task.intra = self.passes.layout.total(product)

    def take_sam_gradient(self, task: Task, loss: Tensor, part: Gradient, head: Gradient) -> None:
        """Put the SAM gradient of a task, or the direction of its loss and flat gradient, into its row."""
        rows, i = self.passes.rows, self.passes.tasks.index(task)
        product = self.passes.layout.total(rows.inner(i, part))
        task.perturbed_loss, product, length = Transfer([loss, product, self.passes.size(head)]).wait()
        task.intra = product - self.found["gramian_loss"][i, i]
        if not self.is_finite(task, "perturbed loss", float(task.perturbed_loss), float(product + length)):
            return  # the row and the head's gradient stay the clean ones
        task.has_flat, task.head = True, head
        if self.options.combine == "direct":
            rows.write(i, part)
        else:
            g = rows.matrix[i].clone()
            rows.subtract_from(i, part)
            rows.matrix[i].copy_(self.pair(g, rows.matrix[i]))

    def with_flat_direction(self) -> Tensor:
        """Return the direction of the loss gradients and the flat gradients, which are aggregated here, together."""
        assert self.loss_direction is not None
        assert self.loss_gramian is not None
        tasks, rows = self.passes.tasks, self.passes.rows
        inter = self.passes.layout.total(products_with(rows.matrix[: len(tasks)], self.loss_direction))
        gramian = self.settle_flat(self.gramian(len(tasks)), inter)
        some = [i for i, task in enumerate(tasks) if task.has_flat]
        if not some:
            return self.loss_direction
        rows.keep(some)
        gramian, tasks = gramian.of(some), [tasks[i] for i in some]
        self.found["gramian_flat"] = self.over_all_tasks(gramian.products(), tasks)
        if self.options.combine == "second":
            return self.pair(self.loss_direction, self.aggregate("flat", tasks, gramian, out=rows.spare))
        linear = self.options.flat_scale == "linear"
        norms = self.loss_gramian.of(some).norms(), gramian.norms()
        factor = _damping(*norms, self.branches.degree) if linear else None
        return self.aggregate("flat", tasks, gramian, out=self.loss_direction, add=True, factor=factor)

    def settle_flat(self, gramian: Gramian, inter: Tensor) -> Gramian:
        """Find out which tasks have a finite flat gradient; return the Gramian on the host."""
        tasks = self.passes.tasks
        losses = [task.perturbed_loss for task in tasks if task.perturbed_loss is not None]
        products = [task.intra for task in tasks if task.intra is not None]
        sizes = [self.passes.size(task.sam_head).to(gramian.G.device) for task in tasks]
        G, found_losses, products, lengths, inter = Transfer(
            [gramian.G, torch.stack(losses), torch.stack(products), torch.stack(sizes), inter]
        ).wait()
        self.found["inter"] = self.over_all_tasks(inter, tasks)
        gramian = Gramian(G, gramian.scale)
        intra = products - gramian.products().diagonal()  # <g_sam - f, f>
        for i, task in enumerate(tasks):
            task.perturbed_loss, task.intra = found_losses[i], intra[i]
        for task, loss, bound in zip(tasks, floats(found_losses), floats(products + lengths), strict=True):
            if self.is_finite(task, "perturbed loss", loss, bound):
                task.has_flat, task.head = True, task.sam_head
        return gramian

    def aggregate(
        self,
        branch: Branch,
        tasks: Sequence[Task],
        G: Gramian | None = None,
        *,
        out: Tensor,
        add: bool = False,
        factor: float | None = None,
    ) -> Tensor:
        """Return the direction of the rows, which are those of ``tasks``; see :meth:`Branches.aggregate`."""
        J, context = self.passes.rows.matrix[: len(tasks)], context_of(tasks)
        with self.passes.between():
            d, weights = self.branches.aggregate(branch, J, G, context, out=out, add=add, factor=factor)
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
        return self.passes.layout.gramian(self.passes.rows.matrix[:count])

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
            add_to_grad(parameter, torch.full_like(memory_of(parameter), math.inf, requires_grad=False))

    def result(self, *, skipped: bool = False) -> StepResult:
        """Return the by-products of the step."""
        tasks = self.passes.tasks
        losses = (
            torch.stack([task.loss for task in tasks]) if tasks else torch.empty(0, dtype=torch.float64, device="cpu")
        )
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
            inter=self.found.get("inter"),
            sample=self.sample() if complete else None,
            dropped=tuple(dict.fromkeys(self.dropped)),
            skipped=skipped,
        )

    def sample(self) -> Tensor | None:
        """Return some entries of each task's loss gradient, NaN for tasks that are absent."""
        samples = {task.position: task.sample for task in self.passes.tasks if task.sample is not None}
        samples = {i: sample for i, sample in samples.items() if sample.numel()}  # a shard may be empty
        if not samples:
            return None
        absent = torch.full_like(next(iter(samples.values())), math.nan)
        return torch.stack([samples.get(i, absent) for i in range(len(self.passes.parameters.tasks))])

    def over_all_tasks(self, values: Tensor, tasks: Sequence[Task]) -> Tensor:
        """Return values of some tasks as a vector or matrix over all tasks, NaN for the others."""
        count = len(self.passes.parameters.tasks)
        if len(tasks) == count:
            return values.clone()  # it may be the aggregator's own memory
        places = torch.tensor([task.position for task in tasks], dtype=torch.long, device="cpu")
        out = torch.full([count] * values.ndim, math.nan, dtype=torch.float64, device="cpu")
        out[torch.meshgrid(*[places] * values.ndim, indexing="ij")] = values
        return out


def context_of(tasks: Sequence[Task]) -> Context:
    """Return what an aggregator may need to know of these tasks."""
    return Context(tuple(task.position for task in tasks), torch.stack([task.loss for task in tasks]))


def _damping(norms_loss: Tensor, norms_flat: Tensor, degree: float) -> float:
    r"""Return :math:`r^{1 - degree}`, with ``r`` the geometric mean of :math:`|f_i| / |g_i|` where neither is zero."""
    if degree == 1.0:
        return 1.0
    pairs = zip(floats(norms_loss), floats(norms_flat), strict=True)
    logs = [math.log(f) - math.log(g) for g, f in pairs if f > 0 and g > 0]
    return math.exp((1.0 - degree) * sum(logs) / len(logs)) if logs else 0.0
