"""Checks of options, with a message that lists what is known, and warnings that point at the user's line."""

import inspect
import warnings
from collections.abc import Sequence


def check_known(name: str, value: object, known: Sequence[object]) -> None:
    """Raise a ``ValueError`` unless the value of an option is a known one."""
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}. Known: {', '.join(map(str, known))}.")


def warn(message: str) -> None:
    """Warn that something is legal but probably not meant, at the line that called this library."""
    frame, level, of_caller = inspect.currentframe(), 0, 1
    while frame is not None:
        level += 1
        if str(frame.f_globals.get("__name__")).partition(".")[0] == "flatmtl":
            of_caller = level + 1
        frame = frame.f_back
    warnings.warn(message, UserWarning, stacklevel=of_caller)
