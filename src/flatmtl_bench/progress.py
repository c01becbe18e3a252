"""What a run shows on standard error while it trains."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def training_bars() -> Progress:
    """Return bars that count steps, with the accuracy of the last epoch; they fit 80 columns."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def accuracies(row: Mapping[str, Any], splits: Sequence[str] = ("validation", "test")) -> str:
    """Return the accuracies of one epoch."""
    return "  ".join(f"{split} {row[name]:.1%}" for split in splits if (name := f"{split}/accuracy") in row)


def epoch_line(row: Mapping[str, Any]) -> str:
    """Return the metrics of one epoch in a few words."""
    losses = [value for name, value in row.items() if name.startswith("train/loss/")]
    line = f"epoch {row['epoch']:>3}  loss {sum(losses) / len(losses):.3f}  {accuracies(row)}"
    conflict = row.get("train/conflict")
    return line if conflict is None else f"{line}  conflict {conflict:.0%}"
