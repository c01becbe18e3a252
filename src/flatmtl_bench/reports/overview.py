"""Many runs, over seeds: one line for each recipe and setting."""

from collections.abc import Callable, Sequence
from functools import reduce

from flatmtl_bench.reports.columns import Column, columns
from flatmtl_bench.reports.comparison import conflict, sharpness, spread
from flatmtl_bench.reports.reading import Run

ACCURACY = Column("accuracy, %", ["accuracy"], "higher", scale=100.0, form=".2f")
"""Mean over the tasks, where each is a classification; other runs have the columns of their result table."""
COURSE: tuple[tuple[str, Callable[[Run], float | None], str], ...] = (
    ("conflict, %", lambda run: conflict(run) if {*run.series("train/conflict")} - {None} else None, ".1f"),
    ("sharpness", lambda run: sharpness(run) if run.summary["sharpness"] else None, ".4f"),
    ("ms per step", lambda run: 1000 * run.summary["step_seconds"], ".1f"),
)
"""Of each further quantity the heading, how a run has it, and how it is written."""


def table(runs: Sequence[Run], settings: Sequence[str]) -> list[list[str]]:
    """Return headings and a line for each recipe and setting, as text: mean and standard deviation over the seeds.

    Args:
        runs: finished ones.
        settings: dotted names of the values of the config that distinguish the runs of a recipe.
    """
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.config.recipe, *(_setting(run, name) for name in settings)), []).append(run)
    metrics = _metrics(runs)
    headings = ["recipe", *settings, "seeds", *(column.heading for column in metrics), *(name for name, *_ in COURSE)]
    return [headings, *([*key, str(len(group)), *_cells(group, metrics)] for key, group in groups.items())]


def _setting(run: Run, name: str) -> str:
    return str(reduce(lambda values, key: values.get(key, "-"), name.split("."), run.config.to_dict()))


def _metrics(runs: Sequence[Run]) -> list[Column]:
    """Return the columns of test results that some run has."""
    others = [run for run in runs if not _has(run, ACCURACY)]
    better = {name: direction for run in others for name, direction in run.better.items()}
    return [*([ACCURACY] if len(others) < len(runs) else []), *columns(better)]


def _has(run: Run, column: Column) -> bool:
    return {*column.metrics} <= {*run.better, *run.summary["test"]}


def _cells(runs: Sequence[Run], metrics: Sequence[Column]) -> list[str]:
    cells = []
    for column in metrics:
        having = [run for run in runs if _has(run, column)]
        cells.append(column.text([column.value({name: run.result(name) for name in column.metrics}) for run in having]))
    for _, value, form in COURSE:
        known = [number for run in runs if (number := value(run)) is not None]
        cells.append(spread(known, form) if known else "-")
    return cells
