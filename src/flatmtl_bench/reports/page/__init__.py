"""One self-contained HTML page of a report: the finding, tables to sort, curves to choose from, every run in full."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from flatmtl_bench.reports.grid import Grid
from flatmtl_bench.reports.page.curves import curves
from flatmtl_bench.reports.page.looks import looks
from flatmtl_bench.reports.page.values import runs_grid, values_of
from flatmtl_bench.reports.section import Section, chapters

GENERATOR = '<meta name="generator" content="flatmtl">'


def render(
    sections: Sequence[Section], *, title: str | None = None, finding: Sequence[str] = (), figures: Sequence[Path] = ()
) -> str:
    """Return the page as HTML that loads nothing.

    Args:
        sections: the tables; the runs in their rows are those that the page shows.
        title: the heading; None: how many runs and tables there are.
        finding: sentences that stand at the top.
        figures: files to link to, each as it is given.
    """
    values = values_of(section.table for section in sections)
    template = _environment().get_template("page.html.jinja")
    return template.render(
        title=title or _title(sections, len(values["runs"])),
        finding=finding,
        sections=_described(sections),
        figures=[(path.as_posix(), quote(path.as_posix())) for path in figures],
        values=values,
        plotly=get_plotlyjs(),
        generator=GENERATOR,
    )


def is_ours(path: Path) -> bool:
    """Whether a file is a page that :func:`render` made, which may be replaced."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return GENERATOR in file.read(2000)


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("flatmtl_bench.reports", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests["noted"] = _noted
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment


def _noted(grid: Grid) -> bool:
    return any(cell.note for row in grid.rows for cell in row)


def _title(sections: Sequence[Section], runs: int) -> str:
    tables = len(sections)
    return f"{runs} run{'s' * (runs != 1)} in {tables} table{'s' * (tables != 1)}"


def _described(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """Return what the template is told of each section."""
    look_of = looks(section.table for section in sections)
    found: list[dict[str, Any]] = []
    for section, chapter in zip(sections, chapters(sections), strict=True):
        table, names = section.table, section.table.names()
        found.append(
            {
                "title": chapter.title,
                "lines": chapter.lines,
                "grids": chapter.grids,
                "looks": {name: look_of[row] for row, name in names.items()},
                "runs": runs_grid(table),
                "curves": curves(table, list(names.values()), look_of),
            }
        )
    return found
