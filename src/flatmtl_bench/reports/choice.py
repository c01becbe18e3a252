"""The choice of settings by validation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from flatmtl_bench.recipes import RECIPES
from flatmtl_bench.reports.results import Row, Table, seeds_text
from flatmtl_bench.reports.settings import differing, flags


class NoChoice(ValueError):
    """The settings of a recipe cannot be compared by validation; the message says why, and what to do."""


@dataclass(frozen=True)
class Choice:
    """The setting of a recipe that validation prefers.

    Attributes:
        best: of the rows that compete the one with the best validation score, mean over the seeds; the first of equals.
        score: of the best.
        competing: the rows that have a finite score for each of the seeds, with its mean over them.
        others: rows that lack one, and so do not compete.
        seeds: by whose scores the rows were compared.
    """

    best: Row
    score: float
    competing: Mapping[Row, float]
    others: Sequence[Row]
    seeds: Sequence[int]

    @property
    def names(self) -> list[str]:
        """Dotted names of the settings that were to be chosen."""
        return differing([row.settings for row in (*self.competing, *self.others)])

    def sentences(self) -> list[str]:
        """Say as flags to type what was chosen and from what, and what did not compete and why."""
        count = len(self.competing)
        chosen = (
            f"{self._typed(self.best)} is the best of {count} setting{'s' * (count != 1)} by the mean validation score "
            f"of {seeds_text(self.seeds)}, {self.score:.4f}."
        )
        return [chosen, *(f"{self._typed(row)} does not compete: {self._fault(row)}." for row in self.others)]

    def _typed(self, row: Row) -> str:
        return f"{row.config.recipe} {flags(row.config, self.names)}"

    def _fault(self, row: Row) -> str:
        if missing := sorted({*self.seeds} - {*row.seeds}):
            shared = [k for k in self.seeds if all(k in row.seeds for row in (*self.competing, *self.others))]
            return f"it lacks {seeds_text(missing)}{f' (all have {seeds_text(shared)})' if shared else ''}"
        return "its validation score is not finite"


def choose(rows: Sequence[Row], seeds: Sequence[int] | None = None) -> Choice:
    """Return the choice among the rows of one recipe.

    Args:
        rows: the settings.
        seeds: by whose scores they are compared; None: all that any row has.

    Raises:
        NoChoice: there is no validation score, or no row has a finite one for each of the seeds.
    """
    recipe = rows[0].config.recipe
    if any("score" not in run.summary.get("validation", {}) for row in rows for run in row.runs):
        raise NoChoice(
            f"{recipe} has {len(rows)} settings, but runs without validation metrics to choose by "
            f"(protocol {rows[0].config.protocol}). {_remedy(recipe)}"
        )
    wanted = sorted({seed for row in rows for seed in row.seeds} if seeds is None else {*seeds})
    scores = [_score(row, wanted) for row in rows]
    competing = {k: score for k, score in enumerate(scores) if score is not None}
    if not competing:
        raise NoChoice(
            f"{recipe}: none of {len(rows)} settings has a finite validation score for each of {seeds_text(wanted)}. "
            "Train what is lacking, or name only the runs of the seeds that all have."
        )
    best = max(competing, key=competing.__getitem__)
    others = [row for k, row in enumerate(rows) if k not in competing]
    return Choice(rows[best], competing[best], {rows[k]: score for k, score in competing.items()}, others, wanted)


def _remedy(recipe: str) -> str:
    honest, _, whose = recipe.rpartition("_")
    if whose in ("paper", "official") and honest in RECIPES:
        return f"Tune {honest}, which holds some data out, and train {recipe} with what was chosen."
    return "Tune with --protocol honest and --data.validation-share 0.1, and train this with what was chosen."


def _score(row: Row, seeds: Sequence[int]) -> float | None:
    """Return the validation score, mean over the seeds; None if one is lacking or was not finite."""
    found = {seed: result.score for seed, result in zip(row.seeds, row.results, strict=True)}
    scores = [score for seed in seeds if (score := found.get(seed)) is not None]
    return fmean(scores) if len(scores) == len(seeds) else None


def tuned(table: Table, seeds: Sequence[int] | None = None) -> tuple[Table, list[str]]:
    """Return the table with the chosen row of each recipe only, and what was chosen from what, in sentences.

    A recipe of which nothing can be chosen is left out. For the ``seeds`` see :func:`choose`.
    """
    recipes = dict.fromkeys(row.config.recipe for row in table.rows)
    kept: list[Row] = []
    said: list[str] = []
    for recipe in recipes:
        rows = [row for row in table.rows if row.config.recipe == recipe]
        if len(rows) == 1:
            kept += rows
            continue
        try:
            choice = choose(rows, seeds)
        except NoChoice as error:
            said.append(str(error))
            continue
        kept.append(choice.best)
        said += choice.sentences()
    return replace(table, rows=[row for row in table.rows if row in kept]), said
