"""The runs that make a table: those by which validation chooses radii, and those whose results count."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from flatmtl_bench.commands.training import Run
from flatmtl_bench.data.attributes import ATTRIBUTES
from flatmtl_bench.recipes import RECIPES, Config
from flatmtl_bench.reproduce.scales import TUNED_WITH, Size
from flatmtl_bench.reproduce.tables import ALONE, PaperTable, Row
from flatmtl_bench.sweep.grid import Grid, by_name, combinations

TASKS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("multifashion", "multimnist", "multifashionmnist"), ("left", "right")),
    **dict.fromkeys(("celeba", "faces40"), ATTRIBUTES),
    **dict.fromkeys(("nyuv2", "scenes"), ("segmentation", "depth", "normals")),
    **dict.fromkeys(("cityscapes", "streets"), ("segmentation", "depth")),
}
"""The tasks of each data set, which can be told before the data are there."""
Runs = Mapping[str, Run]
"""By the names of their folders."""
Radii = Mapping[str, str]
"""Of each recipe of a flat method the radius that was chosen, as a text."""


@dataclass(frozen=True)
class Part:
    """A table on one data set.

    Attributes:
        table: of the paper.
        printed: name of the data in the table.
        size: how they are reproduced.
        rows: of the table, those that are trained.
        suffix: of the recipes whose results count: ``""`` or ``"_paper"``, ``"_official"``.
        flags: of `flatmtl run`, for all runs, after those of the size.
    """

    table: PaperTable
    printed: str
    size: Size
    rows: Sequence[Row]
    suffix: str = ""
    flags: Sequence[str] = ()

    @property
    def data(self) -> str:
        """The data set, in the names of recipes."""
        return self.size.data

    @property
    def tasks(self) -> Sequence[str]:
        """Names of the tasks."""
        return TASKS[self.data]

    @property
    def seeds(self) -> str:
        """The number of seeds, in words."""
        return f"{self.size.seeds} seed{'s' * (self.size.seeds != 1)}"

    def recipe(self, row: Row) -> str:
        """Return the recipe whose results stand in a row."""
        return row.recipe(self.data, self.suffix)

    def tuned(self, row: Row) -> str | None:
        """Return the recipe by which the radius of a row is chosen; None if there is nothing to choose.

        Recipes without validation data are given what was chosen for the same method with such data.
        """
        return row.recipe(self.data) if self._is_open(row) and len(self.size.radii) > 1 else None

    def _is_open(self, row: Row) -> bool:
        """Whether the recipe of a row leaves its radius open."""
        return row.flat and "rho" in RECIPES[self.recipe(row)].grid

    def first_radii(self) -> Radii:
        """Return the first radius of each recipe of which one is to be chosen: with it there are as many runs."""
        return {name: self.size.radii[0] for row in self.rows if (name := self.tuned(row)) is not None}

    def tuning(self) -> Runs:
        """Return the runs by which radii are chosen."""
        radii = {"rho": self.size.radii}
        chosen = [(name, row) for row in self.rows if (name := self.tuned(row)) is not None]
        return self._runs([(name, self._grid(row, radii)) for name, row in chosen], TUNED_WITH)

    def final(self, radii: Radii) -> Runs:
        """Return the runs whose results count, given the radii that were chosen."""
        return self._runs([(self.recipe(row), self._final_grid(row, radii)) for row in self.rows], self.size.seeds)

    def _final_grid(self, row: Row, radii: Radii) -> Grid:
        tuned = self.tuned(row)
        if tuned is not None:
            return self._grid(row, {"rho": [radii[tuned]]})
        return self._grid(row, {"rho": self.size.radii} if self._is_open(row) else {})

    def _grid(self, row: Row, grid: Grid) -> Grid:
        return {**({"task": self.tasks} if row.method == ALONE else {}), **grid}

    def _runs(self, recipes: Sequence[tuple[str, Grid]], seeds: int) -> Runs:
        flags = [*self.size.flags, *self.flags]
        found = by_name(chain.from_iterable(combinations({name: grid}, seeds, flags) for name, grid in recipes))
        for run in found.values():
            _check(run.config)
        return found


def _check(config: Config) -> None:
    """Raise a `ValueError` if flags have made of a run what the table is not about."""
    if config.source == "auto":
        raise ValueError("--source auto may come to other data than the table is about. Name the source, or none.")
    own = RECIPES[config.recipe].config
    for name, given, wanted in (
        ("data.name", config.data.name, own.data.name),
        ("method.aggregator", config.method.aggregator, own.method.aggregator),
        ("method.combine", config.method.combine, own.method.combine),
        ("method.perturbation", config.method.perturbation == "none", own.method.perturbation == "none"),
        ("task", config.task is None, own.task is None),
    ):
        if given != wanted:
            raise ValueError(
                f"--{name} decides what the rows of a table are, so it cannot be given for all. Leave it out."
            )
