"""What runs were made with: the values in which they differ as a table, and all values of each."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flatmtl_bench.reports.grid import Cell, Grid
from flatmtl_bench.reports.reading import Run
from flatmtl_bench.reports.results import Table
from flatmtl_bench.reports.settings import differing


def runs_grid(table: Table) -> Grid:
    """Return a row for each run: which epochs count, its minutes, and in what it differs from others."""
    rows = [(row, run) for row in table.rows for run in row.runs]
    values = [_values(run) for _, run in rows]
    names = [name for name in differing(values) if not name.startswith("data: ")]
    cells = [
        [Cell(run.name), Cell(row.config.label), _epochs(run), _minutes(run), *(_cell(one, name) for name in names)]
        for (row, run), one in zip(rows, values, strict=True)
    ]
    caption = ["What was trained, and the values of config and environment in which these runs differ."]
    headings = ["run", "method", "epochs that count", "minutes", *map(_short, names)]
    return Grid("runs", caption, headings, cells)


def values_of(tables: Iterable[Table]) -> dict[str, Any]:
    """Return all values of all runs as texts: those that they have in common, and of each run the others."""
    runs = [run for table in tables for row in table.rows for run in row.runs]
    every = [_values(run) for run in runs]
    apart = {*differing(every)}
    texts = [{name: _text(value) for name, value in one.items() if name in apart} for one in every]
    return {
        "order": list(dict.fromkeys(name for one in every for name in one)),
        "common": {name: _text(value) for one in every[:1] for name, value in one.items() if name not in apart},
        "runs": [{"name": run.name, "values": one} for run, one in zip(runs, texts, strict=True)],
    }


def _values(run: Run) -> dict[str, Any]:
    """Return what a run was made with, each name after what it is of: ``config: optimizer.lr``."""
    return {
        **{f"config: {name}": value for name, value in run.config.flat().items()},
        **{f"environment: {name}": value for name, value in _flat(run.environment).items()},
        **{f"data: {name}": value for name, value in _flat(run.summary.get("data", {})).items()},
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values under dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def _short(name: str) -> str:
    return name.removeprefix("config: ")


def _cell(values: Mapping[str, Any], name: str) -> Cell:
    if name not in values:
        return Cell("-")
    value = values[name]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return Cell(_text(value), float(value) if number else None)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _epochs(run: Run) -> Cell:
    """Return which epochs count, of how many."""
    counted: Sequence[int] = run.summary["epochs"]
    words = f"{counted[0]}" if len(counted) == 1 else f"{counted[0]} to {counted[-1]}"
    return Cell(f"{words} of {len(run.series('epoch'))}", counted[-1])


def _minutes(run: Run) -> Cell:
    minutes = run.summary["seconds"] / 60
    return Cell(f"{minutes:.1f}", minutes)
