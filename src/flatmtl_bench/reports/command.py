"""The command that reports what runs came to."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from flatmtl_bench.choices import did_you_mean
from flatmtl_bench.files import check_writable, write_whole
from flatmtl_bench.output import Stop, answer, say
from flatmtl_bench.reports import latex, markdown, terminal, tidy
from flatmtl_bench.reports.baseline import BASELINES, BaselineName, NoBaseline
from flatmtl_bench.reports.choice import tuned
from flatmtl_bench.reports.pairs import chosen
from flatmtl_bench.reports.reading import find
from flatmtl_bench.reports.results import Table, tables
from flatmtl_bench.reports.section import Section, chapters

Format = Literal["terminal", "markdown", "latex", "csv"]


@dataclass(frozen=True)
class Report:
    """Report what runs came to: tables for each data set, model, length and protocol, with a row for each method.

    Numbers are means over the seeds. Plain methods and their flat forms are compared seed by seed, and in what a step
    costs. What is no finished run is named on standard error and left out.
    """

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUNS ...")] = ("runs",)
    """Run folders, or folders of run folders."""
    baseline: BaselineName = "stl"
    """What Delta m is relative to: the single-task runs among these, or the paper's row of them (NYUv2, CityScapes)."""
    tuned: bool = False
    """Of each recipe show only the setting that is best by its validation score, mean over the seeds."""
    tuned_seeds: tuple[int, ...] = ()
    """The seeds by which --tuned compares settings; none: all that any setting has, and what lacks one is left out."""
    compare: Annotated[tuple[str, str] | None, arg(metavar="PLAIN FLAT")] = None
    """Show two recipes only, the second against the first; None: all, and each flat method against its plain form."""
    format: Format = "terminal"
    """How the tables are printed; csv: a row for each seed and metric, unrounded."""
    json: bool = False
    """Print the tables as JSON, in the units of the files summary.json."""
    out: str | None = None
    """Write a file instead; its ending chooses the format: .md, .tex, .csv, .json, or .html for a page with curves."""
    figures: str = "figures"
    """Folder of figures (PNG) that the page links to, if there are any."""
    overwrite: bool = False
    """Replace the file if it exists."""


def print_report(command: Report) -> int:
    """Print or write the tables of all runs that are finished.

    Raises:
        Stop: there is none, none that could be compared as was asked for, or the file cannot be written.
        OSError: a folder that was named is not there.
    """
    out = _checked(command)
    shown = _sections(command)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, WRITERS[out.suffix](shown, command))
        answer(out)
    elif command.json:
        answer(_json(shown, command).rstrip())
    elif command.format == "terminal":
        terminal.print_chapters(chapters(shown))
    else:
        answer(PRINTERS[command.format](shown, command).rstrip())
    return 0


def _checked(command: Report) -> Path | None:
    """Return the file to write, which can be written; None to print.

    Raises:
        Stop: two formats are asked for, the ending is of none, or the file is there.
        OSError: the folder cannot be written to.
    """
    if command.out is None:
        if command.json and command.format != "terminal":
            raise Stop(f"--json and --format {command.format} are two formats; use one of them.")
        return None
    if command.json or command.format != "terminal":
        raise Stop("the ending of --out chooses its format; leave --format and --json out.")
    out = Path(command.out)
    if out.suffix not in WRITERS:
        raise Stop(f"{out} ends in {out.suffix or 'nothing'!r}; expected one of {', '.join(WRITERS)}.")
    if out.is_dir():
        raise Stop(f"{out} is a folder; expected a file to write. Choose another --out.")
    if out.exists() and not command.overwrite:
        raise Stop(f"{out} exists. Use --overwrite to replace it, or another --out.")
    check_writable(out.parent)
    return out


def _sections(command: Report) -> list[Section]:
    """Return what is to be shown of the finished runs.

    Raises:
        Stop: there is nothing to show; the message says why, and what to do.
        OSError: a folder that was named is not there.
    """
    found = find(command.runs)
    for reason in found.others:
        say(reason)
    if not found.runs:
        raise Stop(f"no finished run in {', '.join(command.runs)}. `flatmtl run RECIPE --out FOLDER` makes one.")
    sections = [_section(table, command) for table in _tuned(tables(found.runs), command)]
    if command.baseline == "paper" and not any(section.baseline for section in sections):
        raise Stop(" ".join(dict.fromkeys(section.reason for section in sections)))
    return sections if command.compare is None else _compared(sections, command.compare)


def _tuned(found: Sequence[Table], command: Report) -> list[Table]:
    """Return the tables, with the chosen setting of each recipe only if that is wanted."""
    if not command.tuned:
        if command.tuned_seeds:
            raise Stop("--tuned-seeds says by which seeds --tuned chooses. Add --tuned.")
        return list(found)
    left: list[Table] = []
    for table in found:
        chosen_rows, said = tuned(table, command.tuned_seeds or None)
        for sentence in said:
            say(sentence)
        left += [chosen_rows] if chosen_rows.rows else []
    if not left:
        raise Stop("no setting could be chosen by validation. Without --tuned, all are shown.")
    return left


def _section(table: Table, command: Report) -> Section:
    try:
        return Section(table, BASELINES[command.baseline](table), compared=command.compare)
    except NoBaseline as error:
        return Section(table, reason=str(error), compared=command.compare)


def _compared(sections: Sequence[Section], names: tuple[str, str]) -> list[Section]:
    """Return the sections that have two recipes, with no other rows; Delta m stays what it is."""
    if names[0] == names[1]:
        raise Stop(f"--compare {names[0]} {names[1]} names one recipe twice; expected two.")
    there = dict.fromkeys(row.config.recipe for section in sections for row in section.table.rows)
    for name in names:
        if name not in there:
            raise Stop(f"there is no finished run of {name}.{did_you_mean(name, there)} There are: {', '.join(there)}.")
    own = [(section, chosen(section.table, names)) for section in sections]
    if not any(rows for _, rows in own):
        raise Stop(f"{' and '.join(names)} have no runs of one data set, model, length and protocol to compare.")
    return [replace(section, table=replace(section.table, rows=rows)) for section, rows in own if rows]


def _json(sections: Sequence[Section], _command: Report) -> str:
    return json.dumps([section.to_dict() for section in sections], indent=2, allow_nan=False) + "\n"


def _page(sections: Sequence[Section], command: Report) -> str:
    """Return a page with links to the figures, as they lie from where it is written."""
    from flatmtl_bench.reports import page  # noqa: PLC0415  (a second, which tables do not need)

    folder = Path(command.out or "").parent
    figures = [Path(os.path.relpath(path, folder)) for path in sorted(Path(command.figures).glob("*.png"))]
    return page.render(sections, figures=figures)


Render = Callable[[Sequence[Section], Report], str]
PRINTERS: Mapping[str, Render] = {
    "markdown": lambda sections, _: markdown.render(chapters(sections)),
    "latex": lambda sections, _: latex.render(chapters(sections)),
    "csv": lambda sections, _: tidy.render(sections),
}
WRITERS: Mapping[str, Render] = {
    ".md": PRINTERS["markdown"],
    ".tex": PRINTERS["latex"],
    ".csv": PRINTERS["csv"],
    ".json": _json,
    ".html": _page,
}
"""By the ending of the file."""
