"""Test metrics against the radius of the perturbation: figure 8 of Phan et al. (2025)."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from flatmtl_bench.figures.base import Figure, Record, data_name
from flatmtl_bench.figures.style import grid, legend, look, mean_and_spread, values, where
from flatmtl_bench.output import say
from flatmtl_bench.reports.columns import columns
from flatmtl_bench.reports.pairs import is_flat_form
from flatmtl_bench.reports.reading import Run
from flatmtl_bench.reports.results import Result, Row, Table
from flatmtl_bench.reports.settings import text


@dataclass(frozen=True)
class RhoFigure(Figure):
    """Test metrics of a sweep over the radius rho, each task and their mean; a plain method stands at rho 0."""

    def measure(self, run: Run) -> Iterator[Record]:
        """Yield the test metrics of the epochs that count: of each task and, where all have one, its mean over them."""
        metrics = Result([run]).metrics
        for column in columns(run.better):
            value = column.value(metrics)
            if value is None:
                say(f"{run.path}: {column.heading} is not finite; its mean over the seeds is without this run.")
            yield {"rho": run.config.rho, "metric": column.heading, "better": column.better, "value": value}

    def records(self, tables: Sequence[Table]) -> list[Record]:
        """Return what is measured of each run; ``method`` tells it in words that leave rho out."""
        found: list[Record] = []
        for table in tables:
            for method, rows in _curves(table).items():
                whose = {"data": data_name(table, tables), "method": method, "flat": rows[0].flat}
                found += [record for row in rows for record in self._records_of(row, whose)]
        if len(values(found, "rho")) == 1:
            say(
                f"all runs have rho {found[0]['rho']:g}. For a curve: flatmtl sweep RECIPE --grid rho=0,0.5,1 --seeds 3"
            )
        return found

    def draw(self, records: Sequence[Record]) -> Drawing:
        """Return a row of panels for each metric and a column for each data set; bars show the spread of the seeds."""
        better = {record["metric"]: record["better"] for record in records}
        names, looks = values(records, "data"), look(records)
        labels = [f"test {metric}\n{direction} is better" for metric, direction in better.items()]
        drawing, axes = grid(labels, names, size=(3.2, 1.9))
        for i, metric in enumerate(better):
            for j, data in enumerate(names):
                _draw(axes[i, j], where(records, data=data, metric=metric), looks)
        for axis in axes[-1]:
            axis.set_xlabel("radius rho (0: the plain method)")
        legend(drawing, axes)
        return drawing


def _draw(axis: Axes, records: Sequence[Record], looks: Mapping[str, Any]) -> None:
    """Draw a curve for each method, with bars."""
    for method in values(records, "method"):
        radii, means, spreads = mean_and_spread(where(records, method=method), "rho", "value")
        axis.errorbar(radii, means, spreads, label=method, capsize=2.0, markersize=3.0, **looks[method])


def _curves(table: Table) -> dict[str, list[Row]]:
    """Return the rows of a table that differ in rho only, the flat form first, by what they have in common.

    A plain method is rho 0 of each of its flat forms that has no row at rho 0 itself; without one it is alone.
    """
    named = zip(table.rows, table.distinct(), strict=True)
    labels = {row: f"{row.config.label} {text({k: v for k, v in s.items() if k != 'rho'})}".strip() for row, s in named}
    found: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(table.rows, key=lambda row: not row.flat):
        forms = dict.fromkeys(labels[other] for other in table.rows if _is_flat_form(other, row))
        if not forms:
            found[labels[row]].append(row)
        for label in forms:
            if any(other.config.rho == 0 for other in found[label]):
                say(f"{label} has runs of its own at rho 0, so those of {labels[row]} are not in its curve.")
            else:
                found[label].append(row)
    return found


def _is_flat_form(row: Row, plain: Row) -> bool:
    """Whether a row is of the flat form of a plain method, which it becomes at rho 0."""
    return is_flat_form(row, plain) and not row.config.method.rho_heads
