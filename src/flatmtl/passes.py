"""The two kinds of pass over the data: the clean one, and the perturbed ones that repeat it elsewhere."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from flatmtl._linalg import copy_each, weighted_sum
from flatmtl._options import warn
from flatmtl.closures import Closure
from flatmtl.gradients import Gradient, GraphNotKept, Rows, add, gradient, scaled
from flatmtl.parameters import TaskParameters, independent
from flatmtl.perturbations import SAM, Part, ascend, kept
from flatmtl.replay import Replay
from flatmtl.task import Learned, Take, Task
from flatmtl.world import RandomStreams, World


class Passes:
    """The passes of one step.

    Args:
        closures: one for each micro-batch.
        parameters: who owns which parameter.
        rows: where the task gradients go.
        scaler: scales the losses, or ``None``.
        learned: what earlier steps found out, and what this one does.

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
        learned: Learned,
    ) -> None:
        self.parameters = parameters
        self.rows = rows
        self.learned = learned
        self.tasks: list[Task] = []
        self.scale = None if scaler is None else scaler.scale(torch.ones((), device=rows.matrix.device)).double()
        self._scaler = scaler
        self._closures = closures
        self._starts: list[World] = []
        self._ends: list[World] = []
        self._between: RandomStreams | None = None
        self._kept: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []

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

    def make_finite(self, task: Task) -> None:
        """Put zeros for what is not finite in gradients that the host has not seen: no closure is to run at NaN."""
        self.rows.matrix[self.tasks.index(task)].nan_to_num_(0.0, 0.0, 0.0)
        task.head = [None if g is None else g.nan_to_num(0.0, 0.0, 0.0) for g in task.head]

    def perturbed(
        self,
        perturbation: SAM,
        take: Take,
        weights: Tensor | None = None,
    ) -> None:
        """Call ``take(task, loss, part, head)`` with each task's loss and gradients at its perturbed weights.

        The task's row may be overwritten by then, and tasks may be left out by :meth:`keep`. With ``weights`` the
        perturbations are those of the weighted losses; what ``take`` gets is not weighted.
        """
        J = self.rows.matrix[: len(self.tasks)]
        local = perturbation.local_of(weighted=weights is not None)
        one_for_all = local == 0.0 and (perturbation.norm == "separate" or weights is not None)
        common = None if local == 1.0 else self._common_direction(J, weights, of_sum=one_for_all)
        everyone = list(self.tasks)
        weight_of = dict.fromkeys(everyone) if weights is None else dict(zip(everyone, weights, strict=True))
        with self._keeping(self.parameters.shared, self.rows.places):
            for group in [everyone] if one_for_all else [[task] for task in everyone]:
                present = [task for task in group if task in self.tasks]
                if not present:
                    continue
                trunk = self._trunk(present[0], perturbation.rho, weight_of[present[0]], common, local)
                heads = [self._head(task, perturbation.rho_heads, weight_of[task]) for task in present]
                with self._perturbed_weights(perturbation, trunk, heads):
                    self._perturbed_pass(present, take)

    def _trunk(self, task: Task, rho: float, weight: Tensor | None, common: Tensor | None, local: float) -> Part:
        """Return the shared parameters, with the direction along which a task perturbs them."""
        i = self.tasks.index(task)
        if common is None and weight is None:
            return Part(self.parameters.shared, self.rows.views(i), rho, task.length)
        if common is not None and local == 0.0:
            return Part(self.parameters.shared, self.rows.unflatten(common), rho)
        row = self.rows.matrix[i] if weight is None else self.rows.matrix[i] * weight.to(self.rows.matrix)
        along = row if common is None else torch.lerp(common, row, local)
        return Part(self.parameters.shared, self.rows.unflatten(along), rho)

    def _common_direction(self, J: Tensor, weights: Tensor | None, *, of_sum: bool) -> Tensor:
        """Return the mean of the rows, or the mean or the sum of the weighted rows."""
        if weights is None:
            weights, of_sum = torch.ones(len(J), dtype=torch.float64, device="cpu"), False
        return weighted_sum(J, weights if of_sum else weights / len(J))

    @contextmanager
    def _perturbed_weights(self, perturbation: SAM, trunk: Part, heads: Sequence[Part]) -> Generator[None]:
        """Perturb a trunk, which is kept already, and heads, which are put back after this context."""
        places = [[torch.empty_like(w) for w in head.weights] for head in heads]
        with self._keeping([w for head in heads for w in head.weights], [p for place in places for p in place]):
            ascend(perturbation, [trunk, *heads], [self.rows.places, *places])
            if self.learned.unmoved is None:
                self._look_at_half_precision()
            yield

    @contextmanager
    def _keeping(self, weights: Sequence[Tensor], places: Sequence[Tensor]) -> Generator[None]:
        """Keep weights as :func:`kept` does; :meth:`roll_back` puts them back if a signal comes when that is to."""
        with kept(weights, places):
            self._kept.append((weights, places))
            yield
        self._kept.pop()

    def _look_at_half_precision(self) -> None:
        """Say how many of the perturbed weights did not move, if any are kept in half precision."""
        pairs = zip(self.parameters.shared, self.rows.places, strict=True)
        moved = [w.detach() != kept for w, kept in pairs if w.dtype.itemsize < torch.float32.itemsize]
        if not moved:
            return
        share = 1.0 - sum(int(m.sum()) for m in moved) / sum(m.numel() for m in moved)
        self.learned.unmoved = share
        if share < 0.01:  # entries without a gradient rest as well
            return
        warn(
            f"the perturbation is lost on {share:.2%} of the shared weights that are kept in half precision: they are "
            "too coarse to move by so little. Keep the weights in float32 and run the model under torch.autocast."
        )

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

    def replay(self) -> Replay:
        """Return what it takes to see the batch again, without the batch."""
        return Replay(self.parameters, self._starts)

    def start_over(self) -> None:
        """Put buffers and random streams back to before the step."""
        for start in reversed(self._starts):
            start.restore()

    def roll_back(self) -> None:
        """Put weights and buffers back to before the step, and the random streams to where the clean pass left them."""
        for weights, places in self._kept:
            copy_each(places, to=weights)
        for start in reversed(self._starts):
            start.buffers.restore()
        if self._ends:
            self._ends[-1].streams.restore()

    def _world(self) -> World:
        return self.parameters.world(module for start in self._starts for module in start.buffers.modules)

    def _clean_pass(self, number: int, closure: Closure, tasks: dict[str, Task]) -> None:
        """Add one closure's losses and gradients to the tasks' records and rows."""
        if self._ends:
            self._ends[-1].restore()  # gradients may run forward passes, those of checkpointing for instance
        self._starts.append(self._world())
        losses = self._starts[-1].run(closure, self.parameters.tasks)
        self._ends.append(self._world())
        for name, loss, last in self._each(number, list(losses), losses):
            self._take_clean(tasks, number, name, loss, *self._gradient(name, loss, last=last))
            del loss  # and with it the graph of this task alone; no name holds a gradient longer than it is needed

    def _each(
        self, number: int, names: Sequence[str], losses: dict[str, Tensor]
    ) -> Generator[tuple[str, Tensor, bool]]:
        """Yield each task with its loss in one closure, and whether no other will need the graph.

        Losses that are not known yet are those of one more forward pass, or each of one of its own.
        """
        for name in names:
            if name not in losses:
                losses = self._losses_again(number, [name] if self.learned.forward_per_task else names)
            yield name, losses.pop(name), name == names[-1]
            if self.learned.forward_per_task:
                losses.clear()  # their graph is used up

    def _gradient(self, name: str, loss: Tensor, *, last: bool) -> tuple[Gradient, Gradient]:
        """Return the gradient of a loss on the shared parameters and on its head, scaled by the scaler."""
        shared, loss = self.parameters.shared, self._scaled(loss)
        inputs = [*shared, *self.parameters.heads[name]]
        try:
            both = gradient(loss, inputs, keep_graph=not last and not self.learned.forward_per_task)
        except GraphNotKept:
            self._give_each_task_a_forward()
            both = gradient(loss, inputs, keep_graph=False)
        part, head = both[: len(shared)], both[len(shared) :]
        self._check_reached(name, part)
        return part, head

    def _give_each_task_a_forward(self) -> None:
        """Run a forward pass for each task from now on, and say what that costs."""
        self.learned.forward_per_task = True
        warn(
            "a function that was compiled before this call donates its buffers, so its graph serves one task only. "
            f"From now on each of the {len(self.parameters.tasks)} tasks gets a forward pass of its own; the numbers "
            "are the same. To share one pass again set torch._functorch.config.donated_buffer = False before anything "
            "is compiled."
        )

    def _scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the scaler's scale."""
        with torch.enable_grad():
            return loss if self._scaler is None else self._scaler.scale(loss)

    def _value(self, loss: Tensor) -> Tensor:
        """Return a loss as a number beside the rows, in float64."""
        return loss.detach().to(self.rows.matrix.device, torch.float64)

    def _check_reached(self, name: str, part: Gradient) -> None:
        """Raise if a loss reaches no shared parameter."""
        if all(g is None for g in part):
            raise independent(name)

    def _take_clean(
        self, tasks: dict[str, Task], number: int, name: str, loss: Tensor, part: Gradient, head: Gradient
    ) -> None:
        """Add one closure's loss and gradient to a task's record and row."""
        value = self._value(loss)
        reached = {j for j, g in enumerate(part) if g is not None}
        if name not in tasks:
            tasks[name] = Task(name, self.parameters.tasks.index(name), [number], reached, value, head)
            self.rows.write(tasks[name].position, part)
            tasks[name].sample = self.rows.sample(tasks[name].position)
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
            return (
                None if count == 1 else torch.full((), 1.0 / count, dtype=torch.float64, device=self.rows.matrix.device)
            )
        return 1.0 / (self.scale * count)

    def _head(self, task: Task, rho: float, weight: Tensor | None = None) -> Part:
        """Return the parameters of a head that the loss reaches, with the gradients of the weighted loss."""
        own = self.parameters.heads[task.name]
        gradients = scaled(task.head, weight, self.rows.matrix.dtype)
        pairs = [(p, g) for p, g in zip(own, gradients, strict=True) if g is not None]
        length = task.head_length if weight is None else None
        return Part([p for p, _ in pairs], [g for _, g in pairs], rho, length)

    def _perturbed_pass(self, group: Sequence[Task], take: Take) -> None:
        sums: dict[Task, tuple[Tensor, Gradient, Gradient]] = {}
        for number in range(len(self._closures)):
            asked = {task.name: task for task in group if number in task.closures}
            for name, loss, last in self._each(number, list(asked), {}):
                task, value = asked[name], self._value(loss)
                sums[task] = _sum(sums.get(task), value, *self._gradient(name, loss, last=last))
                del loss
                if number == task.closures[-1]:
                    take(task, *self._mean(task, *sums.pop(task)))

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
        if not self.learned.asks_all:
            losses = start.run_again(closure, names)
            if self._ends[number].streams.stand_still():
                return _complete(losses, names)
            self.learned.asks_all = True
        return _complete(start.run_again(closure, self.parameters.tasks), names)


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
                f"the closure returned a loss of task {name!r} in the clean pass and None when it was called again; "
                "expected the same tasks. Decide from the batch alone which tasks have labels."
            )
    return losses
