"""Tables as they are shown: the same cells for a terminal, Markdown, LaTeX, CSV and a page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


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
        gaps: the rows, counted from 0, that begin a group, before which there may be a small gap.
    """

    name: str
    caption: Sequence[str]
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]] = field(default_factory=list)
    names: int = 1
    gaps: Sequence[int] = ()

    def texts(self) -> list[list[str]]:
        """Return the headings and the texts of each row."""
        return [list(self.headings), *([cell.text for cell in row] for row in self.rows)]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold, without the notes; :meth:`from_dict` is the inverse."""
        rows = [[[cell.text, cell.value, cell.strong] for cell in row] for row in self.rows]
        return {**{name: getattr(self, name) for name in ("name", "caption", "headings", "names")}, "rows": rows}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Grid":
        """Return the table that :meth:`to_dict` was called on."""
        return cls(**{**values, "rows": [[Cell(*cell) for cell in row] for row in values["rows"]]})


@dataclass(frozen=True)
class Chapter:
    """Tables that belong together.

    Attributes:
        title: what they are about, in one line.
        lines: what stands above them, a sentence or more in each.
        grids: the tables, none of them empty.
    """

    title: str
    lines: Sequence[str]
    grids: Sequence[Grid]
