"""Tables for LaTeX, with the rules of the package booktabs."""

import re
from collections.abc import Sequence

from flatmtl_bench.reports.grid import Cell, Chapter, Grid

FIRST_LINE = r"% A fragment: \input it into a document with \usepackage{booktabs,graphicx}."
FITTED = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
"""What is too wide for the page is made smaller."""
ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "°": r"$^\circ$",
    "†": r"$\dagger$",
    "‡": r"$\ddagger$",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
    '"': r"\textquotedbl{}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}
SIGNED = re.compile(r"(?<![\w.])[+-](?=\d)")
"""The sign of a number; a hyphen in a word is none."""


def render(chapters: Sequence[Chapter]) -> str:
    """Return a float for each table; what stands out is bold, and a method and its flat forms stand close together."""
    parts = [FIRST_LINE]
    for chapter in chapters:
        parts += [f"% {line}" for line in (chapter.title, *chapter.lines)]
        parts += [table(grid, chapter.title) for grid in chapter.grids]
    return "\n".join(parts) + "\n"


def table(grid: Grid, title: str) -> str:
    """Return a float with a table, whose caption begins with a title."""
    columns = "l" * grid.names + "r" * (len(grid.headings) - grid.names)
    lines = [
        r"\begin{table}",
        r"\centering\small",
        rf"\caption{{{escaped(' '.join([title.rstrip('.') + '.', *grid.caption]))}}}",
        FITTED,
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        _line([escaped(heading) for heading in grid.headings]),
        r"\midrule",
    ]
    for k, row in enumerate(grid.rows):
        lines += [r"\addlinespace"] if k in grid.gaps else []
        lines.append(_line([_cell(cell) for cell in row]))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}}", r"\end{table}"])


def _line(cells: Sequence[str]) -> str:
    return rf"{' & '.join(cells)} \\"


def _cell(cell: Cell) -> str:
    text = escaped(cell.text)
    return rf"\textbf{{{text}}}" if cell.strong else text


def escaped(text: str) -> str:
    r"""Return text that LaTeX sets as it is; the sign of a number is one of mathematics.

    Example:
        >>> print(escaped("F-LS c_1=5%: -0.5 ± 0.1"))
        F-LS c\_1=5\%: $-$0.5 $\pm$ 0.1
    """
    signs = SIGNED.sub(lambda sign: f"\0{sign[0]}\0", text)  # not yet in dollars, which are escaped
    set_ = re.sub("\0(.)\0", r"$\1$", "".join(ESCAPES.get(letter, letter) for letter in signs))
    return set_.replace("Delta m", r"$\Delta m$")
