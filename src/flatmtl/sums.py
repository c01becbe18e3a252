"""What ranks agree on before they send anything, and the sums of what they send, in one order on all of them."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from flatmtl._linalg import floats
from flatmtl.closures import Closure
from flatmtl.gradients import Gradient
from flatmtl.parameters import TaskParameters
from flatmtl.ranks import Disagreement, Ranks, fingerprint

_COUNTS = 5
"""Where in what a rank tells the counts of its tasks begin, after the number of its closures."""


class Agreement:
    """Which tasks have a loss on any rank, told to all of them before the first gradient is sent.

    The ranks may have different tasks, and different numbers of closures. Where they talk to each other within a pass,
    as with SyncBatchNorm or a sharded model, they may not: a rank without a task's pass would answer with another's
    numbers.

    Args:
        ranks: who agree.
        parameters: which all must train.
        closures: of this rank.
        options: what all must do alike.
        weights: a number that is the same for the same weights, to be compared; 0: not now.
    """

    def __init__(
        self,
        ranks: Ranks,
        parameters: TaskParameters,
        closures: Sequence[Closure],
        options: object = None,
        weights: float = 0.0,
    ) -> None:
        self._ranks = ranks
        self._tasks = parameters.tasks
        self._device = parameters.shared[0].device
        self._last = len(closures) - 1
        self._own = dict.fromkeys(self._tasks, 0)
        self._counts: dict[str, int] = {}
        self._kind = parameters.fingerprint
        self._how = 0.0 if ranks.alone else fingerprint(options)
        self._weights = weights

    @contextmanager
    def on_failure(self) -> Generator[None]:
        """If the context raises, let the other ranks know, so that they raise too and do not wait for this one.

        Those that talk to each other within a pass may wait there, and would take the message for something else.
        """
        try:
            yield
        except BaseException:
            if not self._ranks.alone and not self._ranks.in_step:
                self._tell(failed=True)
            raise

    def after(self, number: int, losses: Mapping[str, Tensor]) -> list[str]:
        """Return the tasks that any rank has, once all its closures have run; before, or if none are sent, none.

        Raises:
            Disagreement: on all ranks, if one failed, or they do not train the same parameters or, where that is
                needed, the same tasks.
        """
        for name in losses:
            self._own[name] += 1
        if self._ranks.alone or not (number == self._last or self._ranks.in_step):
            return []
        table = self._tell(failed=False)
        self._check(table)
        self._counts = {task: int(sum(row[_COUNTS + i] for row in table)) for i, task in enumerate(self._tasks)}
        if number < self._last or not self._ranks.send_gradients:
            return []
        return [task for task, count in self._counts.items() if count]

    def count_of(self, task: str) -> int:
        """Return in how many closures a task is present, on all ranks together."""
        return self._counts[task]

    def _tell(self, *, failed: bool) -> list[list[float]]:
        counts = map(float, self._own.values())
        kinds = float(failed), self._kind, self._how, self._weights, float(self._last + 1)
        return self._ranks.table([*kinds, *counts], self._device)

    def _check(self, table: Sequence[Sequence[float]]) -> None:
        failed = [rank for rank, row in enumerate(table) if row[0]]
        if failed:
            raise Disagreement(f"the closure failed on rank {failed[0]}, so no rank does this step; see its own error.")
        if len({row[1] for row in table}) > 1:
            raise Disagreement(
                "the ranks do not have the same tasks, shared parameters and heads. Make the model and split its "
                "parameters in the same way on every rank, from a batch in which every task has labels."
            )
        if len({row[2] for row in table}) > 1:
            raise Disagreement(
                "the ranks do not do the same: aggregator, perturbation, combine, flat_scale, on_nonfinite and whether "
                "there is a scaler must be the same on every rank."
            )
        norms = [row[3] for row in table if row[3]]
        if norms and max(norms) - min(norms) > 1e-6 * max(norms):
            raise Disagreement(
                f"the ranks begin with other weights, of norms {norms}, and would keep them apart for ever. Make the "
                "model from the same seed or checkpoint on every rank, or wrap all of it in DistributedDataParallel."
            )
        if self._ranks.in_step and len({tuple(row[_COUNTS - 1 :]) for row in table}) > 1:
            present = [[task for i, task in enumerate(self._tasks) if row[_COUNTS + i]] for row in table]
            sharded = "is sharded", "wrap the model in DistributedDataParallel"
            why, instead = sharded if self._ranks.sharded else ("has SyncBatchNorm", "use BatchNorm")
            raise Disagreement(
                f"the model {why}, so all ranks must have the same tasks in as many closures, but they have {present}, "
                f"in {[int(row[_COUNTS - 1]) for row in table]} closures. Give every rank labels of every task, or "
                f"{instead}."
            )


class Sum:
    """The sum over the ranks of what each found for some tasks, on its way while the next is computed.

    Every rank sends as many in the same order; one that has nothing sends zeros.

    Args:
        ranks: who sum.
        row: gradient on the shared parameters; overwritten by its sum.
        loss: a float64 scalar.
        reached: numbers of the shared parameters that are reached here.
        shared: number of the shared parameters.
        owners: parameters of heads.
        gradients: theirs.

    Attributes:
        numbers: the loss, then for each shared parameter and each owner on how many ranks it is reached; with
            :attr:`gradients` and the row it is a sum when :meth:`wait` has returned.
    """

    def __init__(
        self,
        ranks: Ranks,
        row: Tensor,
        loss: Tensor,
        reached: set[int],
        shared: int,
        owners: Sequence[Parameter],
        gradients: Gradient,
    ) -> None:
        known = [*(j in reached for j in range(shared)), *(g is not None for g in gradients)]
        self._owners = owners
        self.numbers = torch.cat([loss.reshape(1), torch.tensor(known, dtype=torch.float64, device=loss.device)])
        pieces = [torch.zeros_like(p) if g is None else g for p, g in zip(owners, gradients, strict=True)]
        self._flat = torch.cat([row[:0], *(piece.detach().reshape(-1).to(row) for piece in pieces)])
        self._works = [ranks.start(tensor) for tensor in (row, self.numbers, self._flat) if tensor.numel()]

    def wait(self) -> "Sum":
        """Wait until all is there."""
        for work in self._works:
            work.wait()
        return self

    def gradients(self, reached: Sequence[bool]) -> Gradient:
        """Return the gradients of the owners that are reached."""
        parts = torch.split(self._flat, [p.numel() for p in self._owners])
        triples = zip(self._owners, parts, reached, strict=True)
        return [part.view(p.shape).to(p.device) if yes else None for p, part, yes in triples]

    def found(self, numbers: Tensor) -> tuple[set[int], Gradient]:
        """Return which shared parameters any rank reached, and the gradients of the owners; from :attr:`numbers`."""
        yes = [number > 0.0 for number in floats(numbers[1:])]
        shared = len(yes) - len(self._owners)
        return {j for j in range(shared) if yes[j]}, self.gradients(yes[shared:])
