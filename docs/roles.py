"""Show the roles of our docstrings (``:math:`` and its like) as Markdown in the built reference."""

import re
import textwrap
from typing import Any

import griffe

BLOCK = re.compile(r"^(?P<indent> *)\.\. math::[ ]*\n(?P<body>(?:(?P=indent)[ ]+\S.*\n?|[ ]*\n)+)", re.MULTILINE)


class Roles(griffe.Extension):
    """Rewrite the docstring of every object once it is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
    r"""Return text with formulas as MathJax takes them, and names as code.

    Example:
        >>> to_markdown("for :math:`s > 0`, see :class:`~flatmtl.SAM`")
        'for \\(s > 0\\), see `SAM`'
    """
    text = BLOCK.sub(_block, text).replace("Example:\n", "Examples:\n")
    text = re.sub(r":math:`([^`]*)`", r"\\\\(\1\\\\)", text).replace(r"\\(", r"\(").replace(r"\\)", r"\)")
    text = re.sub(r":[a-z]+:`~(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    return re.sub(r":[a-z]+:`([^`]*)`", r"`\1`", text).replace("``", "`")


def _block(match: re.Match[str]) -> str:
    body = textwrap.indent(textwrap.dedent(match["body"]).strip(), match["indent"])
    return f"{match['indent']}\\[\n{body}\n{match['indent']}\\]\n\n"
