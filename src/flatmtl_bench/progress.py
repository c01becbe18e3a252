"""What a run shows on standard error while it trains."""

from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

Row = Mapping[str, Any]
REFRESH = 0.2
"""Seconds for which numbers stand still, so that showing them costs nothing."""


def training_bars(console: Console | None = None) -> Progress:
    """Return bars with a title, how much is done, the field ``state`` and the time left; they fit 80 columns."""
    return Progress(
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", max_width=18)),
        BarColumn(bar_width=8),
        TaskProgressColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
        console=console or Console(stderr=True),
        speed_estimate_period=600.0,  # evaluation and slow steps lie between updates
    )


class RunBar:
    """The bar of one run: loss and conflict share of the epoch under way, accuracy of the one before, time left.

    It is called with the steps done, all steps of the run, and the metrics of an epoch that has just ended, else None.

    Args:
        bars: where it is shown.
        title: of the run.
        means: returns the means over the steps of the epoch under way.
    """

    def __init__(self, bars: Progress, title: str, means: Callable[[], Row]) -> None:
        self._bars = bars
        self._bar = bars.add_task(title, total=None, state="")
        self._means = means
        self._last: Row | None = None
        self._shown = 0.0

    def __call__(self, done: int, total: int, row: Row | None) -> None:
        """Show how far the run is."""
        if not self._shown:  # steps that an earlier process has done say nothing of the time left
            self._bars.reset(self._bar, completed=done - 1, total=total)
        if row is not None:
            self._last = row
            self._bars.update(self._bar, completed=done, state=state(row))
        elif monotonic() - self._shown > REFRESH:
            running = {f"train/{name}": value for name, value in self._means().items()}
            self._bars.update(self._bar, completed=done, state=state({**(self._last or {}), **running}))
        else:
            return
        self._shown = monotonic()


def state(row: Row) -> str:
    """Return loss, accuracy and conflict share in 38 columns or less, those that there are.

    Example:
        >>> state({"train/loss/left": 1.0, "train/loss/right": 2.0, "test/accuracy": 0.5, "train/conflict": 0.25})
        'loss 1.500  test 50.0%  conflict 25%'
    """
    return "  ".join(part for part in (_loss(row), accuracies(row, ["test"]), _conflict(row)) if part)


def accuracies(row: Row, splits: Sequence[str] = ("validation", "test")) -> str:
    """Return the accuracies of one epoch, or where tasks of other kinds have none, its scores."""
    return "  ".join(text for split in splits if (text := _quality(row, split)))


def _quality(row: Row, split: str) -> str:
    if (accuracy := row.get(f"{split}/accuracy")) is not None:
        return f"{split} {accuracy:.1%}"
    score = row.get(f"{split}/score")
    return "" if score is None else f"{split} score {score:.3f}"


def epoch_line(row: Row) -> str:
    """Return the metrics of one epoch in a few words."""
    parts = (f"epoch {row['epoch']:>3}", _loss(row), accuracies(row), _conflict(row))
    return "  ".join(part for part in parts if part)


def _loss(row: Row) -> str:
    """Return the mean over the tasks of the training loss."""
    losses = [value for name, value in row.items() if name.startswith("train/loss/") and value is not None]
    return f"loss {sum(losses) / len(losses):.3f}" if losses else ""


def _conflict(row: Row) -> str:
    conflict = row.get("train/conflict")
    return "" if conflict is None else f"conflict {conflict:.0%}"
