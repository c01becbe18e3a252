"""Results over seeds: a table for all runs that are comparable, with a row for each method and setting."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from statistics import fmean
from typing import Any

from flatmtl_bench.recipes import METHODS, Config
from flatmtl_bench.reports.columns import Column, Values, columns
from flatmtl_bench.reports.reading import Run
from flatmtl_bench.reports.settings import OPTIONS, Settings, differing, text
from flatmtl_bench.runs import digest, settings

FLAT = ("rho", "method.perturbation", "method.rho_heads", "method.norm", "method.combine", "method.flat_scale")
"""Settings of the flat methods alone."""


@dataclass(frozen=True)
class Result:
    """What a method came to with one seed: in one run or, of single-task learning, in the run of each task."""

    runs: Sequence[Run]

    @cached_property
    def metrics(self) -> dict[str, float | None]:
        """The metrics of a result table; None where one was not finite."""
        return {name: run.result(name) for run in self.runs for name in run.better}

    @property
    def score(self) -> float | None:
        """The validation score, mean over the tasks; None if it is not there or not finite."""
        scores = [score for run in self.runs if (score := run.result("score", "validation")) is not None]
        return fmean(scores) if len(scores) == len(self.runs) else None


@dataclass(frozen=True, eq=False)
class Row:
    """A method with one setting, and what it came to with each seed."""

    results: Sequence[Result]

    @property
    def config(self) -> Config:
        """A config of the row; its runs differ in the seed and, of single-task learning, in the task."""
        return self.results[0].runs[0].config

    @property
    def seeds(self) -> list[int]:
        """The seed of each result."""
        return [result.runs[0].config.seed for result in self.results]

    @property
    def alone(self) -> bool:
        """Whether each task was trained alone."""
        return self.config.task is not None

    @property
    def flat(self) -> bool:
        """Whether the method is a flat one."""
        return self.config.method.perturbation != "none"

    @property
    def ablation(self) -> dict[str, Any]:
        """How a flat method combines loss and flat gradients, if not as the paper's own."""
        combine = self.config.method.combine
        return {"method.combine": combine} if self.flat and combine != "individual" else {}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Values of the config by dotted names, that all seeds and tasks have in common."""
        return {name: value for name, value in settings(self.config).items() if name != "task"}

    @property
    def runs(self) -> list[Run]:
        """All runs of the row."""
        return [run for result in self.results for run in result.runs]

    def values(self, column: Column) -> Values:
        """Return a column's value of each seed; nothing if the row has no such metrics."""
        if not all(name in self.results[0].metrics for name in column.metrics):
            return []
        return [column.value(result.metrics) for result in self.results]


@dataclass(frozen=True)
class Table:
    """Comparable results: of the same data, model, length and protocol.

    Attributes:
        config: of one of the runs.
        fingerprint: of the test data.
        rows: single-task learning first, then the methods in the order of the recipes, the flat form after the plain.
        better: the metrics that count, as ``miou/segmentation``, and which direction is good.
        lacking: of single-task learning the runs without which seeds do not count, in sentences.
    """

    config: Config
    fingerprint: str | None
    rows: Sequence[Row]
    better: Mapping[str, str]
    lacking: Sequence[str]

    @property
    def columns(self) -> list[Column]:
        """The columns of the metrics."""
        return columns(self.better)

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks."""
        return tasks(self.better)

    @property
    def title(self) -> str:
        """What the results have in common, in one line."""
        config = self.config
        means = ", depth and normals as means over batches" if config.averaging == "batches" else ""
        data = f"{config.data.name} (source {config.source})"
        model = config.model if config.width == 1.0 else f"{config.model} of width {config.width:g}"
        return f"{data}, {model}, {config.epochs} epochs, protocol {config.protocol}{means}"

    def distinct(self) -> list[Settings]:
        """Return of each row the settings that tell it from rows that it could be taken for.

        Those of flat methods are compared among flat ones, an aggregator's options among those of one method. A row
        that combines gradients in another way than the paper could always be taken for the paper's.
        """
        every = [row.settings for row in self.rows]
        names = [name for name in differing(every) if name not in ("recipe", "method.aggregator")]
        known: dict[tuple[str, object], set[str]] = defaultdict(set)
        for row, name in product(self.rows, names):
            known[name, _peers(row, name)].add(repr(row.settings.get(name)))
        found = [
            {
                name: row.settings[name]
                for name in names
                if name in row.settings and len(known[name, _peers(row, name)]) > 1
            }
            | row.ablation
            for row in self.rows
        ]
        alike: dict[str, list[int]] = defaultdict(list)
        for k, row in enumerate(self.rows):
            alike[f"{row.config.label} {found[k]}"].append(k)
        for same in alike.values():
            more = differing([every[k] for k in same])
            for k in same:
                found[k] |= {name: every[k][name] for name in more if name in every[k]}
        return list(found)

    def names(self) -> dict[Row, str]:
        """Return each row's method, with the settings that tell it from others."""
        named = zip(self.rows, self.distinct(), strict=True)
        return {row: f"{row.config.label} {text(settings)}".strip() for row, settings in named}


def _peers(row: Row, name: str) -> object:
    """Return what rows must have in common so that a setting is compared among them."""
    return row.config.label if name.startswith(OPTIONS) else row.flat if name in FLAT else None


def tasks(better: Mapping[str, str]) -> list[str]:
    """Return the tasks that metrics ``<metric>/<task>`` are of."""
    return list(dict.fromkeys(name.partition("/")[2] for name in better))


def tables(runs: Sequence[Run]) -> list[Table]:
    """Return the tables of runs, of which each is in one row of one table."""
    groups: dict[object, list[Run]] = defaultdict(list)
    for run in runs:
        config = run.config
        data = (config.data.name, config.source, run.fingerprint)
        groups[data, config.model, config.width, config.epochs, config.protocol, config.averaging].append(run)
    return [_table(group) for group in groups.values()]


def _table(runs: Sequence[Run]) -> Table:
    whole_first = sorted(runs, key=lambda run: run.config.task is not None)  # so that metrics are in the data's order
    better = {name: direction for run in whole_first for name, direction in run.better.items()}
    groups: dict[object, list[Run]] = defaultdict(list)
    for run in runs:
        groups[digest(replace(run.config, task=None)), run.config.task is None].append(run)
    rows = [Row(results) for group in groups.values() if (results := _results(group, tasks(better)))]
    lacking = _lacking([group for group in groups.values() if group[0].config.task is not None], tasks(better))
    return Table(runs[0].config, runs[0].fingerprint, _in_order(rows), better, lacking)


def _results(runs: Sequence[Run], wanted: Sequence[str]) -> list[Result]:
    """Return the result of each seed; of single-task learning, of those that have a run of each task."""
    if runs[0].config.task is None:
        return [Result([run]) for run in sorted(runs, key=lambda run: run.config.seed)]
    seeds: dict[int, dict[str | None, Run]] = defaultdict(dict)
    for run in runs:
        seeds[run.config.seed][run.config.task] = run
    return [Result([seeds[k][task] for task in wanted]) for k in sorted(seeds) if {*wanted} <= {*seeds[k]}]


def _lacking(groups: Sequence[Sequence[Run]], wanted: Sequence[str]) -> list[str]:
    """Return a sentence for each setting of single-task learning of which some task has no run with some seed."""
    known: dict[str, list[Settings]] = defaultdict(list)
    for config in (group[0].config for group in groups):
        known[config.recipe].append(settings(config))
    varied = {recipe: [name for name in differing(same) if name != "task"] for recipe, same in known.items()}
    said: list[str] = []
    for group in groups:
        config, here = group[0].config, {(run.config.task, run.config.seed) for run in group}
        seeds = sorted({seed for _, seed in here})
        gaps = {task: [seed for seed in seeds if (task, seed) not in here] for task in wanted}
        words = [f"task {task} with {seeds_text(missing)}" for task, missing in gaps.items() if missing]
        if words:
            own = settings(config)
            which = f"{config.label} {text({name: own[name] for name in varied[config.recipe] if name in own})}".strip()
            said.append(f"{which} lacks runs of {', '.join(words)} ({config.recipe}); seeds count that have all tasks.")
    return said


def seeds_text(seeds: Sequence[int]) -> str:
    """Return seeds in words.

    Example:
        >>> seeds_text([0]), seeds_text([0, 1])
        ('seed 0', 'seeds 0, 1')
    """
    return f"seed{'s' * (len(seeds) != 1)} {', '.join(map(str, seeds))}"


def _in_order(rows: Sequence[Row]) -> list[Row]:
    methods = list(METHODS)
    names = differing([row.settings for row in rows])

    def place(row: Row) -> Any:
        method = row.config.method.aggregator
        known = methods.index(method) if method in methods else len(methods)
        return not row.alone, known, method, row.flat, [_order(row.settings.get(name)) for name in names]

    return sorted(rows, key=place)


def _order(value: Any) -> tuple[bool, float, str]:
    """Return what numbers are sorted by their size, and before texts."""
    number = isinstance(value, int | float)
    return not number, float(value) if number else 0.0, str(value)
