"""What a run leaves behind: rank 0 alone reads and writes it, and every rank learns what came of it."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from lightning.fabric import Fabric

from flatmtl import Monitor, StepResult
from flatmtl_bench.checkpoints import Checkpoints, save_snapshot
from flatmtl_bench.environment import environment
from flatmtl_bench.loggers import Logs
from flatmtl_bench.ranks import from_rank_zero
from flatmtl_bench.runs import TIMES, RunFolder

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _on_rank_zero(
    method: "Callable[Concatenate[Record, RunFolder, Arguments], Result]",
) -> "Callable[Concatenate[Record, Arguments], Result]":
    """Let rank 0 do it with its folder; every rank gets what it returns, or the mistake that it raises.

    It is a mistake if the folder is no longer that of this process.
    """

    @wraps(method)
    def shared(record: "Record", *arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        def do() -> Result:
            record.folder.check_held()
            return method(record, record.folder, *arguments, **options)

        return from_rank_zero(record.fabric, do)

    return shared


class Record:
    """The files of a run. Every method is called by all ranks.

    Use it as a context manager, which closes the logs.

    Args:
        fabric: knows the ranks.
        folder: of the run; None on all ranks but 0.
        loggers: names of those who are told the metrics, too.
        keep_every: epochs between snapshots of the weights; 0: there are none.
        log_every: steps between points of the live log; 0: there is none.
    """

    def __init__(
        self, fabric: Fabric, folder: RunFolder | None, loggers: Sequence[str], keep_every: int, log_every: int
    ) -> None:
        self.fabric = fabric
        self.folder: Any = folder  # rank 0 has one
        self.keep_every = keep_every
        self.log_every = log_every
        self._lately = Monitor()
        self._loggers = loggers
        self._logs: Logs | None = None

    @_on_rank_zero
    def last_checkpoint(self, folder: RunFolder) -> tuple[str, dict[str, Any]] | None:
        """Return the name of the last whole checkpoint and what it holds; None for a run that has not begun.

        Raises:
            RunError: what is there is broken, or there are metrics without a checkpoint.
        """
        found = Checkpoints(folder.path).newest()
        if found is None:
            folder.check_fresh()
            return None
        path, state = found
        return str(path), state

    @_on_rank_zero
    def begin(
        self, folder: RunFolder, rows: Sequence[Mapping[str, Any]], times: Sequence[Mapping[str, Any]], steps: int
    ) -> None:
        """Let the files say what a checkpoint says of finished epochs and steps; they may have been torn apart."""
        folder.write_environment({**environment(), "ranks": self.fabric.world_size})
        folder.write_rows(rows)
        folder.write_rows(times, TIMES)
        self._logs = Logs(self._loggers, folder.path, rows, steps if self.log_every else None)

    def step(self, result: StepResult, number: int) -> None:
        """Take in a step; after every ``log_every`` the live log gets the means of what they told."""
        if not self.log_every:
            return
        self._lately.update(result)
        if number % self.log_every == 0:
            self._show(self._lately.compute(), number)
            self._lately.reset()

    @_on_rank_zero
    def _show(self, _folder: RunFolder, values: Mapping[str, float], number: int) -> None:
        if self._logs is not None:
            self._logs.show(values, number)

    @_on_rank_zero
    def save(self, folder: RunFolder, state: Mapping[str, Any], epochs: int, steps: int, best: int | None) -> None:
        """Write a checkpoint; see :meth:`Checkpoints.save`."""
        Checkpoints(folder.path).save(state, epochs, steps, best)

    @_on_rank_zero
    def keep(self, folder: RunFolder, weights: Mapping[str, Any], epoch: int) -> None:
        """Write a snapshot of the weights if it is the turn of this epoch."""
        if self.keep_every and epoch % self.keep_every == 0:
            save_snapshot(folder.path, weights, epoch)

    @_on_rank_zero
    def append(self, folder: RunFolder, row: Mapping[str, Any], time: Mapping[str, Any]) -> None:
        """Add the metrics and the times of one more epoch."""
        folder.append(row)
        folder.append(time, TIMES)
        if self._logs is not None:
            self._logs.append(row)

    @_on_rank_zero
    def finish(self, folder: RunFolder, summary: Mapping[str, Any]) -> None:
        """Write the result; the run is finished."""
        folder.finish(summary)

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if self._logs is not None:
            self._logs.close("success" if kind is None else "failed")
