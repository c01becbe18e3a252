"""The paper's tables at a size for two CPU cores, beside the paper's numbers.

``python benchmarks/tables.py table1 --runs FOLDER`` trains what is lacking, by
``flatmtl reproduce table1 --scale small``, and writes ``results/table1.json`` beside this file, from which
``docs/tables.md`` is made. With ``--pictures FOLDER``, a folder with ``fashion*.npz`` and ``mnist*.npz``, tables 1, 6,
8 and 9 are on all three data sets, without it on the embedded digits only. A table takes an hour or two; interrupted,
the same command goes on. Flags of `flatmtl reproduce` and `flatmtl run` can be given after the tables, as
``--data multimnist``: of data sets that a command leaves out the file keeps what it has.
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
ORDER = list(dict.fromkeys(chain.from_iterable(table.data.values() for table in TABLES.values())))
"""The data sets as they are printed, in the order of the paper."""
FIXED = ("--scale", "--protocol", "--format", "--json", "--no-json", "--dry-run")
"""Flags of `flatmtl reproduce` that this script decides."""


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
    overwrite: bool = False
    """Replace results even by ones of fewer methods or seeds."""


def main(options: Options, flags: Sequence[str]) -> None:
    """Train what is lacking, and write what came out.

    Raises:
        SystemExit: a table cannot be made, or its file could not be written without loss.
    """
    _refuse(flags)
    for table in options.tables or TABLES:
        path = options.out / f"{table}.json"
        before = read(path)
        words = command(options, table, flags)
        made = {"command": " ".join(shown(words)), "environment": environment()}
        outcomes = [made | outcome for outcome in json.loads(run(words))]
        if not options.overwrite and (lost := lacking(before, outcomes)):
            raise SystemExit(
                f"{path} is left as it is, for it would lose {lost}. Add --overwrite to replace it; no run is lost."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(merged(before, outcomes), indent=1) + "\n")


def _refuse(flags: Sequence[str]) -> None:
    """Refuse flags that make something else than a table at the small scale."""
    for flag in flags:
        if flag.partition("=")[0].replace("_", "-") in FIXED:
            raise SystemExit(
                f"{flag} is not for this script; expected none of {', '.join(FIXED)}. Use flatmtl reproduce."
            )


def read(path: Path) -> list[dict[str, Any]]:
    """Return the outcomes in a file; none if it is not there.

    Raises:
        SystemExit: it is something else.
    """
    if not path.exists():
        return []
    with contextlib.suppress(ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, list) and all(
            isinstance(each, dict) and each.get("paper_data") in ORDER for each in found
        ):
            return found
    raise SystemExit(f"{path} holds no list of tables, one for each data set. Move it away, or give another --out.")


def lacking(before: list[dict[str, Any]], made: list[dict[str, Any]]) -> str:
    """Return in words what was there and is not made of the same data: methods and seeds."""
    by_data = {outcome["paper_data"]: _seeds(outcome) for outcome in made}
    lost = [
        f"{method} with seed {seed} on {outcome['paper_data']}"
        for outcome in before
        if (now := by_data.get(outcome["paper_data"])) is not None
        for method, seed in _seeds(outcome)
        if (method, seed) not in now
    ]
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    return f"{', '.join(lost[:3])}{more}"


def _seeds(outcome: dict[str, Any]) -> list[tuple[str, int]]:
    """Return each method with each of its seeds that has a number."""
    found = [(cell["method"], seed) for cell in outcome["cells"] if cell["ours"] for seed in cell["ours"]["seeds"]]
    return list(dict.fromkeys(found))


def merged(before: list[dict[str, Any]], made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what was made, and of other data sets what was there before, in the order of the paper."""
    by_data = {outcome["paper_data"]: outcome for outcome in (*before, *made)}
    return sorted(by_data.values(), key=lambda outcome: ORDER.index(outcome["paper_data"]))


def command(options: Options, table: str, flags: Sequence[str] = ()) -> list[str]:
    """Return the words of the command for a table; one thread a run, on which the last digits depend."""
    words = ["reproduce", table, "--scale", "small", "--json", "--threads", "1", "--device", "cpu"]
    root = ["--root", options.pictures] if options.pictures else []
    return [*words, "--out", options.runs, *flags, *root]


def shown(words: list[str]) -> list[str]:
    """Return the command without the folders of one machine."""
    apart = list(chain.from_iterable(word.split("=", 1) if word.startswith("--") else [word] for word in words))
    befores = ["", *apart[:-1]]
    return ["flatmtl", *("FOLDER" if b in ("--out", "--root") else w for b, w in zip(befores, apart, strict=True))]


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
