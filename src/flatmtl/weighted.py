"""Steps of loss weightings: the losses of all tasks, weighted and trained as one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

from flatmtl._linalg import floats, weighted_sum
from flatmtl.gradients import add_to_grad, gradient, scaled
from flatmtl.passes import Passes
from flatmtl.perturbations import SAM, Part
from flatmtl.step import Skipped, Step, context_of, size
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
            length = float(size([rows.matrix[i] * weight.to(rows.matrix), *task.head]))
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
        if not math.isfinite(size(g for _, g in found)):
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

    def clean(self) -> None:
        """Compute the losses, and keep their graph for :meth:`differentiate`."""
        closure, names = self._closures[0], self.parameters.tasks
        self._starts.append(self._world())
        self._losses = self._starts[-1].run(closure, names)
        self._ends.append(self._world())
        values = {name: self._value(loss) for name, loss in self._losses.items()}
        self.tasks = [Task(name, names.index(name), [0], set(), value, []) for name, value in values.items()]

    def keep(self, some: Sequence[int]) -> None:
        """Leave out all present tasks but ``some``, before :meth:`differentiate`."""
        self.tasks = [self.tasks[i] for i in some]

    def differentiate(self, weights: Tensor) -> None:
        """Take the gradient of the weighted sum, the graph of which is used up then."""
        losses, self._losses = self._losses, {}
        self._take(losses, weights)

    def perturbed_sum(self, perturbation: SAM, weights: Tensor) -> tuple[list[float], float]:
        """Take the gradient of the weighted sum at the weights perturbed along the clean one.

        Returns:
            The losses, and a number that is finite only if all gradients are.
        """
        trunk = Part(self.parameters.shared, self.rows.views(0), perturbation.rho)
        heads = [self._head(task, perturbation.rho_heads) for task in self.tasks]
        with self._keeping(trunk.weights, self.rows.places), self._perturbed_weights(perturbation, trunk, heads):
            losses = self._losses_again(0, [task.name for task in self.tasks])
            self._take(losses, weights)
        *values, length = Transfer([*(losses[task.name] for task in self.tasks), self.size()]).wait()
        for task, value in zip(self.tasks, values, strict=True):
            task.perturbed_loss = value
        return list(map(float, values)), float(length)

    def size(self) -> Tensor:
        """Return a number that is finite only if all gradients are."""
        return size([self.rows.matrix[0], *(g for task in self.tasks for g in task.head)])

    def _take(self, losses: Mapping[str, Tensor], weights: Tensor) -> None:
        """Put the gradient of the weighted sum into row 0 and the heads."""
        heads = [self.parameters.heads[task.name] for task in self.tasks]
        with torch.enable_grad():
            terms = [_wide(losses[task.name]) * float(w) for task, w in zip(self.tasks, weights, strict=True)]
            total = self._scaled(torch.stack([term.to(terms[0].device) for term in terms]).sum())
        parameters = [*self.parameters.shared, *(p for head in heads for p in head)]
        both = gradient(total, parameters, keep_graph=False)
        sizes = [len(self.parameters.shared), *map(len, heads)]
        part, *own = [both[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
        self._check_reached(" and ".join(losses), part)
        factor, dtype = self._factor(self.tasks[0]), self.rows.matrix.dtype
        self.rows.write(0, scaled(part, factor, dtype))
        for task, head in zip(self.tasks, own, strict=True):
            task.reached = {j for j, g in enumerate(part) if g is not None}
            task.head = scaled(head, factor, dtype)


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
        self.require_finite(float(self.sum.size()))

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
