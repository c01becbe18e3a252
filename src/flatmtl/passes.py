"""The two kinds of pass over the data: the clean one, and the perturbed ones that repeat it elsewhere."""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from flatmtl._linalg import weighted_sum
from flatmtl.aggregators.context import Context
from flatmtl.closures import Closure, evaluate
from flatmtl.gradients import Gradient, Rows, add, gradient, scaled
from flatmtl.parameters import TaskParameters
from flatmtl.perturbations import SAM, Part, perturbed
from flatmtl.world import RandomStreams, World


@dataclass
class Task:
    """What one step knows of one present task.

    Attributes:
        name: of the task.
        position: among all tasks.
        closures: numbers of the closures in which it is present.
        reached: numbers of the shared parameters that its loss reaches.
        loss: clean loss, float64 on the CPU.
        head: gradient on the task's own parameters, the clean one until that at the perturbed weights is known.
        perturbed_loss: loss at the perturbed weights.
        intra: inner product of its loss gradient and its flat gradient.
        has_flat: whether it has a finite flat gradient.
    """

    name: str
    position: int
    closures: list[int]
    reached: set[int]
    loss: Tensor
    head: Gradient
    perturbed_loss: Tensor | None = None
    intra: Tensor | None = None
    has_flat: bool = False


class Passes:
    """The passes of one step.

    Args:
        closures: one for each micro-batch.
        parameters: who owns which parameter.
        rows: where the task gradients go.
        scaler: scales the losses, or ``None``.
        asks_all: whether perturbed passes must ask for all tasks, since a head draws random numbers.

    Attributes:
        tasks: the present tasks; task ``i`` has row ``i``.
        scale: the scaler's, a float64 scalar, or ``None``.
    """

    def __init__(
        self,
        closures: Sequence[Closure],
        parameters: TaskParameters,
        rows: Rows,
        scaler: GradScaler | None,
        *,
        asks_all: bool,
    ) -> None:
        self.parameters = parameters
        self.rows = rows
        self.asks_all = asks_all
        self.tasks: list[Task] = []
        self.scale = None if scaler is None else scaler.scale(torch.ones((), device=rows.matrix.device)).double()
        self._scaler = scaler
        self._closures = closures
        self._starts: list[World] = []
        self._ends: list[World] = []
        self._between: RandomStreams | None = None

    def clean(self) -> None:
        """Fill the rows with the loss gradients of the tasks that are present."""
        tasks: dict[str, Task] = {}
        for number, closure in enumerate(self._closures):
            self._clean_pass(number, closure, tasks)
        self.tasks = sorted(tasks.values(), key=lambda task: task.position)
        self.rows.keep([task.position for task in self.tasks])
        for row, task in zip(self.rows.matrix, self.tasks, strict=False):
            factor = self._factor(task)
            if factor is not None:
                row.mul_(factor.to(row))
            task.head = scaled(task.head, factor, row.dtype)
            task.loss = task.loss / len(task.closures)

    def keep(self, some: Sequence[int]) -> None:
        """Leave out all present tasks but ``some``."""
        self.rows.keep(some)
        self.tasks = [self.tasks[i] for i in some]

    def perturbed(
        self,
        perturbation: SAM,
        take: Callable[[int, Tensor, Gradient, Gradient], None],
        weights: Tensor | None = None,
    ) -> None:
        """Call ``take(i, loss, part, head)`` with each task's loss and gradients at its perturbed weights.

        Row ``i`` may be overwritten by then. With ``weights`` the perturbations are those of the weighted losses;
        what ``take`` gets is not weighted.
        """
        J = self.rows.matrix[: len(self.tasks)]
        local = perturbation.local_of(weighted=weights is not None)
        one_for_all = local == 0.0 and (perturbation.norm == "separate" or weights is not None)
        common = None if local == 1.0 else self._common_direction(J, weights, of_sum=one_for_all)
        everyone = list(range(len(J)))
        for group in [everyone] if one_for_all else [[i] for i in everyone]:
            row = J[group[0]] if weights is None else J[group[0]] * weights[group[0]].to(J)
            along = row if common is None else torch.lerp(common, row, local)
            heads = [
                self._head(self.tasks[i], perturbation.rho_heads, None if weights is None else weights[i])
                for i in group
            ]
            with self._perturbed_weights(perturbation, along, heads):
                self._perturbed_pass(group, take)

    def _common_direction(self, J: Tensor, weights: Tensor | None, *, of_sum: bool) -> Tensor:
        """Return the mean of the rows, or the mean or the sum of the weighted rows."""
        if weights is None:
            weights, of_sum = torch.ones(len(J), dtype=torch.float64, device="cpu"), False
        return weighted_sum(J, weights if of_sum else weights / len(J))

    def _perturbed_weights(
        self, perturbation: SAM, along: Tensor, heads: Sequence[Part]
    ) -> AbstractContextManager[None]:
        """Return a context in which the trunk is perturbed along a vector, and these heads along their gradients."""
        trunk = Part(self.parameters.shared, self.rows.unflatten(along), perturbation.rho)
        places = [self.rows.places, *([torch.empty_like(w) for w in head.weights] for head in heads)]
        return perturbed(perturbation, [trunk, *heads], places)

    @contextmanager
    def between(self) -> Generator[None]:
        """Continue the random streams where the clean pass left them, and then from one such context to the next.

        What an aggregator from elsewhere draws is neither undone by a perturbed pass nor drawn again.
        """
        (self._between or self._ends[-1].streams).restore()
        yield
        self._between = RandomStreams(self.parameters.devices)

    def finish(self) -> None:
        """Leave the buffers where the clean pass left them, and the random streams where it and :meth:`between` did."""
        self._ends[-1].buffers.restore()
        (self._between or self._ends[-1].streams).restore()

    def replay(self) -> "Replay":
        """Return what it takes to see the batch again, without the batch."""
        return Replay(self.parameters, self._starts)

    def start_over(self) -> None:
        """Put buffers and random streams back to before the step."""
        for start in reversed(self._starts):
            start.restore()

    def roll_back(self) -> None:
        """Put the buffers back to before the step, and the random streams to where the clean pass left them."""
        for start in reversed(self._starts):
            start.buffers.restore()
        if self._ends:
            self._ends[-1].streams.restore()

    def _world(self) -> World:
        return self.parameters.world(module for start in self._starts for module in start.buffers.modules)

    def _clean_pass(self, number: int, closure: Closure, tasks: dict[str, Task]) -> None:
        """Add one closure's losses and gradients to the tasks' records and rows."""
        self._starts.append(self._world())
        losses = self._starts[-1].run(closure, self.parameters.tasks)
        self._ends.append(self._world())
        last = len(losses) - 1
        for i, (name, loss) in enumerate(losses.items()):  # no name holds a gradient longer than it is needed
            self._take_clean(tasks, number, name, loss, *self._gradient(name, loss, last=i == last))

    def _gradient(self, name: str, loss: Tensor, *, last: bool) -> tuple[Gradient, Gradient]:
        """Return the gradient of a loss on the shared parameters and on its head, scaled by the scaler."""
        shared = self.parameters.shared
        both = gradient(self._scaled(loss), [*shared, *self.parameters.heads[name]], keep_graph=not last)
        part, head = both[: len(shared)], both[len(shared) :]
        self._check_reached(name, part)
        return part, head

    def _scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the scaler's scale."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def _check_reached(self, name: str, part: Gradient) -> None:
        """Raise if a loss reaches no shared parameter."""
        if all(g is None for g in part):
            raise ValueError(
                f"no gradient of task {name!r} reaches any shared parameter: the tasks are independent. "
                "Check that the losses come from one forward pass and that nothing is detached (activation "
                "checkpointing detaches with use_reentrant=True: pass False)."
            )

    def _take_clean(
        self, tasks: dict[str, Task], number: int, name: str, loss: Tensor, part: Gradient, head: Gradient
    ) -> None:
        """Add one closure's loss and gradient to a task's record and row."""
        value = loss.detach().double().cpu()
        reached = {j for j, g in enumerate(part) if g is not None}
        if name not in tasks:
            tasks[name] = Task(name, self.parameters.tasks.index(name), [number], reached, value, head)
            self.rows.write(tasks[name].position, part)
        else:
            task = tasks[name]
            task.closures.append(number)
            task.reached |= reached
            task.loss = task.loss + value
            task.head = add(task.head, head)
            self.rows.add(task.position, part)

    def _factor(self, task: Task) -> Tensor | None:
        """Return what turns a sum of scaled gradients into a mean of unscaled ones; ``None`` for one."""
        count = len(task.closures)
        if self.scale is None:
            return None if count == 1 else torch.tensor(1.0 / count, dtype=torch.float64, device="cpu")
        return 1.0 / (self.scale * count)

    def _head(self, task: Task, rho: float, weight: Tensor | None = None) -> Part:
        """Return the parameters of a head that the loss reaches, with the gradients of the weighted loss."""
        own = self.parameters.heads[task.name]
        gradients = scaled(task.head, weight, self.rows.matrix.dtype)
        pairs = [(p.detach(), g) for p, g in zip(own, gradients, strict=True) if g is not None]
        return Part([p for p, _ in pairs], [g for _, g in pairs], rho)

    def _perturbed_pass(self, group: Sequence[int], take: Callable[[int, Tensor, Gradient, Gradient], None]) -> None:
        sums: dict[int, tuple[Tensor, Gradient, Gradient]] = {}
        for number in range(len(self._closures)):
            asked = [i for i in group if number in self.tasks[i].closures]
            losses = self._losses_again(number, [self.tasks[i].name for i in asked]) if asked else {}
            for i in asked:
                task = self.tasks[i]
                loss = losses[task.name]
                both = self._gradient(task.name, loss, last=i == asked[-1])
                sums[i] = _sum(sums.get(i), loss.detach().double().cpu(), *both)
                del both
                if number == task.closures[-1]:
                    take(i, *self._mean(task, *sums.pop(i)))

    def _mean(self, task: Task, loss: Tensor, part: Gradient, head: Gradient) -> tuple[Tensor, Gradient, Gradient]:
        """Return means over closures of unscaled losses and gradients, from sums of scaled ones."""
        factor, dtype = self._factor(task), self.rows.matrix.dtype
        return loss / len(task.closures), scaled(part, factor, dtype), scaled(head, factor, dtype)

    def _losses_again(self, number: int, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the losses of the tasks named, in the world that the clean pass found.

        A head that draws random numbers shifts what is drawn after it, and is noticed by where the streams
        end. Then all tasks are asked for, now and from now on.
        """
        start, closure = self._starts[number], self._closures[number]
        if not self.asks_all:
            start.restore()
            losses = evaluate(closure, names)
            if self._ends[number].streams.stand_still():
                return _complete(losses, names)
            self.asks_all = True
        start.restore()
        return _complete(evaluate(closure, self.parameters.tasks), names)


class Replay:
    """Where the clean passes of a step began, so that their losses can be seen again after the step.

    Args:
        parameters: who owns which parameter.
        starts: random streams and buffers, one for each closure.
    """

    def __init__(self, parameters: TaskParameters, starts: Sequence[World]) -> None:
        self._parameters = parameters
        self._starts = starts

    def losses(self, closures: Sequence[Closure]) -> Context:
        """Return the losses now of what the clean passes saw: from the same random streams and buffers.

        Those that are not finite are left out; the next clean pass will tell of them.

        Raises:
            ValueError: if there are more or fewer closures than there were.
        """
        if len(closures) != len(self._starts):
            raise ValueError(
                f"after_step got {len(closures)} closures; expected the {len(self._starts)} of backward, in order."
            )
        sums: dict[str, list[Tensor]] = {}
        now = self._parameters.world(module for start in self._starts for module in start.buffers.modules)
        try:
            for start, closure in zip(self._starts, closures, strict=True):
                start.restore()
                for name, loss in evaluate(closure, self._parameters.tasks).items():
                    sums.setdefault(name, []).append(loss.detach().double().cpu())
        finally:
            now.restore()
        means = {self._parameters.tasks.index(name): torch.stack(values).mean() for name, values in sums.items()}
        rows = tuple(i for i in sorted(means) if math.isfinite(means[i]))
        return Context(rows, torch.tensor([float(means[i]) for i in rows], dtype=torch.float64, device="cpu"))


def _sum(
    total: tuple[Tensor, Gradient, Gradient] | None, loss: Tensor, part: Gradient, head: Gradient
) -> tuple[Tensor, Gradient, Gradient]:
    if total is None:
        return loss, part, head
    return total[0] + loss, add(total[1], part), add(total[2], head)


def _complete(losses: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    for name in names:
        if name not in losses:
            raise ValueError(
                f"the closure returned a loss of task {name!r} in the clean pass and None in the perturbed one; "
                "expected the same tasks. Decide from the batch alone which tasks have labels."
            )
    return losses
