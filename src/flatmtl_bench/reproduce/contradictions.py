"""What the paper says of its tables and their own numbers do not bear out."""

from collections.abc import Iterator
from dataclasses import dataclass

from flatmtl_bench.reports import paper
from flatmtl_bench.reports.delta import delta_m

ROUNDING = 0.15
"""By how many points a Delta m may differ from that of the printed metrics: a depth error of 0.0125 is rounded by up to
0.4 %, and is one of four metrics, in the method and in the baseline."""
STL_TABLES = {"NYUv2": 3, "CityScapes": 4}
"""Where the row is that Delta m is relative to."""


@dataclass(frozen=True)
class Contradiction:
    """A sentence of the paper and the cells of its table that speak against it.

    Attributes:
        table: its number.
        data: as it is printed there.
        said: the sentence, in short; none: that flat methods are ahead is what one would take from the whole paper.
        against: two cells, each a method, whether it is flat, and a column: by the sentence the first is the better
            one, by the table the second.
    """

    table: int
    data: str
    said: str
    against: tuple[tuple[str, bool, str], tuple[str, bool, str]]

    def numbers(self) -> tuple[paper.Number, paper.Number]:
        """Return what is printed in the two cells."""
        first, second = (
            paper.printed(self.table, self.data, method, flat=flat)[column] for method, flat, column in self.against
        )
        return first, second

    def sentence(self) -> str:
        """Return what is said, and what the table says."""
        (first, flat, column), (second, other_flat, _) = self.against
        ours, theirs = self.numbers()
        names = [f"F-{name}" if is_flat else name for name, is_flat in ((first, flat), (second, other_flat))]
        numbers = f"{column} is {theirs.mean:g} for {names[1]} and {ours.mean:g} for {names[0]}."
        if not self.said:
            return f"In table {self.table} not every flat method is ahead of every plain one: {numbers}"
        return f"The paper says of table {self.table}: {self.said}. But its {numbers}"


DELTA, DEPTH = "delta m %", "depth abs err"
CONTRADICTIONS = (
    Contradiction(
        3,
        "NYUv2",
        "F-CAGrad and F-IMTL outperform competitors by large margins across all tasks",
        (("CAGrad", True, DELTA), ("Nash-MTL", False, DELTA)),
    ),
    Contradiction(
        3,
        "NYUv2",
        "F-CAGrad and F-IMTL outperform competitors by large margins across all tasks",
        (("IMTL", True, DEPTH), ("Nash-MTL", False, DEPTH)),
    ),
    Contradiction(
        4,
        "CityScapes",
        "",
        (("CAGrad", True, DELTA), ("UW", False, DELTA)),
    ),
    Contradiction(
        4,
        "CityScapes",
        "",
        (("CAGrad", True, DELTA), ("Nash-MTL", False, DELTA)),
    ),
    Contradiction(
        7,
        "NYUv2",
        "on segmentation and depth F-IMTL achieves the highest scores",
        (("IMTL", True, DEPTH), ("LS", True, DEPTH)),
    ),
)
SMALL_MARGIN = (  # no contradiction, but no large margin
    "The paper says of table 5 that aggregating apart is better than directly by a large margin across all tasks; its "
    "depth abs err is {apart:g} against {direct:g}."
)


def sentences(table: int) -> list[str]:
    """Return what contradicts what the paper says of one of its tables, from the printed numbers."""
    found = [each.sentence() for each in CONTRADICTIONS if each.table == table]
    return [*found, *_small_margin(table), *_delta_m(table)]


def _small_margin(table: int) -> list[str]:
    if table != 5:
        return []
    apart, direct = (
        paper.printed(5, "CityScapes", f"Ours ({form})", flat=True)[DEPTH].mean for form in ("individual", "direct")
    )
    return [SMALL_MARGIN.format(apart=apart, direct=direct)]


def _delta_m(table: int) -> list[str]:
    """Return which Delta m of a table is not that of its printed metrics."""
    return [
        f"Delta m of {label} in table {table} is printed as {shown:+.2f}, and is {found:+.2f} from the printed metrics."
        for label, shown, found in _recomputed(table)
        if abs(shown - found) > ROUNDING
    ]


def _recomputed(table: int) -> Iterator[tuple[str, float, float]]:
    """Yield of each row its Delta m as it is printed and as it follows from the other columns."""
    for data, method, flat in paper.rows(table):
        numbers = paper.printed(table, data, method, flat=flat)
        if (shown := numbers.pop(DELTA, None)) is not None:
            stl = paper.printed(STL_TABLES[data], data, "STL", flat=False)
            metrics, baseline = ({name: row[name].mean for name in numbers} for row in (numbers, stl))
            better = {name: number.better for name, number in numbers.items()}
            yield f"{'F-' * flat}{method}", shown.mean, delta_m(metrics, baseline, better)
