"""From the words that a user typed to a command, and from a mistake among them to a message."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tyro
from tyro.conf import FlagCreatePairsOff

from flatmtl_bench.output import Stop


@contextmanager
def users_mistakes(*kinds: type[Exception]) -> Iterator[None]:
    """Within it a wrong value or a missing file is the user's mistake, so there is a message and no traceback.

    ``kinds`` narrows what counts as one.
    """
    mistakes = kinds or (ValueError, OSError)
    try:
        yield
    except BrokenPipeError:
        raise
    except mistakes as error:
        raise Stop(error) from error


def parse(command: Any, words: list[str], name: str, default: Any = None, **options: Any) -> Any:
    """Return the dataclass ``command`` filled from the words, or exit with tyro's help or complaint.

    The ``options`` are those of :func:`tyro.cli`.
    """
    options = {"config": (FlagCreatePairsOff,)} | ({} if default is None else {"default": default}) | options
    return tyro.cli(command, args=words, prog=f"flatmtl {name}", **options)
