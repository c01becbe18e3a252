"""What the runs of a reproduction came to: the radii that validation chooses, and the table beside the paper's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flatmtl_bench.reports.baseline import NoBaseline, single_task
from flatmtl_bench.reports.choice import Choice, choose
from flatmtl_bench.reports.columns import DELTA_M, Column, Values
from flatmtl_bench.reports.cost import mean, mebibytes, milliseconds, text
from flatmtl_bench.reports.grid import Cell, Chapter, Grid
from flatmtl_bench.reports.reading import Run as FinishedRun
from flatmtl_bench.reports.results import Row as Found
from flatmtl_bench.reports.results import tables
from flatmtl_bench.reproduce import claims
from flatmtl_bench.reproduce.beside import Beside
from flatmtl_bench.reproduce.contradictions import sentences
from flatmtl_bench.reproduce.plan import Part, Radii
from flatmtl_bench.reproduce.tables import Row

Metrics = Mapping[str, float]
Measure = Callable[[FinishedRun], Metrics]
"""Returns what is measured of a trained model, by the names of metrics."""


@dataclass(frozen=True)
class Tuning:
    """What validation chose for the flat methods of a part.

    Attributes:
        part: a table on one data set.
        choices: by recipe.
    """

    part: Part
    choices: Mapping[str, Choice]

    @property
    def radii(self) -> Radii:
        """The radius that was chosen for each recipe."""
        return {recipe: str(choice.best.config.rho) for recipe, choice in self.choices.items()}

    def grid(self) -> Grid:
        """Return how the result depends on the radius: of each flat method the validation score at each radius."""
        radii = self.part.size.radii
        caption = (
            "Validation score, mean over the seeds of the choice, by the radius rho; the chosen one stands out. Of "
            "equal scores the first is taken."
        )
        rows = [
            [Cell(row.label), *self._scores(self.choices[recipe])]
            for row in self.part.rows
            if (recipe := self.part.tuned(row)) is not None and recipe in self.choices
        ]
        return Grid("radii", [caption], ["method", *(f"rho {radius}" for radius in radii)], rows)

    def _scores(self, choice: Choice) -> Iterator[Cell]:
        scores = {row.config.rho: score for row, score in choice.competing.items()}
        for radius in map(float, self.part.size.radii):
            score = scores.get(radius)
            strong = radius == choice.best.config.rho
            yield Cell("failed") if score is None else Cell(f"{score:.4f}", score, strong)

    def to_dict(self) -> list[dict[str, Any]]:
        """Return plain values that JSON can hold."""
        return [
            {
                "recipe": recipe,
                "chosen": choice.best.config.rho,
                "seeds": list(choice.seeds),
                "scores": [{"rho": row.config.rho, "validation": score} for row, score in choice.competing.items()],
            }
            for recipe, choice in self.choices.items()
        ]


def tuned(part: Part, runs: Sequence[FinishedRun]) -> Tuning:
    """Return the choice for each flat method of a part.

    Raises:
        NoChoice: of some method no radius can be chosen; the message says why.
    """
    recipes = dict.fromkeys(name for row in part.rows if (name := part.tuned(row)) is not None)
    rows = [row for table in tables(runs) for row in table.rows]
    found = {name: [row for row in rows if row.config.recipe == name] for name in recipes}
    return Tuning(part, {name: choose(rows) for name, rows in found.items() if rows})


@dataclass(frozen=True)
class Outcome:
    """A part as it came out.

    Attributes:
        beside: the paper's table beside ours.
        tuning: how radii were chosen.
        calls: of each recipe how often a step calls the aggregator, where the table is about that.
        blind: test metrics of a model that does not look at its input, where that is to be shown.
    """

    beside: Beside
    tuning: Tuning
    calls: Mapping[str, int]
    blind: Metrics = field(default_factory=dict[str, float])

    @property
    def title(self) -> str:
        """Which table it is, and what of ours stands for its data."""
        part = self.beside.part
        first = next(iter(self.beside.found.values()), None)
        here = "nothing is trained." if first is None else _setting(first)
        return f"Table {part.table.number} on {part.printed}: {part.table.title}. Here: {here}"

    def lines(self) -> list[str]:
        """Return what stands above the tables."""
        smaller = [SMALLER] if self.beside.part.size.smaller else []
        return [*smaller, *sentences(self.beside.part.table.number), *self.beside.lacking()]

    def chapter(self) -> Chapter:
        """Return what is shown of it, whatever the format."""
        return Chapter(self.title, self.lines(), self.grids())

    def grids(self) -> list[Grid]:
        """Return the tables to show, none of them empty."""
        answers = claims.grid(claims.answers(self.beside))
        grids = [*self.beside.grids(), self.without_looking(), answers, self.cost(), self.tuning.grid()]
        return [grid for grid in grids if grid.rows]

    def without_looking(self) -> Grid:
        """Return what a model comes to that does not look at its input; an empty table if that is not known."""
        found = self._blind_columns()
        caption = (
            "A model that does not look at its input, and answers what suits the training data best: the most frequent "
            "class, or for each pixel the most frequent class, the median depth, the mean normal. Where methods are "
            "not clearly better they have learned little, and their order says little."
        )
        cells = [Cell("without looking"), *(Cell(f"{value:{column.form}}", value) for column, value in found)]
        headings = ["method", *(column.heading for column, _ in found)]
        return Grid("without looking", [caption], headings, [cells] if found else [])

    def _blind_columns(self) -> list[tuple[Column, float]]:
        """Return the columns that have a value without looking, with it."""
        known = (c for c in self.beside.columns.values() if c.metrics and {*c.metrics} <= self.blind.keys())
        return [(column, value) for column in known if (value := column.value(self.blind)) is not None]

    def cost(self) -> Grid:
        """Return time and memory of a step of each method."""
        calls = ["aggregator calls"] if self.calls else []
        caption = (
            "A step: median over those of a run, then mean ± standard deviation over the runs; its peak of memory. "
            "Times are rough if other work ran beside, as runs do with several at a time."
        )
        rows = [self._costs(row, ours) for row in self.beside.part.rows if (ours := self.beside.ours(row)) is not None]
        return Grid("cost", [caption], ["method", *calls, "ms per step", "MiB per step"], rows)

    def _costs(self, row: Row, ours: Found) -> list[Cell]:
        count = self.calls.get(self.beside.part.recipe(row))
        calls = [] if not self.calls else [Cell("-" if count is None else str(count), count)]
        each = [[measure(run) for run in ours.runs] for measure in (milliseconds, mebibytes)]
        return [Cell(row.label), *calls, *(Cell(text(values, ".1f"), mean(values)) for values in each)]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        return {
            "title": self.title,
            "lines": self.lines(),
            "grids": [grid.to_dict() for grid in self.grids()],
            **self.beside.to_dict(),
            "without_looking": {column.heading: value for column, value in self._blind_columns()},
            "claims": [answer.to_dict() for answer in claims.answers(self.beside)],
            "radii": self.tuning.to_dict(),
        }


SMALLER = (
    "The data and nets are smaller than the paper's, and not the same: its numbers and ours are not to be compared one "
    "by one. What flatness gains may be."
)


def _setting(row: Found) -> str:
    config = row.config
    epochs = f"{config.epochs} epoch{'s' * (config.epochs != 1)}"
    return f"{config.data.name} ({config.source}), {config.model}, {epochs}, protocol {config.protocol}."


def outcome(
    tuning: Tuning,
    runs: Sequence[FinishedRun],
    calls: Mapping[str, int],
    measure: Measure | None = None,
    blind: Metrics | None = None,
) -> Outcome:
    """Return what the runs of a part came to.

    Args:
        tuning: of which table and data they are, and how their radii were chosen.
        runs: those whose results count.
        calls: of each recipe how often a step calls the aggregator.
        measure: of the trained models, for tables whose metrics are not those of runs.
        blind: test metrics of a model that does not look at its input.
    """
    found = tables(runs)
    rows = {row.config.recipe: row for table in found for row in table.rows}
    return Outcome(Beside(tuning.part, rows, _values(found, measure)), tuning, calls, blind or {})


def _values(found: Sequence[Any], measure: Measure | None) -> Callable[[Found, Column], Values]:
    """Return what gives of a row and a column a value of each seed."""
    baselines = []
    for table in found:
        try:
            baselines.append(single_task(table))
        except NoBaseline:
            continue

    def values(row: Found, column: Column) -> Values:
        if column is DELTA_M:
            return baselines[0].delta_m(row) if baselines else []
        if measure is not None:
            return [column.value(measure(result.runs[0])) for result in row.results]
        return row.values(column)

    return values
