"""The signals that ask a process to end."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


class FirstSignal:
    """Within it the first SIGINT or SIGTERM calls a function; the next one acts as it does outside.

    A signal that the process ignores, as under ``nohup``, is left alone.

    Attributes:
        number: of the signal that came; ``None``: none.
    """

    def __init__(self, act: Callable[[], Any]) -> None:
        self.number: int | None = None
        self._act = act
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "FirstSignal":
        for kind in (signal.SIGINT, signal.SIGTERM):
            if (before := signal.getsignal(kind)) is not signal.SIG_IGN:
                self._before[kind] = before
                signal.signal(kind, self._take)
        return self

    def __exit__(self, *_error: object) -> None:
        self._put_back()

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self.number = number
        self._put_back()
        self._act()

    def _put_back(self) -> None:
        for kind, before in self._before.items():
            signal.signal(kind, before)
