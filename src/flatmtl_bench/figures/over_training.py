"""Curves over the epochs of what was measured of each task, several measures in one picture."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure as Drawing

from flatmtl_bench.figures.base import Record
from flatmtl_bench.figures.style import curves, values, where

FEW = 6
"""Tasks up to this number have panels of their own."""
WHOSE = ("data", "method", "flat", "seed", "epoch")


def of_measure(records: Sequence[Record], label: str, name: str) -> list[Record]:
    """Return records of one measure for :func:`over_training`: its ``label`` for the axis, and its ``value``."""
    return [{**{k: r[k] for k in (*WHOSE, "task")}, "label": label, "value": r[name]} for r in records]


def over_training(records: Sequence[Record], *, size: tuple[float, float] = (3.2, 1.7)) -> Drawing:
    """Return a row of panels for each measure, and for each task a column or, with several data sets, a row.

    Of more than a few tasks it is the mean over them that is drawn.

    Args:
        records: those of :func:`of_measure`, of one or more measures.
        size: of a panel, in inches.
    """
    several = len(values(records, "data")) > 1
    placed = [_placed(record, several=several) for record in few_tasks(records)]
    return curves(placed, "epoch", "value", xlabel="epoch", ylabel="", rows="label", size=size)


def few_tasks(records: Sequence[Record]) -> list[Record]:
    """Return records with the means over the tasks in place of each task where a data set has more than a few.

    What is None is left out of a mean.

    Example:
        >>> whose = {"data": "faces", "method": "MGDA", "flat": False, "seed": 0, "epoch": 1, "label": "loss"}
        >>> [mean] = few_tasks([{**whose, "task": str(k), "value": float(k)} for k in range(9)])
        >>> mean["task"], mean["value"]
        ('mean over 9 tasks', 4.0)
    """
    found: list[Record] = []
    for data in values(records, "data"):
        some = where(records, data=data)
        count = len(values(some, "task"))
        found += some if count <= FEW else _means(some, f"mean over {count} tasks")
    return found


def _means(records: Sequence[Record], name: str) -> Iterator[Record]:
    groups: dict[Any, list[float]] = defaultdict(list)
    for record in records:
        if record["value"] is not None:
            groups[tuple((k, v) for k, v in record.items() if k not in ("task", "value"))].append(record["value"])
    return ({**dict(key), "task": name, "value": fmean(group)} for key, group in groups.items())


def _placed(record: Record, *, several: bool) -> Record:
    if several:
        return {**record, "label": f"{record['label']}\n{record['task']}"}
    return {**record, "data": f"{record['data']}, {record['task']}"}
