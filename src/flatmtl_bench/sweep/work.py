"""What the processes of a sweep do with a run: check it, and train it in its folder."""

import signal
import threading
import traceback
from dataclasses import dataclass, replace
from typing import Literal

from flatmtl_bench.commands.training import Run
from flatmtl_bench.protocols import Row
from flatmtl_bench.runs import RunFolder

State = Literal["waiting", "running", "finished", "failed", "in use", "stopped"]

_told_to_stop = threading.Event()


@dataclass(frozen=True)
class Outcome:
    """How a run stands, and why if that is not clear."""

    state: State
    message: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.message}" if self.message else self.state


def stop_at(number: signal.Signals) -> None:
    """Let a signal stop the run of this process after its step, and every later one before its first.

    The process lives on: were it to die, the pool would kill the others too before they have saved.
    """
    signal.signal(number, lambda _number, _frame: _told_to_stop.set())


def prepare(run: Run) -> tuple[Run, Outcome]:
    """Check all that can be known before a run is trained: its config, its data and its folder.

    Returns the run with the source of the data that ``auto`` came to, and how it stands.

    Raises:
        ValueError, OSError: the run cannot be trained like this, or was finished with other data.
    """
    from flatmtl_bench.trainer import Trainer  # noqa: PLC0415  (seconds, which the parent does not need)

    trainer = Trainer(run.config)
    run = replace(run, config=trainer.config)
    try:
        resume = run.resume or not run.overwrite
        with RunFolder(run.out, run.config, resume=resume, overwrite=run.overwrite) as folder:
            if not folder.finished:
                return run, Outcome("waiting")
            trainer.provenance.check_result(folder)
            return run, Outcome("finished")
    except BlockingIOError as error:
        return run, Outcome("in use", str(error))


def train(run: Run) -> Outcome:
    """Train a run to its end, going on where it stopped; a failure is recorded in its folder and returned."""
    if _told_to_stop.is_set():
        return Outcome("stopped")
    try:
        with RunFolder(run.out, run.config, resume=True) as folder:
            return Outcome("finished") if folder.finished else _fit(run, folder)
    except BlockingIOError as error:
        return Outcome("in use", str(error))
    except Exception as error:  # one run must not stop the others, whatever is wrong with its folder
        return _failed(error)


def _fit(run: Run, folder: RunFolder) -> Outcome:
    from flatmtl_bench.trainer import Stopped, Trainer  # noqa: PLC0415  (seconds, which the parent does not need)

    def watch(_done: int, _total: int, _row: Row | None) -> None:
        if _told_to_stop.is_set():
            trainer.stop()

    try:
        trainer = Trainer(run.config)
        trainer.fit(folder, watch, **run.saving)
    except Stopped:
        return Outcome("stopped")
    except Exception as error:
        folder.write_error(traceback.format_exc())
        return _failed(error)
    return Outcome("finished")


def record_death(run: Run, death: Exception) -> Outcome:
    """Record that the process of a run has ended without a word."""
    with RunFolder(run.out, run.config, resume=True) as folder:
        folder.write_error(f"{death}\n")
    return _failed(death)


def _failed(error: Exception) -> Outcome:
    return Outcome("failed", f"{type(error).__name__}: {error}")
