"""All numbers of a report as one long table, a row for each seed and metric: what pandas and R read."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flatmtl_bench.reports.cost import QUANTITIES
from flatmtl_bench.reports.results import Row
from flatmtl_bench.reports.section import Section
from flatmtl_bench.reports.settings import Settings, text

FIELDS = (
    *("data", "source", "test_data", "model", "width", "epochs", "protocol", "averaging"),
    *("recipe", "method", "flat", "rho", "settings", "seed", "metric", "value"),
)
"""Of the table, of the method, and of the number."""


def render(sections: Sequence[Section]) -> str:
    """Return the table as CSV: metrics in the units of ``summary.json``, nothing rounded.

    A value that was not finite is left empty.
    """
    written = io.StringIO()
    writer = csv.DictWriter(written, FIELDS, lineterminator="\n")
    writer.writeheader()
    for section in sections:
        writer.writerows(_rows(section))
    return written.getvalue()


def _rows(section: Section) -> Iterator[dict[str, Any]]:
    config = section.table.config
    common = {
        "data": config.data.name,
        "test_data": section.table.fingerprint,
        **{name: getattr(config, name) for name in ("source", "model", "width", "epochs", "protocol", "averaging")},
    }
    for row, settings in zip(section.table.rows, section.table.distinct(), strict=True):
        for metric, values in _values(section, row).items():
            for seed, value in zip(row.seeds, values, strict=True):
                yield {**common, **_method(row, settings), "seed": seed, "metric": metric, "value": value}


def _method(row: Row, settings: Settings) -> dict[str, Any]:
    config = row.config
    own = {"recipe": config.recipe, "method": config.label, "flat": row.flat, "rho": config.rho}
    return {**own, "settings": text(settings)}


def _values(section: Section, row: Row) -> Mapping[str, Sequence[float | None]]:
    """Return each quantity of the row with its value of each seed."""
    names = [name for name in section.table.better if name in row.results[0].metrics]
    found = {name: [result.metrics[name] for result in row.results] for name in names}
    if section.baseline is not None and not section.baseline.differing(row):
        found["delta_m"] = list(section.baseline.delta_m(row))
    costs = {quantity.name: list(quantity.values(row.results)) for quantity in QUANTITIES}
    return {**found, **{name: values for name, values in costs.items() if any(v is not None for v in values)}}
