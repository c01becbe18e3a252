"""Tables for the terminal."""

import re
import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flatmtl_bench.reports.grid import Chapter, Grid

GAP = 2
"""Blanks between columns."""
WIDEST = 32
"""Letters of a column of names on a terminal."""


def results(rows: Sequence[Sequence[str]]) -> Table:
    """Return a table with a line for each quantity, from rows of headings and methods: it fits 80 columns."""
    quantities = list(zip(*rows, strict=True))
    table = Table("")
    for method in quantities[0][1:]:
        table.add_column(method, justify="right")
    for quantity in quantities[1:]:
        table.add_row(*quantity)
    return table


def print_text(text: str) -> None:
    """Print a paragraph; only a terminal folds it."""
    console = Console()
    console.print(Text(text), soft_wrap=not console.is_terminal)


def print_lines(rows: Sequence[Sequence[str | Text]], names: int = 1) -> None:
    """Print a table with a line for each row after the headings.

    Only a terminal folds what is too wide for it: the headings, and the columns, which come in blocks that each begin
    with the first ``names`` columns.
    """
    console = Console()
    columns = [[Text(cell) if isinstance(cell, str) else cell for cell in column] for column in zip(*rows, strict=True)]
    if console.is_terminal:
        columns = [_folded(column) for column in columns]
        widths = [min(_width(column), WIDEST) for column in columns]
        blocks = _blocks(widths, names, console.width)
    else:
        widths, blocks = list(map(_width, columns)), [range(len(columns))]
        console.width = sum(widths) + GAP * len(widths)
    for k, block in enumerate(blocks):
        if k:
            console.print()
        console.print(_table([columns[j] for j in block], [widths[j] for j in block]))


def print_chapters(chapters: Sequence[Chapter]) -> None:
    """Print the lines and tables of each chapter, with an empty line before each but the first thing."""
    for k, chapter in enumerate(chapters):
        for line in (*([""] if k else []), chapter.title, *chapter.lines):
            print_text(line)
        for grid in chapter.grids:
            print_text("")
            print_grid(grid)


def print_grid(grid: Grid) -> None:
    """Print a table after what there is to say of it; what stands out is bold, and has an asterisk."""
    for line in grid.caption:
        print_text(line)
    rows = [[Text(f"*{cell.text}", "bold") if cell.strong else Text(cell.text) for cell in row] for row in grid.rows]
    print_lines([grid.headings, *rows], grid.names)


def _width(column: Sequence[Text]) -> int:
    return max(line.cell_len for cell in column for line in cell.split(allow_blank=True))


def _folded(column: Sequence[Text]) -> list[Text]:
    """Return a column whose heading is in lines that are no wider than need be, folded at blanks and dotted names.

    A unit stays with its word.
    """
    parts = re.sub(r"\.(?=[a-z])", ". ", column[0].plain).replace(", ", ",\N{NO-BREAK SPACE}")
    widths = [*map(len, parts.split(" ")), *(_width([cell]) for cell in column[1:])]
    lines = textwrap.wrap(parts, max(widths), break_long_words=False)
    return [Text("\n".join(line.replace(". ", ".") for line in lines)), *column[1:]]


def _blocks(widths: Sequence[int], names: int, width: int) -> list[list[int]]:
    """Return which columns are printed together: as many as there is room for, after those of names.

    Example:
        >>> _blocks([8, 6, 6, 6], names=1, width=24)
        [[0, 1, 2], [0, 3]]
    """
    first = list(range(names))
    blocks = [first]
    for k in range(names, len(widths)):
        room = width - sum(widths[j] + GAP for j in blocks[-1])
        if widths[k] > room and len(blocks[-1]) > names:
            blocks.append([*first])
        blocks[-1] = [*blocks[-1], k]
    return blocks


def _table(columns: Sequence[Sequence[Text]], widths: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False)
    for k, (column, width) in enumerate(zip(columns, widths, strict=True)):
        table.add_column(column[0], justify="right" if k else "left", max_width=width, overflow="fold")
    for cells in zip(*(column[1:] for column in columns), strict=True):
        table.add_row(*cells)
    return table
