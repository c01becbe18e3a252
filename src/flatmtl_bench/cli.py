"""The command `flatmtl`: finds the subcommand, and says in one message what the user can put right.

Exit codes: 0 done; 1 the run failed, or could not be saved; 2 a mistake in what was typed or is expected to be there;
130 and 143 stopped by SIGINT (Ctrl-C) and SIGTERM: a run has ended its step, is saved, and goes on with --resume.
Standard output is for results, standard error for messages and progress.
"""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from flatmtl_bench.choices import did_you_mean
from flatmtl_bench.output import Stop, answer, say

COMMANDS = {
    "demo": "Train CAGrad and its flat form on real digits, and compare them (3 to 6 minutes on 2 cores).",
    "list": "List the recipes.",
    "run": "Train a recipe and keep the run in a folder.",
    "sweep": "Train recipes with every combination of a grid and every seed.",
    "reproduce": "Make a table of the paper again, its numbers beside ours.",
    "report": "Tables of what runs came to, plain against flat with intervals, and their cost; or a page.",
    "figure": "Measure finished runs, and draw what was found: `flatmtl figure` lists the figures.",
    "evaluate": "Measure the model of a finished run again.",
    "predict": "Ask the model of a finished run about pictures.",
    "export": "Write the model of a finished run for programs that know nothing of flatmtl.",
    "data show": "Write a sheet of pictures of a data set.",
    "data check": "Say what a folder of data holds, and all that is wrong with it.",
    "data where": "Say how to obtain the data sets that others made, and on which terms.",
}
BENCH = {
    "PIL",
    "curvlinops",
    "jinja2",
    "joblib",
    "lightning",
    "matplotlib",
    "mlxtend",
    "numpy",
    "plotly",
    "rich",
    "safetensors",
    "scipy",
    "torchmetrics",
    "torchvision",
    "tyro",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read the output has read enough, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Stop as stop:
        say(f"flatmtl: {stop}")
        return stop.code
    except KeyboardInterrupt:
        say("flatmtl: interrupted")
        return 130
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in BENCH:
            raise
        say(f'flatmtl: {error.name} is not installed. The command needs: pip install "flatmtl[bench]"')
        return 2


def _dispatch(words: list[str]) -> int:
    if words and words[0] in ("-h", "--help"):
        answer(_usage())
        return 0
    if words and words[0] == "--version":
        answer(version("flatmtl"))
        return 0
    for length in (1, 2):
        if (name := " ".join(words[:length])) in COMMANDS:
            from flatmtl_bench import commands  # noqa: PLC0415  (it needs the extra `bench`)

            return commands.COMMANDS[name](words[length:])
    if not words:
        say(_usage())
        return 2
    raise Stop(_unknown(words))


def _unknown(words: list[str]) -> str:
    given = " ".join(words[:2]) if words[0] == "data" else words[0]
    return f"unknown command {given!r}.{did_you_mean(given, COMMANDS)} Known: {', '.join(COMMANDS)}."


def _usage() -> str:
    lines = [f"  flatmtl {name:<10} {text}" for name, text in COMMANDS.items()]
    head = "Flat-minima multi-task learning: recipes, training and comparison."
    tail = "`flatmtl COMMAND --help` explains every option; `flatmtl --version` prints the version."
    return "\n".join([head, "", *lines, "", tail])
