"""Tables in the Markdown of GitHub."""

import re
from collections.abc import Sequence

from flatmtl_bench.reports.grid import Cell, Chapter, Grid


def render(chapters: Sequence[Chapter]) -> str:
    """Return a heading, the lines and the tables of each chapter."""
    return "\n".join(map(_chapter, chapters))


def _chapter(chapter: Chapter) -> str:
    paragraphs = [f"## {escaped(chapter.title)}", *map(escaped, chapter.lines)]
    for grid in chapter.grids:
        paragraphs += [*map(escaped, grid.caption), table(grid)]
    return "\n\n".join(paragraphs) + "\n"


def table(grid: Grid) -> str:
    r"""Return a table, what stands out in bold.

    Example:
        >>> print(table(Grid("results", [], ["method", "a|b, %"], [[Cell("LS"), Cell("9.5", 9.5, strong=True)]])))
        | method | a\|b, % |
        | :-- | --: |
        | LS | **9.5** |
    """
    rule = [":--" if k < grid.names else "--:" for k in range(len(grid.headings))]
    rows = [[_cell(cell) for cell in row] for row in grid.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [list(map(escaped, grid.headings)), rule, *rows])


def _cell(cell: Cell) -> str:
    return f"**{escaped(cell.text)}**" if cell.strong else escaped(cell.text)


def escaped(text: str) -> str:
    r"""Return text in which nothing is a mark.

    Example:
        >>> print(escaped("rel_err/depth [0.1, 0.2] <b>"))
        rel\_err/depth \[0.1, 0.2\] \<b>
    """
    return re.sub(r"([\\`*_\[\]<|])", r"\\\1", text)
