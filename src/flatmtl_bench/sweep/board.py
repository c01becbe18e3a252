"""What a sweep shows on standard error while it trains."""

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from flatmtl_bench.commands.training import Run
from flatmtl_bench.output import say
from flatmtl_bench.progress import accuracies, epoch_line
from flatmtl_bench.protocols import Row
from flatmtl_bench.runs import METRICS
from flatmtl_bench.sweep.work import Outcome, State

ORDER: tuple[State, ...] = ("failed", "in use", "running", "stopped", "finished", "waiting")
"""Of the lines: those come first that a user must know of."""


class Board:
    """How the runs of a sweep stand, read from their folders.

    Attributes:
        runs: by name.
        outcomes: of the runs that are not waiting or running any more, by name.
    """

    def __init__(self, runs: Mapping[str, Run], outcomes: Mapping[str, Outcome]) -> None:
        self.runs = dict(runs)
        self.outcomes = dict(outcomes)
        self._begun = {name: self._beginning(name) for name in runs}
        self._told: dict[str, tuple[State, int]] = {}

    def path(self, name: str) -> Path:
        """Return the folder of a run."""
        return Path(self.runs[name].out) / name

    def _beginning(self, name: str) -> int | None:
        """Return when the training of a run has last begun, by the clock of its file system."""
        path = self.path(name) / "env.json"
        return path.stat().st_mtime_ns if path.exists() else None

    def record(self, name: str, outcome: Outcome) -> None:
        """Take note of what a run came to."""
        if outcome.state == "finished" and not self.finished(name):
            where = f"{self.path(name).absolute()} of the machine that trained it, which is not that of this machine"
            outcome = Outcome("failed", f"its result is in {where}. Choose an --out that all machines share.")
        self.outcomes[name] = outcome

    def outcome(self, name: str) -> Outcome:
        """Return how a run stands: it is running if its training has begun since the sweep has."""
        if name in self.outcomes:
            return self.outcomes[name]
        return Outcome("waiting" if self._beginning(name) == self._begun[name] else "running")

    def finished(self, name: str) -> bool:
        """Whether a run has its result, whoever has trained it."""
        return (self.path(name) / "summary.json").exists()

    def last_row(self, name: str) -> Row | None:
        """Return the metrics of the last epoch of a run, if one is finished."""
        path = self.path(name) / METRICS
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return json.loads(lines[-1]) if lines else None

    def table(self, height: int) -> Table:
        """Return a table of at most so many lines."""
        outcomes = sorted(((name, self.outcome(name)) for name in self.runs), key=lambda o: ORDER.index(o[1].state))
        counts = Counter(outcome.state for _, outcome in outcomes)
        table = Table("run", "state", "epoch", "accuracy", box=None)
        table.title = f"{len(outcomes)} runs: " + ", ".join(
            f"{counts[state]} {state}" for state in ORDER if counts[state]
        )
        for name, outcome in outcomes[: max(1, height - 4)]:
            row = None if outcome.state == "waiting" else self.last_row(name)
            table.add_row(name, outcome.state, *self._progress(name, row))
        return table

    def _progress(self, name: str, row: Row | None) -> tuple[str, str]:
        return ("", "") if row is None else (f"{row['epoch']}/{self.runs[name].config.epochs}", accuracies(row))

    def news(self) -> Iterator[str]:
        """Yield a line for each run that is in another state or epoch than at the last call."""
        for name in self.runs:
            outcome = self.outcome(name)
            row = self.last_row(name) if outcome.state == "running" else None
            stand = outcome.state, row["epoch"] if row else 0
            if outcome.state != "waiting" and self._told.get(name) != stand:
                self._told[name] = stand
                yield f"{name}: {epoch_line(row) if row else outcome}"


@contextmanager
def shown(board: Board) -> Iterator[None]:
    """Within it the board is shown: as a table that changes on a terminal, else as a line for each change."""
    console = Console(stderr=True)
    if console.is_terminal:
        with Live(
            get_renderable=lambda: board.table(console.height), console=console, refresh_per_second=1, transient=True
        ):
            yield
        return
    ended = threading.Event()
    teller = threading.Thread(target=_tell, args=(board, ended))
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


def _tell(board: Board, ended: threading.Event) -> None:
    while True:
        last = ended.wait(0.5)
        for line in board.news():
            say(line)
        if last:
            return
