"""Tables as they are shown: the same cells for a terminal, Markdown, LaTeX, CSV and a page."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cell:
    """What stands in one place of a table.

    Attributes:
        text: as it is read.
        value: what the place is sorted by, in the unit of the text; None: by the text.
        strong: whether it stands out, as the best of a column does.
        note: more that there is to say, for formats that can hide it: the value of each seed, for example.
    """

    text: str
    value: float | None = None
    strong: bool = False
    note: str = ""


@dataclass(frozen=True)
class Grid:
    """A table as it is shown.

    Attributes:
        name: one word that tells it from the other tables of a section: ``results``, ``differences``, ``cost``.
        caption: what it shows, and how its numbers are meant, in sentences.
        headings: of the columns.
        rows: of as many cells as there are headings.
        names: how many columns at the left say what a row is.
    """

    name: str
    caption: Sequence[str]
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]] = field(default_factory=list)
    names: int = 1

    def texts(self) -> list[list[str]]:
        """Return the headings and the texts of each row."""
        return [list(self.headings), *([cell.text for cell in row] for row in self.rows)]
