"""Pairs of a plain method and its flat form: the rows of a table that are compared seed by seed."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from flatmtl_bench.reports.baseline import Baseline
from flatmtl_bench.reports.columns import DELTA_M, Column, Values
from flatmtl_bench.reports.difference import Difference, difference
from flatmtl_bench.reports.results import FLAT, Result, Row, Table, seeds_text


@dataclass(frozen=True)
class Pair:
    """Two rows of a table, usually a plain method and its flat form.

    Attributes:
        plain: the first row.
        flat: the second one, of which differences and ratios are told.
    """

    plain: Row
    flat: Row

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds that both have."""
        return [seed for seed in self.plain.seeds if seed in self.flat.seeds]

    @property
    def left_out(self) -> list[int]:
        """The seeds that only one of them has."""
        return sorted({*self.plain.seeds} ^ {*self.flat.seeds})

    @property
    def results(self) -> tuple[list[Result], list[Result]]:
        """What both came to, with equal seeds in equal places."""
        return self._shared(self.plain), self._shared(self.flat)

    def _shared(self, row: Row) -> list[Result]:
        by_seed = dict(zip(row.seeds, row.results, strict=True))
        return [by_seed[seed] for seed in self.seeds]

    def difference(self, column: Column, baseline: Baseline | None = None) -> Difference | None:
        """Return the paired difference in a column or, of :data:`DELTA_M`, in Delta m against a baseline.

        None if a metric was not finite, or one of the two has no such metric.
        """
        first, second = (self._values(row, column, baseline) for row in (self.plain, self.flat))
        return difference(first, second, column.better)

    def _values(self, row: Row, column: Column, baseline: Baseline | None) -> Values:
        values = baseline.delta_m(row) if column is DELTA_M and baseline is not None else row.values(column)
        by_seed = dict(zip(row.seeds, values, strict=False))  # of a metric that the row has not, there are none
        return [by_seed.get(seed) for seed in self.seeds]


def is_flat_form(flat: Row, plain: Row) -> bool:
    """Whether a row is of the flat form of a plain method, all else being the same."""
    ours, theirs = ({k: v for k, v in row.settings.items() if k not in (*FLAT, "recipe")} for row in (flat, plain))
    return flat.flat and not plain.flat and flat.alone == plain.alone and ours == theirs


def pairs(table: Table, compared: tuple[str, str] | None = None) -> tuple[list[Pair], list[str]]:
    """Return the pairs of a table that have seeds in common, and in sentences what is not compared.

    Args:
        table: whose rows are paired.
        compared: the names of two recipes, each setting of the one against each of the other; None: plain methods
            against each of their flat forms.
    """
    found = [Pair(plain, flat) for flat in table.rows for plain in table.rows if _belong(plain, flat, compared)]
    names = table.names()
    said = [sentence for pair in found if (sentence := _left_out(pair, names))]
    if compared is None:
        said += _without_plain(table, {pair.flat for pair in found})
    return [pair for pair in found if pair.seeds], list(dict.fromkeys(said))


def _belong(plain: Row, flat: Row, compared: tuple[str, str] | None) -> bool:
    if compared is None:
        return is_flat_form(flat, plain)
    return plain is not flat and (plain.config.recipe, flat.config.recipe) == compared


def _left_out(pair: Pair, names: Mapping[Row, str]) -> str:
    if not pair.left_out:
        return ""
    both = " and ".join(dict.fromkeys(names[row] for row in (pair.plain, pair.flat)))
    if not pair.seeds:
        return f"{both} have no seed in common, so they are not compared."
    return f"{both} are compared without {seeds_text(pair.left_out)}, which only one of them has."


def _without_plain(table: Table, paired: Set[Row]) -> list[str]:
    """Return a sentence on flat methods whose plain form is there, but with other settings only."""
    plain = {row.config.label for row in table.rows if not row.flat}
    alone = [row.config for row in table.rows if row.flat and row not in paired]
    return [
        f"{label} ({recipe}) is not compared: {label.removeprefix('F-')} has other settings. --compare takes two "
        "recipes whatever their settings."
        for label, recipe in dict.fromkeys((config.label, config.recipe) for config in alone)
        if label.removeprefix("F-") in plain
    ]


def chosen(table: Table, compared: tuple[str, str]) -> Sequence[Row]:
    """Return the rows of two recipes; nothing if one of them has none."""
    rows = [row for row in table.rows if row.config.recipe in compared]
    return rows if {row.config.recipe for row in rows} == {*compared} else []
