"""Checks of what a user typed, with a message that says what is expected."""

import difflib
from collections.abc import Iterable


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return a sentence that offers the closest known word, with a blank before it; nothing if none is close.

    Example:
        >>> did_you_mean("mgd", ["mgda", "mean"])
        " Did you mean 'mgda'?"
    """
    close = difflib.get_close_matches(str(given), list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def one_of(what: str, given: object, known: Iterable[str]) -> None:
    """Raise a `ValueError` that lists what is known unless ``given`` is in it."""
    known = list(known)
    if given not in known:
        raise ValueError(f"unknown {what} {given!r}.{did_you_mean(given, known)} Known: {', '.join(known)}.")


def whole_number(what: str, given: object, low: int, high: int | None = None) -> None:
    """Raise a `ValueError` unless ``given`` is an int of at least ``low`` and, if given, below ``high``."""
    if not isinstance(given, int) or isinstance(given, bool) or given < low or (high is not None and given >= high):
        bounds = f"from {low}" + (f" to {high - 1}" if high is not None else "")
        raise ValueError(f"{what} must be a whole number {bounds}, got {given!r}.")
