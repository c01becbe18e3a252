"""Steps of loss weightings: the losses of all tasks, weighted and trained as one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

from flatmtl._linalg import floats, norm, weighted_sum
from flatmtl.gradients import Gradient, add_to_grad, gradient, reached_by, scaled
from flatmtl.passes import Passes
from flatmtl.perturbations import SAM, Part
from flatmtl.step import Skipped, Step, context_of
from flatmtl.sums import Sum
from flatmtl.task import Task
from flatmtl.transfer import Transfer


class TaskByTask(Exception):
    """The gradient of the sum is not finite; whose fault it is shows only task by task."""


@dataclass
class WeightedStep(Step):
    """A step on the weighted sum of the losses, with a row for each task.

    The weights are taken once, from the clean losses, and scale trunk and heads alike.
    """

    weights: Tensor = field(default_factory=lambda: torch.empty(0))
    own_gradients: list[tuple[Parameter, Tensor]] = field(default_factory=list[tuple[Parameter, Tensor]])

    def aggregate_losses(self) -> None:
        """Do nothing: the loss gradients of the clean pass are not aggregated apart."""

    def direction(self) -> Tensor:
        """Return the gradient of the weighted sum on the shared parameters."""
        self.settle()
        self.weigh()
        if self.options.active is not None:
            self.passes.perturbed(self.options.active, self.take_sam_gradient, self.weights)
        tasks, rows = self.passes.tasks, self.passes.rows
        for i, (task, weight) in enumerate(zip(tasks, self.weights, strict=True)):
            task.head = scaled(task.head, weight, rows.matrix.dtype)
            length = float(self.passes.size([rows.matrix[i] * weight.to(rows.matrix), *task.head]))
            if not self.is_finite(task, "weighted loss", float(task.loss * weight), length):
                raise Skipped
        self.take_own_gradients()
        return weighted_sum(rows.matrix[: len(tasks)], self.weights, out=rows.direction)

    def weigh(self) -> None:
        """Take the weights of the present tasks from their clean losses."""
        tasks = self.passes.tasks
        with self.passes.between():
            self.weights = self.branches.weigh(context_of(tasks))
        self.found["weights_loss"] = self.over_all_tasks(self.weights, tasks)

    def take_own_gradients(self) -> None:
        """Take the gradients of the weighting's own parameters."""
        scale = 1.0 if self.passes.scale is None else float(self.passes.scale)
        context = context_of(self.passes.tasks)
        found = self.branches.own_gradients(context)
        if not math.isfinite(norm(g for _, g in found)):
            raise FloatingPointError(
                f"the gradients of the parameters of {type(self.branches.aggregator).__name__} are not finite for the "
                f"losses {floats(context.losses)}; expected losses of a size that they can follow."
            )
        self.own_gradients = [(p, g.detach() * scale) for p, g in found]

    def write(self, direction: Tensor) -> None:
        """Add all gradients into ``.grad``, those of the weighting's own parameters too."""
        super().write(direction)
        for parameter, g in self.own_gradients:
            add_to_grad(parameter, g)


class SummedPasses(Passes):
    """The passes over one weighted sum of the losses, whose gradient on the shared parameters is row 0."""

    def clean(self, *, keep_own: bool = False) -> None:
        """Compute the losses, and keep their graph for :meth:`differentiate`; ``keep_own`` leaves that to this rank."""
        self.ranks.share_buffers()
        self._own_first = keep_own
        closure, names = self._closures[0], self.parameters.tasks
        self._starts.append(self._world())
        with self._agreement.on_failure():
            self._losses = self._starts[-1].run(closure, names)
        self._ends.append(self._world())
        present = self._agreement.after(0, self._losses) or list(self._losses)
        values = self._values(self._losses, present)
        self.tasks = [
            Task(name, names.index(name), [0] if name in self._losses else [], set(), value, [])
            for name, value in zip(present, values, strict=True)
        ]
        for task in self.tasks if self.ranks.send_gradients else ():
            task.count = self._agreement.count_of(task.name)
            task.loss = task.loss / task.count

    def _values(self, losses: Mapping[str, Tensor], names: Sequence[str]) -> list[Tensor]:
        """Return the losses as numbers, summed over the ranks that have them."""
        zero = torch.zeros((), dtype=torch.float64, device=self.rows.matrix.device)
        values = [self._value(losses[name]) if name in losses else zero for name in names]
        return list(self.ranks.sum(torch.stack(values))) if self.ranks.send_gradients and values else values

    def keep(self, some: Sequence[int]) -> None:
        """Leave out all present tasks but ``some``, before :meth:`differentiate`."""
        self.tasks = [self.tasks[i] for i in some]

    def differentiate(self, weights: Tensor) -> None:
        """Take the gradient of the weighted sum, the graph of which is used up then."""
        losses, self._losses = self._losses, {}
        self._take(losses, weights, alone=self._own_first)

    def perturbed_sum(self, perturbation: SAM, weights: Tensor) -> tuple[list[float], float]:
        """Take the gradient of the weighted sum at the weights perturbed along the clean one.

        Returns:
            The losses, and a number that is finite only if all gradients are.
        """
        trunk = Part(self.trunk_weights, self.rows.views(0), perturbation.rho)
        heads = [self._head(task, perturbation.rho_heads) for task in self.tasks]
        with self._keeping(trunk.weights, self.rows.places), self._perturbed_weights(perturbation, trunk, heads):
            own = [task.name for task in self.tasks if task.closures]
            losses = self._losses_again(0, own) if own else {}
            values = self._values(losses, [task.name for task in self.tasks])
            self._take(losses, weights)
        *found, length = Transfer([*values, self.size_of_gradient()]).wait()
        for task, value in zip(self.tasks, found, strict=True):
            task.perturbed_loss = value / task.count
        return [float(value) for value in found], float(length)

    def size_of_gradient(self) -> Tensor:
        """Return a number that is finite only if all gradients are."""
        return self.size([self.rows.matrix[0], *(g for task in self.tasks for g in task.head)])

    def _take(self, losses: Mapping[str, Tensor], weights: Tensor, *, alone: bool = False) -> None:
        """Put the gradient of the weighted sum into row 0 and the heads: over all ranks, or of this one ``alone``."""
        losses = {task.name: losses[task.name] for task in self.tasks if task.name in losses}  # no dropped ones
        heads = [self.parameters.heads[task.name] for task in self.tasks]
        parameters = [*self.parameters.shared, *(p for head in heads for p in head)]
        both: Gradient = [None] * len(parameters)
        if losses:
            early = self.rows.writing(0)
            both = gradient(self.layout, self._weighted(losses, weights), parameters, keep_graph=False, early=early)
        sizes = [len(self.parameters.shared), *map(len, heads)]
        part, *own = [both[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
        factor, dtype = self._inverse_scale(), self.rows.matrix.dtype
        self.rows.write(0, scaled(part, factor, dtype))
        own = [scaled(head, factor, dtype) for head in own]
        reached = reached_by(part)
        if self.ranks.send_gradients and not alone:
            reached, own = self._summed(reached, own)
        if not alone:
            self._check_reached(" and ".join(task.name for task in self.tasks), reached)
        for task, head in zip(self.tasks, own, strict=True):
            task.reached, task.head = reached, head

    def _weighted(self, losses: Mapping[str, Tensor], weights: Tensor) -> Tensor:
        """Return this rank's part of the weighted sum: each loss is a mean over the ranks that have it."""
        pairs = [(task, float(w)) for task, w in zip(self.tasks, weights, strict=True) if task.name in losses]
        with torch.enable_grad():
            terms = [_wide(losses[task.name]) * (w / task.count) for task, w in pairs]
            return self._scaled(torch.stack([term.to(terms[0].device) for term in terms]).sum())

    def _summed(self, reached: set[int], heads: Sequence[Gradient]) -> tuple[set[int], list[Gradient]]:
        """Sum row 0 and the heads over the ranks; return what is reached on any of them, and the heads' gradients."""
        owners = [p for task in self.tasks for p in self.parameters.heads[task.name]]
        found = [g for head in heads for g in head]
        zero = torch.zeros((), dtype=torch.float64, device=self.rows.matrix.device)  # the losses were sent before
        shared = len(self.parameters.shared)
        sent = Sum(self.ranks, self.rows.matrix[0], zero, reached, shared, owners, found).wait()
        reached, flat = sent.found(sent.numbers)
        gradients = iter(flat)
        return reached, [[next(gradients) for _ in head] for head in heads]


@dataclass
class SummedStep(WeightedStep):
    """A step on the weighted sum of the losses by one backward pass, and a second one at the perturbed weights.

    Raises:
        TaskByTask: from :meth:`run`, if a loss or gradient is not finite; nothing is written then.
    """

    @property
    def sum(self) -> SummedPasses:
        """The passes over the sum."""
        return cast(SummedPasses, self.passes)

    def look(self) -> None:
        """Weigh the losses and take the gradient of their sum."""
        tasks = self.sum.tasks
        for task, loss in zip(tasks, Transfer([task.loss for task in tasks]).wait(), strict=True):
            task.loss = loss
        self.leave_out([self.is_finite(task, "loss", float(task.loss), 0.0) for task in tasks])
        self.weigh()
        self.sum.differentiate(self.weights)
        self.require_finite(float(self.passes.ranks.sum(self.sum.size_of_gradient())))

    def direction(self) -> Tensor:
        """Return the gradient of the sum, at the perturbed weights if there are any."""
        if self.options.active is not None:
            losses, length = self.sum.perturbed_sum(self.options.active, self.weights)
            if not all(map(math.isfinite, losses)):
                raise TaskByTask
            self.require_finite(length)
        self.take_own_gradients()
        return self.sum.rows.matrix[0]

    def require_finite(self, length: float) -> None:
        """End the step if the gradient of the sum is not finite."""
        if math.isfinite(length):
            return
        if self.passes.scale is not None:
            raise Skipped  # the scaler's business: it lowers the scale and skips the step
        raise TaskByTask


def _wide(loss: Tensor) -> Tensor:
    """Return a loss in float32 or better: a sum of several may overflow half precision."""
    return loss.to(torch.promote_types(loss.dtype, torch.float32))
