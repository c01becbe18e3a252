"""Tables for the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def results(rows: Sequence[Sequence[str]]) -> Table:
    """Return a table with a line for each quantity, from rows of headings and methods: it fits 80 columns."""
    quantities = list(zip(*rows, strict=True))
    table = Table("")
    for method in quantities[0][1:]:
        table.add_column(method, justify="right")
    for quantity in quantities[1:]:
        table.add_row(*quantity)
    return table


def print_lines(rows: Sequence[Sequence[str]]) -> None:
    """Print a table with a line for each row after the headings; only a terminal folds what is too wide for it."""
    table = Table(*rows[0], box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows[1:]:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console.width = sum(max(map(len, column)) + len("  ") for column in zip(*rows, strict=True))
    console.print(table)
