"""The tables of pairs: differences with their intervals, and what a step costs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flatmtl_bench.reports import cost
from flatmtl_bench.reports.baseline import Baseline
from flatmtl_bench.reports.columns import DELTA_M, Column
from flatmtl_bench.reports.difference import LEVEL, Difference
from flatmtl_bench.reports.grid import Cell, Grid
from flatmtl_bench.reports.pairs import Pair
from flatmtl_bench.reports.results import seeds_text

Names = Mapping[Pair, str]
"""Of each pair how it is called."""
UNKNOWN = "a machine that env.json does not tell"
DIFFERENCES = (
    f"Differences, {{second}} less {{first}} with the same seed: mean [{100 * LEVEL:.0f} % interval of the mean, "
    "Student's t], and with how many of the seeds {second} is better. Marked: the interval lies on the good side of 0. "
    "The intervals are not corrected for the number of comparisons."
)
COST = (
    "Cost: median over the steps of a run, then mean ± standard deviation over the seeds; of single-task learning a "
    "step of one task. What else ran on the machine slows a step down, and is not known here: times are rough. Ratio: "
    "{second} over {first}. The paper reports about twice the time and memory of the plain "
    "method. Conflict: share of task pairs whose gradients conflict, over the whole training."
)


def differences(names: Names, columns: Sequence[Column], baseline: Baseline | None, words: tuple[str, str]) -> Grid:
    """Return a row for each pair, with the paired difference in each column; ``words`` say what its two rows are."""
    rows = [
        [
            Cell(name),
            _seeds(pair),
            *(_difference(pair, column, pair.difference(column, baseline)) for column in columns),
        ]
        for pair, name in names.items()
    ]
    caption = DIFFERENCES.format(first=words[0], second=words[1])
    return Grid("differences", [caption], ["pair", "seeds", *(column.heading for column in columns)], rows)


def _seeds(pair: Pair) -> Cell:
    return Cell(str(len(pair.seeds)), len(pair.seeds), note=seeds_text(pair.seeds))


def _difference(pair: Pair, column: Column, found: Difference | None) -> Cell:
    if found is None:
        return Cell("-", note="a metric was not finite, or is not there")
    each = [f"seed {seed}: {value:{column.form}}" for seed, value in zip(pair.seeds, found.values, strict=True)]
    ties = [f"equal with {found.ties}"] if found.ties else []
    return Cell(found.text(column.form), found.mean, found.clear, ", ".join([*each, *ties]))


def costs(names: Names, words: tuple[str, str]) -> Grid:
    """Return a row for each pair, with what a step of each costs; ``words`` say what its two rows are."""
    headings = [
        f"{quantity.heading}, {word}"
        for quantity in cost.QUANTITIES
        for word in (*words, *(["ratio"] if quantity.ratio else []))
    ]
    rows = [[Cell(name), *(cell for q in cost.QUANTITIES for cell in _cost(pair, q))] for pair, name in names.items()]
    caption = [COST.format(first=words[0], second=words[1]), *_machines(names)]
    return Grid("cost", caption, ["pair", *headings], rows)


def _cost(pair: Pair, quantity: cost.Quantity) -> list[Cell]:
    values = [quantity.values(results) for results in pair.results]
    cells = [Cell(cost.text(some, quantity.form), cost.mean(some)) for some in values]
    ratios = quantity.ratios(pair)
    return [*cells, Cell(cost.text(ratios, ".2f"), cost.mean(ratios))] if quantity.ratio else cells


def _machines(names: Names) -> list[str]:
    """Return sentences on where the runs of pairs were made; if not in one place, times have no ratio."""
    several = [
        f"No ratio of times of {name}, whose runs were made on {_listed(pair)}."
        for pair, name in names.items()
        if not cost.comparable(pair)
    ]
    known = dict.fromkeys(_listed(pair) for pair in names if cost.comparable(pair))
    return [*([f"Made on {'; '.join(known)}."] if known else []), *several]


def _listed(pair: Pair) -> str:
    return " and on ".join(machine or UNKNOWN for machine in cost.machines(pair))


def to_dict(pair: Pair, columns: Sequence[Column], baseline: Baseline | None) -> dict[str, Any]:
    """Return what is known of a pair as plain values: metrics in the units of ``summary.json``, nothing rounded."""
    return {
        "plain": pair.plain.config.recipe,
        "flat": pair.flat.config.recipe,
        "seeds": pair.seeds,
        "left_out": pair.left_out,
        "differences": {c.name: _plain(pair.difference(replace(c, scale=1.0))) for c in columns},
        "delta_m": None if baseline is None else _plain(pair.difference(DELTA_M, baseline)),
        "cost": cost.to_dict(pair),
    }


def _plain(found: Difference | None) -> dict[str, Any] | None:
    return None if found is None else found.to_dict()
