"""Numbers that are printed in the paper, in the names and units that runs have."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

PAPER = "Phan et al. (2025)"
NAMES: Mapping[str, tuple[str, float]] = {
    "mIoU": ("miou/segmentation", 0.01),
    "pixel accuracy": ("pixel_accuracy/segmentation", 0.01),
    "depth abs err": ("abs_err/depth", 1.0),
    "depth rel err": ("rel_err/depth", 1.0),
    "normal angle mean": ("mean/normals", 1.0),
    "normal angle median": ("median/normals", 1.0),
    "normal within 11.25": ("within_11.25/normals", 0.01),
    "normal within 22.5": ("within_22.5/normals", 0.01),
    "normal within 30": ("within_30/normals", 0.01),
}
"""Of each column of the paper's tables of scenes the metric of a run, and its unit in that of the metric."""
SCENES = {"nyuv2": (3, "NYUv2"), "cityscapes": (4, "CityScapes")}
"""Number of the paper's table and name of the data there, by the name of our data set."""


@dataclass(frozen=True)
class Printed:
    """A row of a table of scenes: what is printed, by the paper's columns.

    Attributes:
        table: its number.
        columns: the paper's numbers, in its units.
    """

    table: int
    columns: Mapping[str, float]

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers under the names and in the units of runs."""
        return {NAMES[column][0]: NAMES[column][1] * value for column, value in self.columns.items()}

    def mapping(self) -> str:
        """Return which column was taken for which metric, and its number."""
        percent = {column: " %" if NAMES[column][1] != 1.0 else "" for column in self.columns}
        return ", ".join(f"{NAMES[c][0]} = {c} {value:g}{percent[c]}" for c, value in self.columns.items())


@dataclass(frozen=True)
class Number:
    """A number that is printed in a table.

    Attributes:
        mean: as printed, in the units of the paper.
        sd: standard deviation over runs; None where none is printed.
        better: ``"higher"`` or ``"lower"``.
    """

    mean: float
    sd: float | None
    better: str

    def is_better_than(self, other: "Number") -> bool:
        """Whether it is the better one of the two."""
        return self.mean > other.mean if self.better == "higher" else self.mean < other.mean


def printed(table: int, dataset: str, method: str, *, flat: bool) -> dict[str, Number]:
    """Return a row of a table by the names of its columns; nothing if there is no such row.

    Example:
        >>> printed(2, "CelebA", "CAGrad", flat=True)
        {'mean classification error %': Number(mean=8.22, sd=None, better='lower')}
    """
    wanted = (table, dataset, method, flat)
    return {
        entry["metric"]: Number(entry["mean"], entry["std"], "higher" if entry["higher_is_better"] else "lower")
        for entry in _entries()
        if (entry["table"], entry["dataset"], entry["method"], entry["flat"]) == wanted
    }


def rows(table: int) -> list[tuple[str, str, bool]]:
    """Return the rows of a table: data, method, and whether it is the flat form."""
    found = ((e["dataset"], e["method"], e["flat"]) for e in _entries() if e["table"] == table)
    return list(dict.fromkeys(found))


def single_task(dataset: str) -> Printed:
    """Return the row of single-task learning for a data set, ``nyuv2`` or ``cityscapes``.

    Example:
        >>> single_task("cityscapes").mapping()
        'miou/segmentation = mIoU 74.01 %, pixel_accuracy/segmentation = pixel accuracy 93.16 %, abs_err/depth = depth
        abs err 0.0125, rel_err/depth = depth rel err 27.77'
    """
    number, name = SCENES[dataset]
    columns = printed(number, name, "STL", flat=False)
    return Printed(number, {name: number.mean for name, number in columns.items() if name in NAMES})


@cache
def _entries() -> list[dict[str, Any]]:
    """Return every number of the paper's tables, as they are in the package."""
    return json.loads(files("flatmtl_bench.reports").joinpath("paper_tables.json").read_text(encoding="utf-8"))
