"""The file ``metrics.jsonl`` of a run: the metrics of its epochs, as a column of numbers for each."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Columns = Mapping[str, NDArray[np.float64]]
"""A value for each epoch by the name of a metric; NaN where it was not finite or is not there."""

EPOCH = "epoch"
NUMBERS = {int, float, type(None)}
LARGEST = 1e100
"""No metric is larger, and per cents, sums and squares of this one are finite: what is beyond counts as not finite."""


def read_columns(path: Path) -> Columns:
    """Return the columns of a file.

    Numbers and not dictionaries are kept: five hundred runs fit into the memory of a small machine.

    Raises:
        OSError: it cannot be read.
        ValueError: it is broken; the message has the line.
    """
    try:
        return columns([_row(line, k) for k, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)])
    except ValueError as error:
        raise ValueError(f"{path} is broken: {error}") from error


def _row(line: str, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number}: {error}") from error
    if not isinstance(row, dict) or type(row.get(EPOCH)) is not int:
        raise ValueError(f"line {number} is no object with an epoch, but {line!r:.80}.")
    return row


def columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Return the columns of the metrics of each epoch.

    Raises:
        ValueError: the epochs are not those from 1 on, or a value is no number.

    Example:
        >>> columns([{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": None}])["loss"]
        array([0.5, nan])
    """
    if not rows or [row[EPOCH] for row in rows] != list(range(1, len(rows) + 1)):
        raise ValueError(f"expected the epochs from 1 on, got {[row[EPOCH] for row in rows]!r:.80}.")
    names = list(rows[0])
    if any(list(row) != names for row in rows):
        names = list(dict.fromkeys(name for row in rows for name in row))
        rows = [{name: row.get(name) for name in names} for row in rows]
    return dict(zip(names, map(_column, names, zip(*(row.values() for row in rows), strict=True)), strict=True))


def _column(name: str, values: Sequence[Any]) -> NDArray[np.float64]:
    if not {*map(type, values)} <= NUMBERS:
        wrong = next(value for value in values if type(value) not in NUMBERS)
        raise ValueError(f"{name!r} is {wrong!r:.80}, which is no number.")
    try:
        column = np.array(values, dtype=np.float64)  # of None it makes NaN
    except OverflowError as error:
        raise ValueError(f"a value of {name!r} is too large.") from error
    column[~(np.abs(column) <= LARGEST)] = np.nan
    return column
