"""One self-contained HTML page: the finding, the table, the curves, and what they were made with."""

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from flatmtl_bench.reports.comparison import Comparison
from flatmtl_bench.reports.reading import Run

GENERATOR = '<meta name="generator" content="flatmtl">'
CURVES = (
    ("training loss, mean of the tasks", "", "train/loss"),
    ("share of steps with conflict", "%", "train/conflict"),
    ("validation accuracy", "%", "validation/accuracy"),
    ("test accuracy", "%", "test/accuracy"),
)


def render(comparison: Comparison) -> str:
    """Return the page that compares a plain method with its flat form."""
    environment = Environment(
        loader=PackageLoader("flatmtl_bench.reports", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    first = comparison.plain[0]
    return environment.get_template("page.html.jinja").render(
        title=f"{comparison.labels[1]} against {comparison.labels[0]}",
        setting=comparison.setting,
        finding=comparison.finding(),
        table=comparison.table(),
        protocol=first.config.protocol,
        data=first.summary["data"],
        curves=[_curve(comparison, *curve) for curve in CURVES],
        runs=[*comparison.plain, *comparison.flat],
        settings=[_settings(run) for run in (comparison.plain[0], comparison.flat[0])],
        environment=_flatten(first.environment),
        plotly=get_plotlyjs(),
        generator=GENERATOR,
    )


def is_ours(path: Path) -> bool:
    """Whether a file is a page that :func:`render` made, which may be replaced."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return GENERATOR in file.read(2000)


def _curve(comparison: Comparison, title: str, unit: str, name: str) -> dict[str, Any]:
    groups = zip(comparison.labels, (comparison.plain, comparison.flat), strict=True)
    return {
        "title": title,
        "unit": unit,
        "late": name.endswith("/accuracy"),
        "methods": [{"label": label, "seeds": [values(run, name, unit) for run in runs]} for label, runs in groups],
    }


def values(run: Run, name: str, unit: str) -> list[float | None]:
    """Return a metric over the epochs, the mean over tasks if it is one of each task."""
    per_task = [run.series(f"{name}/{task}") for task in run.tasks] if name not in run.rows[0] else [run.series(name)]
    scale = 100 if unit == "%" else 1
    epochs = zip(*per_task, strict=True)
    return [None if None in values else scale * sum(values) / len(values) for values in epochs]


def _settings(run: Run) -> dict[str, str]:
    return _flatten(run.config.to_dict())


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested values under dotted names, as the flags have them."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        nested = isinstance(value, dict) and value
        flat |= _flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": _text(value)}
    return flat


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
