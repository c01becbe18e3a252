"""How the methods of a page are drawn, so that each can be told from the others without colour."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from flatmtl_bench.reports.results import Row, Table

HUES = 8
"""Colours of the page's style sheet."""
SYMBOLS = {
    "": "",
    "circle": "●",
    "square": "■",
    "diamond": "◆",
    "triangle-up": "▲",
    "cross": "✚",
    "x": "✖",
    "star": "★",
}
"""Marks on lines by Plotly's names, and as letters."""


@dataclass(frozen=True)
class Look:
    """How a method is drawn.

    Attributes:
        hue: number of its colour, which a plain method shares with its flat form.
        flat: whether the line is solid, as of flat methods, or dashed.
        symbol: on the line, for what shares hue and form with others; empty if none.
    """

    hue: int
    flat: bool
    symbol: str

    @property
    def letter(self) -> str:
        """The symbol as a letter."""
        return SYMBOLS[self.symbol]


def looks(tables: Iterable[Table]) -> dict[Row, Look]:
    """Return the look of each row; a method has the same hue in all tables."""
    hues: dict[str, int] = {}
    found: dict[Row, Look] = {}
    for table in tables:
        alike: Counter[tuple[int, bool]] = Counter()
        for row in table.rows:
            hue = hues.setdefault(row.config.label.removeprefix("F-"), len(hues)) % HUES
            found[row] = Look(hue, row.flat, list(SYMBOLS)[alike[hue, row.flat] % len(SYMBOLS)])
            alike[hue, row.flat] += 1
    return found
