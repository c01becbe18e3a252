"""How far a run is: what a checkpoint holds beside the states of model, optimizer and random streams."""

from collections.abc import Mapping
from statistics import median
from time import perf_counter
from typing import Any

from flatmtl import Monitor


class Position:
    """Finished epochs with their metrics and times, and what is known of the epoch under way.

    Attributes:
        epochs: number of finished epochs.
        steps: of the epoch after these.
        rows: the metrics of each finished epoch.
        times: the times of each finished epoch.
        monitor: the means over the steps of the epoch under way.
    """

    def __init__(self) -> None:
        self.epochs = 0
        self.rows: list[dict[str, Any]] = []
        self.times: list[dict[str, Any]] = []
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Forget the steps of the epoch before."""
        self.steps = 0
        self.monitor = Monitor()
        self._step_seconds: list[float] = []
        self._began = perf_counter()

    def end_step(self, seconds: float) -> None:
        """Count a step, and the time that it took."""
        self.steps += 1
        self._step_seconds.append(seconds)

    def end_epoch(self, row: dict[str, Any]) -> None:
        """Count the epoch and keep its metrics and times; the next one begins."""
        self.epochs += 1
        self.rows.append(row)
        seconds = perf_counter() - self._began
        self.times.append({"epoch": self.epochs, "seconds": seconds, "step_seconds": median(self._step_seconds)})
        self.begin_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return what must be saved to go on."""
        return {
            "epochs": self.epochs,
            "steps": self.steps,
            "rows": list(self.rows),
            "times": list(self.times),
            "monitor": self.monitor.state_dict(),
            "step_seconds": list(self._step_seconds),
            "seconds": perf_counter() - self._began,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where :meth:`state_dict` was called; the time between does not count."""
        self.epochs, self.steps = state["epochs"], state["steps"]
        self.rows, self.times = list(state["rows"]), list(state["times"])
        self.monitor.load_state_dict(state["monitor"])
        self._step_seconds = list(state["step_seconds"])
        self._began = perf_counter() - state["seconds"]
