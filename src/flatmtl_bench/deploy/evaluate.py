"""The command that measures a trained model again."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from flatmtl_bench.analysis.batches import Batch
from flatmtl_bench.analysis.trained import Trained, check_device, trained
from flatmtl_bench.data.batches import BatchIndices
from flatmtl_bench.deploy.model import finished
from flatmtl_bench.deploy.options import Evaluate
from flatmtl_bench.output import answer
from flatmtl_bench.reports import terminal
from flatmtl_bench.reports.columns import SHARES, UNITS
from flatmtl_bench.reports.grid import Cell, Grid
from flatmtl_bench.runs import finite

Values = Mapping[str, float | None]
"""Metric -> number; None where it was not finite."""
ROUNDING = 1e-4
"""Relative difference that another order of sums can make."""


def evaluate(command: Evaluate) -> int:
    """Print the metrics of a model, beside those that were recorded when it was trained.

    Raises:
        RunError, ValueError, OSError: the run is not finished or not whole, there is no such epoch, or the data are
            others or not there.
    """
    check_device(command.device)
    run = finished(Path(command.run))
    if command.root is not None:
        run = replace(run, config=replace(run.config, root=command.root))
    model = trained(run, command.split, command.epoch, command.device)
    values = finite(model.evaluate(batches=as_in_training(model)))
    counting = run.summary["epochs"]
    found = {
        "run": run.name,
        "epoch": model.epoch,
        "protocol": run.config.protocol,
        "note": _note(run.config.protocol, counting) if command.epoch is None and len(counting) > 1 else None,
        "split": command.split,
        "data": str(model.dataset),
        "metrics": values,
        "recorded": recorded(run.rows, model.epoch, command.split),
    }
    if command.json:
        answer(json.dumps(found, indent=2, allow_nan=False))
    else:
        _print(found, model.tasks)
    return 0


def as_in_training(model: Trained) -> Iterator[Batch]:
    """Yield the batches that one process has when it trains: means over batches depend on how items fall into them."""
    batches = BatchIndices(len(model.dataset), model.config.batch_size)
    for inputs, targets in DataLoader(model.dataset, batch_sampler=batches):
        yield inputs.to(model.device), {task: target.to(model.device) for task, target in targets.items()}


def _note(protocol: str, epochs: Sequence[int]) -> str:
    return (
        f"The protocol {protocol} counts the mean of the epochs {epochs[0]} to {epochs[-1]}; this is epoch "
        f"{epochs[-1]} alone."
    )


def recorded(rows: Sequence[Mapping[str, Any]], epoch: int, split: str) -> dict[str, float | None] | None:
    """Return what a run measured on a split after an epoch; None if it did not, as on its training data.

    Example:
        >>> recorded([{"epoch": 1, "test/loss": 0.5, "train/loss": 0.25}], 1, "test")
        {'loss': 0.5}
    """
    row = next((row for row in rows if row["epoch"] == epoch), {})
    own = {name.removeprefix(f"{split}/"): v for name, v in row.items() if name.startswith(f"{split}/")}
    return own if own and split != "train" else None


def _print(found: Mapping[str, Any], tasks: Sequence[str]) -> None:
    terminal.print_text(f"{found['run']}, epoch {found['epoch']} ({found['protocol']}): {found['data']}")
    if found["note"]:
        terminal.print_text(found["note"])
    for grid in grids(found["metrics"], tasks):
        terminal.print_grid(grid)
    if found["recorded"] is not None:
        terminal.print_text(agreement(found["metrics"], found["recorded"]))


def grids(metrics: Values, tasks: Sequence[str]) -> list[Grid]:
    """Return a table of the tasks for each set of metrics that some of them have; the means over all come last.

    Example:
        >>> metrics = {"loss": 0.5, "loss/left": 0.25, "loss/right": 0.75}
        >>> [grid.texts() for grid in grids(metrics, ["left", "right"])]
        [[['', 'loss'], ['left', '0.2500'], ['right', '0.7500'], ['mean', '0.5000']]]
    """
    rows = {task: {n.rpartition("/")[0]: v for n, v in metrics.items() if n.endswith(f"/{task}")} for task in tasks}
    if len(tasks) > 1:
        rows["mean"] = {name: value for name, value in metrics.items() if "/" not in name}
    alike: dict[tuple[str, ...], dict[str, Values]] = {}
    for name, values in rows.items():
        alike.setdefault(tuple(values), {})[name] = values
    return [_grid(names, some) for names, some in alike.items()]


def _grid(names: Sequence[str], rows: Mapping[str, Values]) -> Grid:
    headings = [name.replace("_", " ") + (f", {UNITS[name]}" if name in UNITS else "") for name in names]
    cells = [[Cell(row), *(_cell(name, value) for name, value in values.items())] for row, values in rows.items()]
    return Grid("metrics", (), ["", *headings], cells)


def _cell(name: str, value: float | None) -> Cell:
    if value is None:
        return Cell("nan")
    if name == "valid":
        return Cell(f"{value:,.0f}", value)
    scaled = 100 * value if name in SHARES else value
    return Cell(f"{scaled:.2f}" if name in UNITS else f"{scaled:.4f}", scaled)


def agreement(now: Values, then: Values) -> str:
    """Return in words how far metrics are from those that were recorded.

    Example:
        >>> agreement({"loss": 0.5, "accuracy": 0.25}, {"loss": 0.5, "accuracy": 0.25})
        'The run recorded the same numbers.'
        >>> agreement({"loss": 0.5}, {"loss": 0.4})
        'The run recorded other numbers: loss was 0.4 and is 0.5, the largest relative difference.'
    """
    both = {name: (now[name], then.get(name)) for name in now}
    gaps = {name: _gap(*pair) for name, pair in both.items() if pair[0] != pair[1]}
    if not gaps:
        return "The run recorded the same numbers."
    name = max(gaps, key=lambda name: gaps[name])
    if gaps[name] <= ROUNDING:
        return f"The run recorded the same numbers, to rounding (relative difference of {name}: {gaps[name]:.1g})."
    a, b = ("nan" if value is None else f"{value:g}" for value in both[name])
    return f"The run recorded other numbers: {name} was {b} and is {a}, the largest relative difference."


def _gap(now: float | None, then: float | None) -> float:
    """Return how far two numbers are apart, relative to the larger; infinitely if one was not finite."""
    if now is None or then is None:
        return math.inf
    return abs(now - then) / max(abs(now), abs(then))
