"""What a command says: results on standard output, messages on standard error."""

import sys


def answer(text: object) -> None:
    """Write a result to standard output."""
    sys.stdout.write(f"{text}\n")


def say(text: object) -> None:
    """Write a message to standard error."""
    sys.stderr.write(f"{text}\n")


class Stop(Exception):
    """Ends the command with a message for the user and no traceback."""

    def __init__(self, message: object, code: int = 2) -> None:
        super().__init__(str(message))
        self.code = code
