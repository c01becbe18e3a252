"""The paper's tables at a size for two CPU cores, beside the paper's numbers.

``python benchmarks/tables.py table1 --runs FOLDER`` trains what is lacking, by
``flatmtl reproduce table1 --scale small``, and writes ``results/table1.json`` beside this file, from which
``docs/tables.md`` is made. With ``--pictures FOLDER``, a folder with ``fashion*.npz`` and ``mnist*.npz``, tables 1, 6,
8 and 9 are on all three data sets, without it on the embedded digits only. A table takes an hour or two; interrupted,
the same command goes on. Flags of `flatmtl reproduce` and `flatmtl run` can be given too, as ``--data multimnist``: of
data sets that a command leaves out the file keeps what it has.
"""

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional

from flatmtl_bench import cli
from flatmtl_bench.environment import environment
from flatmtl_bench.files import write_whole
from flatmtl_bench.reproduce.tables import TABLES

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Options:
    """Make tables of the paper again, and write each as JSON."""

    tables: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="TABLE ...")] = ()
    """table1 to table9; none: all, which takes most of a day."""
    runs: str = "runs"
    """Folder of run folders, in which finished ones are not trained again."""
    pictures: str | None = None
    """Folder with fashion*.npz and mnist*.npz; None: the embedded digits alone."""
    out: Path = RESULTS
    """Folder of the files to write."""


def main(options: Options, flags: Sequence[str]) -> None:
    """Train what is lacking, and write what came out."""
    for table in options.tables or TABLES:
        words = command(options, table, flags)
        made = {"command": " ".join(shown(words)), "environment": environment()}
        outcomes = [made | outcome for outcome in json.loads(run(words))]
        path = options.out / f"{table}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        before = json.loads(path.read_text()) if path.exists() else []
        write_whole(path, json.dumps(merged(before, outcomes), indent=1) + "\n")


def merged(before: list[dict[str, Any]], made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what was made, and of other data sets what was there before, in the order of the paper."""
    by_data = {outcome["paper_data"]: outcome for outcome in (*before, *made)}
    order = list(chain.from_iterable(table.data.values() for table in TABLES.values()))
    return sorted(by_data.values(), key=lambda outcome: order.index(outcome["paper_data"]))


def command(options: Options, table: str, flags: Sequence[str] = ()) -> list[str]:
    """Return the words of the command for a table; one thread a run, on which the last digits depend."""
    words = ["reproduce", table, "--scale", "small", "--json", "--threads", "1", "--device", "cpu"]
    root = ["--root", options.pictures] if options.pictures else []
    return [*words, "--out", options.runs, *flags, *root]


def shown(words: list[str]) -> list[str]:
    """Return the command without the folders of one machine."""
    befores = ["", *words[:-1]]
    return ["flatmtl", *("FOLDER" if b in ("--out", "--root") else w for b, w in zip(befores, words, strict=True))]


def run(words: list[str]) -> str:
    """Return what a command of `flatmtl` prints; what is wrong ends this one, too."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = cli.main(words)
    if code:
        raise SystemExit(code)
    return printed.getvalue()


if __name__ == "__main__":
    main(*tyro.cli(Options, return_unknown_args=True))
