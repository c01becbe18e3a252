"""What Delta m is relative to: single-task learning, of the same harness or of the paper."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from flatmtl_bench.recipes import RECIPES, Config
from flatmtl_bench.reports import paper
from flatmtl_bench.reports.columns import Values
from flatmtl_bench.reports.delta import delta_m
from flatmtl_bench.reports.results import Row, Table, seeds_text
from flatmtl_bench.reports.settings import Settings, differing, flags
from flatmtl_bench.runs import settings

BaselineName = Literal["stl", "paper"]


class NoBaseline(ValueError):
    """There is nothing that Delta m could be relative to; the message says why, and what to do."""


@dataclass(frozen=True)
class Baseline:
    """What Delta m is relative to.

    Attributes:
        text: whose numbers these are, in words.
        metrics: the number of each metric, in the units of runs.
        better: the metrics that count, and which direction is good.
        data: settings of the data that it was trained on, by dotted names; None if they do not matter.
    """

    text: str
    metrics: Mapping[str, float]
    better: Mapping[str, str]
    data: Settings | None = None

    def __post_init__(self) -> None:
        try:
            delta_m(self.metrics, self.metrics, self.better)
        except ValueError as error:
            raise NoBaseline(f"{error} The baseline is {self.text}.") from error

    def delta_m(self, row: Row) -> Values:
        """Return Delta m of each seed in per cent; None where a metric was not finite.

        Nothing of a row that was trained on other data: it would tell of the data, not of the method.
        """
        if self.differing(row):
            return []
        return [self._delta_m(result.metrics) for result in row.results]

    def differing(self, row: Row) -> list[str]:
        """Return the settings of the data in which a row differs."""
        return [] if self.data is None else differing([self.data, data_settings(row)])

    def _delta_m(self, metrics: Mapping[str, float | None]) -> float | None:
        known = {name: value for name in self.better if (value := metrics.get(name)) is not None}
        return delta_m(known, self.metrics, self.better) if len(known) == len(self.better) else None


def single_task(table: Table) -> Baseline:
    """Return the mean over the seeds of the plain single-task runs in a table.

    Raises:
        NoBaseline: some are lacking, one was not finite, or they have several settings.
    """
    rows = [row for row in table.rows if row.alone and not row.flat]
    if not rows:
        raise NoBaseline(f"there is no complete set of single-task runs. {_remedy(table)}")
    if len(rows) > 1:
        raise NoBaseline(
            f"there are {len(rows)} STL rows. Name the runs of one of them only, or let --tuned choose by validation."
        )
    (row,) = rows
    means = {name: _mean([result.metrics[name] for result in row.results]) for name in table.better}
    if failed := [name for name, mean in means.items() if mean is None]:
        raise NoBaseline(
            f"{', '.join(failed)} of an STL run was not finite. Train it again, e.g. with a smaller --optimizer.lr."
        )
    known = {name: mean for name, mean in means.items() if mean is not None}
    text = f"the STL row of these runs, mean over {seeds_text(row.seeds)}"
    return Baseline(text, known, table.better, data_settings(row))


def data_settings(row: Row) -> dict[str, Any]:
    """Return the settings of the data that a row was trained on."""
    return {name: value for name, value in row.settings.items() if name.startswith("data.")}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def _remedy(table: Table) -> str:
    """Return the command that trains single-task runs which are like the others, but for where they are."""
    mine = (table.config.data.name, table.config.protocol)
    recipes = (
        name
        for name, recipe in RECIPES.items()
        if recipe.config.task and (recipe.config.data.name, recipe.config.protocol) == mine
    )
    recipe = next(recipes, f"{table.config.data.name}_stl")
    seeds = max((len(row.seeds) for row in table.rows), default=1)
    command = f"flatmtl sweep {recipe} --grid task={','.join(table.tasks)} --seeds {seeds} {_changed(table.config)}"
    return f"Train them, with the --root and --out of the others: {command.strip()}"


def _changed(config: Config) -> str:
    """Return as flags what a config has otherwise than its recipe, but for the method and where the data are."""
    if config.recipe not in RECIPES:
        return ""
    own, usual = settings(config), settings(RECIPES[config.recipe].config)
    aside = ("method.", "rho", "task", "source")
    return flags(config, [name for name in usual if not name.startswith(aside) and own.get(name) != usual[name]])


def of_paper(table: Table) -> Baseline:
    """Return the numbers that the paper has for single-task learning on the data of a table.

    Raises:
        NoBaseline: the paper has none for these data, or not of these metrics.
    """
    name, source = table.config.data.name, table.config.source
    if name not in paper.SCENES or source != "full":
        raise NoBaseline(
            f"the paper's STL row is for other data than {name} (source {source}): it has one for "
            f"{' and '.join(paper.SCENES)}, each with source full. Use --baseline stl."
        )
    printed = paper.single_task(name)
    if different := sorted({*printed.metrics} ^ {*table.better}):
        raise NoBaseline(
            f"the paper's STL row and these runs differ in {', '.join(different)}. Add runs of all tasks, or use "
            "--baseline stl."
        )
    text = f"the STL row of table {printed.table} of {paper.PAPER}: {printed.mapping()}"
    return Baseline(text, printed.metrics, table.better)


BASELINES: Mapping[BaselineName, Callable[[Table], Baseline]] = {"stl": single_task, "paper": of_paper}
