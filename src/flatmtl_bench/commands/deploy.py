"""`flatmtl evaluate`, `predict` and `export`: what a trained model is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager

from flatmtl_bench.commands.words import parse, users_mistakes
from flatmtl_bench.output import Stop


def evaluate(words: list[str]) -> int:
    """Measure the model of a finished run again."""
    from flatmtl_bench.deploy import options  # noqa: PLC0415

    with users_mistakes():
        command = parse(options.Evaluate, words, "evaluate")
        from flatmtl_bench.deploy.evaluate import evaluate  # noqa: PLC0415  (seconds, which help does not need)

        return evaluate(command)


def predict(words: list[str]) -> int:
    """Ask the model of a finished run about pictures."""
    from flatmtl_bench.deploy import options  # noqa: PLC0415

    with users_mistakes(), _unsaved():
        command = parse(options.Predict, words, "predict")
        from flatmtl_bench.deploy.predict import predict  # noqa: PLC0415  (seconds, which help does not need)

        return predict(command)


def export(words: list[str]) -> int:
    """Write the model of a finished run for other programs."""
    from flatmtl_bench.deploy import options  # noqa: PLC0415

    with users_mistakes(), _unsaved():
        command = parse(options.Export, words, "export")
        from flatmtl_bench.deploy.export import export  # noqa: PLC0415  (seconds, which help does not need)

        return export(command)


@contextmanager
def _unsaved() -> Iterator[None]:
    """Within it a result that cannot be written ends the command with a message and exit code 1."""
    from flatmtl_bench.files import WriteError  # noqa: PLC0415

    try:
        yield
    except WriteError as error:
        raise Stop(error, code=1) from error
