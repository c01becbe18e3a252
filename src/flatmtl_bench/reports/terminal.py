"""Tables for the terminal."""

from collections.abc import Sequence

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
