"""The subcommands of `flatmtl`. Their options are dataclasses; tyro makes the flags and the help from them."""

import json
from collections.abc import Callable

from flatmtl_bench.choices import one_of
from flatmtl_bench.commands.data import check_data, show_data, where_data
from flatmtl_bench.commands.deploy import evaluate, export, predict
from flatmtl_bench.commands.listing import list_recipes
from flatmtl_bench.commands.training import run
from flatmtl_bench.commands.words import parse, users_mistakes
from flatmtl_bench.output import answer


def demo(words: list[str]) -> int:
    """Train what the demonstration lacks, and show what came out."""
    from flatmtl_bench.demo import Demo, prepare, show, train_side_by_side  # noqa: PLC0415

    with users_mistakes():
        command: Demo = parse(Demo, words, "demo")
        left = prepare(command)
    train_side_by_side(left, command.out)
    with users_mistakes():
        show(command)
    return 0


def sweep(words: list[str]) -> int:
    """Train many runs; print a table of their results."""
    from flatmtl_bench.sweep import Sweep, run_sweep  # noqa: PLC0415

    with users_mistakes():
        command, flags = parse(Sweep, words, "sweep", return_unknown_args=True)
        runs = command.runs(flags)
    if all(run.dry_run for run in runs.values()):
        answer(json.dumps([run.config.to_dict() for run in runs.values()], indent=2))
        return 0
    return run_sweep(command, runs)


def reproduce(words: list[str]) -> int:
    """Train what tables of the paper are made of, and print them beside the paper's."""
    from flatmtl_bench.reproduce.command import Reproduce  # noqa: PLC0415
    from flatmtl_bench.reproduce.command import reproduce as reproduce_tables  # noqa: PLC0415

    with users_mistakes():
        command, flags = parse(Reproduce, words, "reproduce", return_unknown_args=True)
    return reproduce_tables(command, flags)


def report(words: list[str]) -> int:
    """Print what runs came to."""
    from flatmtl_bench.reports.command import Report, print_report  # noqa: PLC0415

    with users_mistakes(OSError):
        return print_report(parse(Report, words, "report"))


def figure(words: list[str]) -> int:
    """Measure runs and draw a figure of them; without a name, list the figures."""
    from flatmtl_bench.figures import FIGURES  # noqa: PLC0415  (seconds, which help does not need)
    from flatmtl_bench.figures.command import make_figure  # noqa: PLC0415

    if not words or words[0] in ("-h", "--help"):
        for name, kind in FIGURES.items():
            answer(f"{name:<14} {(kind.__doc__ or '').splitlines()[0]}")
        answer("`flatmtl figure NAME --help` explains the options.")
        return 0
    with users_mistakes():
        one_of("figure", words[0], FIGURES)
        return make_figure(words[0], parse(FIGURES[words[0]], words[1:], f"figure {words[0]}"))


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "demo": demo,
    "list": list_recipes,
    "run": run,
    "sweep": sweep,
    "reproduce": reproduce,
    "report": report,
    "figure": figure,
    "evaluate": evaluate,
    "predict": predict,
    "export": export,
    "data show": show_data,
    "data check": check_data,
    "data where": where_data,
}
