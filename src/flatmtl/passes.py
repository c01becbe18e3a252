"""The two kinds of pass over the data: the clean one, and the perturbed ones that repeat it elsewhere."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from flatmtl._linalg import copy_each, norm, weighted_sum
from flatmtl._options import warn
from flatmtl.closures import Closure
from flatmtl.gradients import Gradient, GraphNotKept, Rows, add, gradient, reached_by, scaled
from flatmtl.parameters import TaskParameters, independent
from flatmtl.perturbations import SAM, Part, ascend, kept
from flatmtl.ranks import Ranks
from flatmtl.replay import Replay
from flatmtl.shards import Early, memory_of
from flatmtl.sums import Agreement, Sum
from flatmtl.task import Learned, Take, Task
from flatmtl.transfer import Transfer
from flatmtl.world import RandomStreams, World


class Passes:
    """The passes of one step.

    Args:
        closures: one for each micro-batch.
        parameters: who owns which parameter.
        rows: where the task gradients go.
        scaler: scales the losses, or ``None``.
        learned: what earlier steps found out, and what this one does.
        ranks: the processes whose batches are one.

    Attributes:
        layout: where the entries of the parameters are.
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
        ranks: Ranks,
    ) -> None:
        self.parameters = parameters
        self.layout = parameters.layout
        self.rows = rows
        self.learned = learned
        self.ranks = ranks
        self.tasks: list[Task] = []
        self.scale = None if scaler is None else scaler.scale(torch.ones((), device=rows.matrix.device)).double()
        self._scaler = scaler
        self._closures = closures
        self._starts: list[World] = []
        self._ends: list[World] = []
        self._between: RandomStreams | None = None
        self._kept: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        self._agreement = Agreement(ranks, parameters, closures, (learned.kind, scaler is not None), self._compared())
        self._sums: dict[Task, Sum] = {}
        self._flying: tuple[Task, Take, Sum] | None = None

    def clean(self, *, keep_own: bool = False) -> None:
        """Fill the rows with the loss gradients of the tasks that are present on any rank, averaged over the ranks.

        With ``keep_own`` this rank's own gradients are kept besides, to perturb along.
        """
        self.ranks.share_buffers()
        tasks: dict[str, Task] = {}
        for number, closure in enumerate(self._closures):
            self._clean_pass(number, closure, tasks, keep_own=keep_own)
        self.tasks = sorted(tasks.values(), key=lambda task: task.position)
        if self._sums:
            self._take_sums()
        self.rows.keep([task.position for task in self.tasks])
        for row, task in zip(self.rows.matrix, self.tasks, strict=False):
            factor = self._factor(task)
            if factor is not None:
                row.mul_(factor.to(row))
            task.head = scaled(task.head, factor, row.dtype)
            task.loss = task.loss / task.count

    def _compared(self) -> float:
        """Return the norm of all weights in the first step, in which ranks compare what they begin with; then 0."""
        if self.learned.compared or not self.ranks.send_gradients:
            return 0.0
        self.learned.compared = True
        return float(norm(self.parameters.everything))

    @cached_property
    def trunk_weights(self) -> list[Tensor]:
        """What this process holds of the shared parameters; they may move to other memory before the first pass."""
        return [memory_of(p) for p in self.parameters.shared]

    def size(self, tensors: Iterable[Tensor | None]) -> Tensor:
        """Return the norm over all entries of tensors, on all ranks: it is finite only if every entry is."""
        return self.layout.norm(t for t in tensors if t is not None)

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
        *,
        early: Callable[[int], Early] | None = None,
    ) -> None:
        """Call ``take(task, loss, part, head)`` with each task's loss and gradients at its perturbed weights.

        The task's row may be overwritten by then, and tasks may be left out by :meth:`keep`. With ``weights`` the
        perturbations are those of the weighted losses; what ``take`` gets is not weighted. A gradient on the shared
        parameters that needs no sum and no factor may go through ``early(row)`` on its way to ``take``.
        """
        own = perturbation.scope == "rank" and self.ranks.send_gradients
        J = self.rows.own[[task.position for task in self.tasks]] if own else self.rows.matrix[: len(self.tasks)]
        local = perturbation.local_of(weighted=weights is not None)
        one_for_all = local == 0.0 and (perturbation.norm == "separate" or weights is not None)
        common = None if local == 1.0 else self._common_direction(J, weights, of_sum=one_for_all)
        everyone = list(self.tasks)
        weight_of = dict.fromkeys(everyone) if weights is None else dict(zip(everyone, weights, strict=True))
        with self._keeping(self.trunk_weights, self.rows.places):
            for group in [everyone] if one_for_all else [[task] for task in everyone]:
                present = [task for task in group if task in self.tasks]
                if not present:
                    continue
                trunk = self._trunk(present[0], perturbation.rho, weight_of[present[0]], common, local, own=own)
                heads = [self._head(task, perturbation.rho_heads, weight_of[task], own=own) for task in present]
                with self._perturbed_weights(perturbation, trunk, heads):
                    self._perturbed_pass(present, take, early)
            self._land()

    def _trunk(
        self, task: Task, rho: float, weight: Tensor | None, common: Tensor | None, local: float, *, own: bool
    ) -> Part:
        """Return the shared parameters, with the direction along which a task perturbs them."""
        i = self.tasks.index(task)
        if common is None and weight is None and not own:
            return Part(self.trunk_weights, self.rows.views(i), rho, task.length)
        if common is not None and local == 0.0:
            return Part(self.trunk_weights, self.rows.unflatten(common), rho)
        row = self.rows.own[task.position] if own else self.rows.matrix[i]
        row = row if weight is None else row * weight.to(row)
        along = row if common is None else torch.lerp(common, row, local)
        return Part(self.trunk_weights, self.rows.unflatten(along), rho)

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
            ascend(perturbation, [trunk, *heads], [self.rows.places, *places], self.layout.norm)
            self.layout.drop_copies()
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
        pairs = zip(self.trunk_weights, self.rows.places, strict=True)
        moved = [w.detach() != kept for w, kept in pairs if w.dtype.itemsize < torch.float32.itemsize and w.numel()]
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
        return Replay(self.parameters, self._starts, self.ranks)

    def start_over(self) -> None:
        """Put buffers and random streams back to before the step."""
        for start in reversed(self._starts):
            start.restore()

    def roll_back(self) -> None:
        """Put weights and buffers back to before the step, and the random streams to where the clean pass left them."""
        for weights, places in self._kept:
            copy_each(places, to=weights)
        self.layout.recover()
        for start in reversed(self._starts):
            start.buffers.restore()
        if self._ends:
            self._ends[-1].streams.restore()

    def _world(self) -> World:
        return self.parameters.world(module for start in self._starts for module in start.buffers.modules)

    def _clean_pass(self, number: int, closure: Closure, tasks: dict[str, Task], *, keep_own: bool) -> None:
        """Add one closure's losses and gradients to the tasks' records and rows, and send these with the last."""
        if self._ends:
            self._ends[-1].restore()  # gradients may run forward passes, those of checkpointing for instance
        self._starts.append(self._world())
        with self._agreement.on_failure():
            losses = self._starts[-1].run(closure, self.parameters.tasks)
        self._ends.append(self._world())
        present = self._agreement.after(number, losses)
        for name, loss, last in self._each(number, list(losses), losses, present):
            if loss is not None:
                early = None if name in tasks else self.rows.writing(self.parameters.tasks.index(name))
                self._take_clean(tasks, number, name, loss, *self._gradient(name, loss, last=last, early=early))
            del loss  # and with it the graph of this task alone; no name holds a gradient longer than it is needed
            if present:
                self._send_clean(tasks, name, keep_own=keep_own)

    def _send_clean(self, tasks: dict[str, Task], name: str, *, keep_own: bool) -> None:
        """Send what this rank has of a task: zeros if it has nothing."""
        if name not in tasks:
            tasks[name] = self._absent(name)
        task = tasks[name]
        task.count = self._agreement.count_of(name)
        if keep_own:
            self._keep_own(task)
        self._sums[task] = self._sum_over_ranks(
            task, self.rows.matrix[task.position], task.loss, task.reached, task.head
        )

    def _sum_over_ranks(self, task: Task, row: Tensor, loss: Tensor, reached: set[int], head: Gradient) -> Sum:
        """Begin to sum what this rank has of a task."""
        shared, owners = len(self.parameters.shared), self.parameters.heads[task.name]
        return Sum(self.ranks, row, loss, reached, shared, owners, head)

    def _take_sums(self) -> None:
        """Put the sums over the ranks, when they are there, into the records of the tasks."""
        sums = [self._sums.pop(task).wait() for task in self.tasks]
        for task, one, numbers in zip(self.tasks, sums, Transfer([one.numbers for one in sums]).wait(), strict=True):
            task.loss = one.numbers[0]
            task.reached, task.head = one.found(numbers)
            self._check_reached(task.name, task.reached)

    def _keep_own(self, task: Task) -> None:
        """Keep this rank's own gradients of a task, means over its closures, before they become sums over the ranks."""
        own, count = self.rows.own[task.position].copy_(self.rows.matrix[task.position]), len(task.closures)
        task.own_head = task.head
        if count > 1:
            own.div_(count)
            task.own_head = [None if g is None else g / count for g in task.head]

    def _absent(self, name: str) -> Task:
        """Return a task that only other ranks have, with a row of zeros."""
        position = self.parameters.tasks.index(name)
        self.rows.matrix[position].zero_()
        zero = torch.zeros((), dtype=torch.float64, device=self.rows.matrix.device)
        return Task(name, position, [], set(), zero, [None for _ in self.parameters.heads[name]])

    def _each(
        self, number: int, names: Sequence[str], losses: dict[str, Tensor], present: Sequence[str] = ()
    ) -> Generator[tuple[str, Tensor | None, bool]]:
        """Yield each task with its loss in one closure, and whether no other will need the graph.

        Losses that are not known yet are those of one more forward pass, or each of one of its own. Tasks that are
        ``present`` on other ranks only come in their turn, without a loss.
        """
        for name in present or names:
            if name not in names:
                yield name, None, False
                continue
            if name not in losses:
                losses = self._losses_again(number, [name] if self.learned.forward_per_task else names)
            yield name, losses.pop(name), name == names[-1]
            if self.learned.forward_per_task:
                losses.clear()  # their graph is used up

    def _gradient(
        self, name: str, loss: Tensor, *, last: bool, early: Early | None = None
    ) -> tuple[Gradient, Gradient]:
        """Return the gradient of a loss on the shared parameters and on its head, scaled by the scaler."""
        shared, loss = self.parameters.shared, self._scaled(loss)
        inputs = [*shared, *self.parameters.heads[name]]
        try:
            keep = not last and not self.learned.forward_per_task
            both = gradient(self.layout, loss, inputs, keep_graph=keep, early=early)
        except GraphNotKept:
            self._give_each_task_a_forward()
            both = gradient(self.layout, loss, inputs, keep_graph=False, early=early)
        part, head = both[: len(shared)], both[len(shared) :]
        if not self.ranks.send_gradients:
            self._check_reached(name, reached_by(part))
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
        """Return a loss as a number beside the rows, in float64, and of as many ranks as its gradients are."""
        return self.layout.mean(loss.detach().to(self.rows.matrix.device, torch.float64))

    def _check_reached(self, name: str, reached: set[int]) -> None:
        """Raise if a loss reaches no shared parameter."""
        if not reached:
            raise independent(name)

    def _take_clean(
        self, tasks: dict[str, Task], number: int, name: str, loss: Tensor, part: Gradient, head: Gradient
    ) -> None:
        """Add one closure's loss and gradient to a task's record and row."""
        value, reached = self._value(loss), reached_by(part)
        if name not in tasks:
            tasks[name] = Task(name, self.parameters.tasks.index(name), [number], reached, value, head)
            self.rows.write(tasks[name].position, part)
            tasks[name].sample = self.rows.sample(tasks[name].position)
        else:
            task = tasks[name]
            task.closures.append(number)
            task.count += 1
            task.reached |= reached
            task.loss = task.loss + value
            task.head = add(task.head, head)
            self.rows.add(task.position, part)

    def _factor(self, task: Task) -> Tensor | None:
        """Return what turns a sum of scaled gradients into a mean of unscaled ones; ``None`` for one."""
        if self.scale is not None:
            return 1.0 / (self.scale * task.count)
        one = torch.ones((), dtype=torch.float64, device=self.rows.matrix.device)
        return None if task.count == 1 else one / task.count

    def _inverse_scale(self) -> Tensor | None:
        """Return what turns a scaled gradient into an unscaled one; ``None`` for one."""
        return None if self.scale is None else 1.0 / self.scale

    def _head(self, task: Task, rho: float, weight: Tensor | None = None, *, own: bool = False) -> Part:
        """Return the parameters of a head that the loss reaches, with the gradients of the weighted loss."""
        head = self.parameters.heads[task.name]
        gradients = scaled(task.own_head if own else task.head, weight, self.rows.matrix.dtype)
        pairs = [(memory_of(p), g) for p, g in zip(head, gradients, strict=True) if g is not None]
        length = task.head_length if weight is None and not own else None
        return Part([p for p, _ in pairs], [g for _, g in pairs], rho, length)

    def _perturbed_pass(self, group: Sequence[Task], take: Take, early: Callable[[int], Early] | None) -> None:
        sums: dict[str, tuple[Tensor, Gradient, Gradient]] = {}
        for number in range(len(self._closures)):
            asked = [task.name for task in group if number in task.closures]
            named = {task.name: task for task in group}
            present = list(named) if self.ranks.send_gradients and number == len(self._closures) - 1 else []
            for name, loss, last in self._each(number, asked, {}, present):
                task = named[name]
                if loss is not None:
                    value = self._value(loss)
                    own = early(self.tasks.index(task)) if early is not None and self._comes_whole(task) else None
                    sums[name] = _sum(sums.get(name), value, *self._gradient(name, loss, last=last, early=own))
                del loss
                if present:
                    self._send(task, take, sums.pop(name, None))
                elif not self.ranks.send_gradients and number == task.closures[-1]:
                    take(task, *self._mean(task, *sums.pop(name)))

    def _comes_whole(self, task: Task) -> bool:
        """Return whether one pass finds what becomes of a task's row: nothing is to be summed or multiplied."""
        return task in self.tasks and not self.ranks.send_gradients and self._factor(task) is None

    def _send(self, task: Task, take: Take, found: tuple[Tensor, Gradient, Gradient] | None) -> None:
        """Send what this rank has of a task's perturbed pass, when what was sent before has been taken."""
        self._land()
        if found is None:
            nothing: Gradient = [None for _ in (*self.parameters.shared, *self.parameters.heads[task.name])]
            shared = len(self.parameters.shared)
            zero = torch.zeros_like(task.loss, device=self.rows.matrix.device)
            found = zero, nothing[:shared], nothing[shared:]
        loss, part, head = found
        self.rows.write_into(self.rows.flight, part)
        self._flying = task, take, self._sum_over_ranks(task, self.rows.flight, loss, reached_by(part), head)

    def _land(self) -> None:
        """Wait for the sums that are on their way, if any are, and let them be taken."""
        if self._flying is not None:
            task, take, sent = self._flying
            self._flying = None
            loss, head = sent.wait().numbers[0], sent.gradients([g is not None for g in task.head])
            take(task, *self._mean(task, loss, list(self.rows.unflatten(self.rows.flight)), head))

    def _mean(self, task: Task, loss: Tensor, part: Gradient, head: Gradient) -> tuple[Tensor, Gradient, Gradient]:
        """Return means over closures of unscaled losses and gradients, from sums of scaled ones."""
        factor, dtype = self._factor(task), self.rows.matrix.dtype
        return loss / task.count, scaled(part, factor, dtype), scaled(head, factor, dtype)

    def _losses_again(self, number: int, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the losses of the tasks named, in the world that the clean pass found.

        A head that draws random numbers shifts what is drawn after it, and is noticed by where the streams
        end. Then all tasks are asked for, now and from now on.
        """
        start, closure = self._starts[number], self._closures[number]
        if not self.learned.asks_all:
            losses = start.run_again(closure, names)
            if self._streams_stand_still(number):
                return _complete(losses, names)
            self.learned.asks_all = True
        return _complete(start.run_again(closure, self.parameters.tasks), names)

    def _streams_stand_still(self, number: int) -> bool:
        """Return whether the streams stand where the clean pass left them; on all ranks, where they go in step."""
        moved = not self._ends[number].streams.stand_still()
        return not (self.ranks.most(moved, self.rows.matrix.device) if self.ranks.in_step else moved)


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
