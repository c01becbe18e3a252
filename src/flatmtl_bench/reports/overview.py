"""Many runs, over seeds: one line for each recipe and setting."""

from collections.abc import Callable, Sequence
from functools import reduce

from flatmtl_bench.reports.comparison import conflict, sharpness, spread
from flatmtl_bench.reports.reading import Run

COLUMNS: tuple[tuple[str, Callable[[Run], float | None], str], ...] = (
    ("accuracy, %", lambda run: _in_percent(run.summary["test"]["accuracy"]), ".2f"),
    ("conflict, %", lambda run: conflict(run) if len(run.tasks) > 1 else None, ".1f"),
    ("sharpness", lambda run: sharpness(run) if run.summary["sharpness"] else None, ".4f"),
    ("ms per step", lambda run: 1000 * run.summary["step_seconds"], ".1f"),
)
"""Of each quantity the heading, how a run has it, and how it is written."""


def table(runs: Sequence[Run], settings: Sequence[str]) -> list[list[str]]:
    """Return headings and a line for each recipe and setting, as text: mean and standard deviation over the seeds.

    Args:
        runs: finished ones.
        settings: dotted names of the values of the config that distinguish the runs of a recipe.
    """
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.config.recipe, *(_setting(run, name) for name in settings)), []).append(run)
    headings = ["recipe", *settings, "seeds", *(heading for heading, _, _ in COLUMNS)]
    return [headings, *([*key, str(len(group)), *_cells(group)] for key, group in groups.items())]


def _setting(run: Run, name: str) -> str:
    return str(reduce(lambda values, key: values[key], name.split("."), run.config.to_dict()))


def _cells(runs: Sequence[Run]) -> list[str]:
    cells = []
    for _, value, form in COLUMNS:
        known = [number for run in runs if (number := value(run)) is not None]
        cells.append(spread(known, form) if known else "-")
    return cells


def _in_percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
