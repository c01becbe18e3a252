"""Checks of options, with a message that lists what is known."""

from collections.abc import Sequence


def check_known(name: str, value: object, known: Sequence[object]) -> None:
    """Raise a ``ValueError`` unless the value of an option is a known one."""
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}. Known: {', '.join(map(str, known))}.")
