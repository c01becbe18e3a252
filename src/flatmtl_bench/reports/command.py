"""The command that reports what runs came to."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from flatmtl_bench.output import Stop, answer, say
from flatmtl_bench.reports import terminal
from flatmtl_bench.reports.baseline import BASELINES, BaselineName, NoBaseline
from flatmtl_bench.reports.choice import tuned
from flatmtl_bench.reports.reading import find
from flatmtl_bench.reports.results import Table, tables
from flatmtl_bench.reports.section import Section


@dataclass(frozen=True)
class Report:
    """Print what runs came to: a table for each data set, model, length and protocol, with a row for each method.

    Numbers are means over the seeds. What is no finished run is named on standard error and left out.
    """

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUNS ...")] = ("runs",)
    """Run folders, or folders of run folders."""
    baseline: BaselineName = "stl"
    """What Delta m is relative to: the single-task runs among these, or the paper's row of them (NYUv2, CityScapes)."""
    tuned: bool = False
    """Of each recipe show only the setting that is best by its validation score, mean over the seeds."""
    json: bool = False
    """Print the tables as JSON, in the units of the files summary.json."""


def print_report(command: Report) -> int:
    """Print the tables of all runs that are finished.

    Raises:
        Stop: there is none, or none that could be compared as was asked for.
        OSError: a folder that was named is not there.
    """
    found = find(command.runs)
    for reason in found.others:
        say(reason)
    if not found.runs:
        raise Stop(f"no finished run in {', '.join(command.runs)}. `flatmtl run RECIPE --out FOLDER` makes one.")
    shown = [_section(table, command) for table in _chosen(tables(found.runs), command)]
    if command.baseline == "paper" and not any(section.baseline for section in shown):
        raise Stop(" ".join(dict.fromkeys(section.reason for section in shown)))
    if command.json:
        answer(json.dumps([section.to_dict() for section in shown], indent=2))
    else:
        _print(shown)
    return 0


def _chosen(found: Sequence[Table], command: Report) -> list[Table]:
    """Return the tables, with the chosen setting of each recipe only if that is wanted."""
    if not command.tuned:
        return list(found)
    left: list[Table] = []
    for table in found:
        chosen, said = tuned(table)
        for sentence in said:
            say(sentence)
        left += [chosen] if chosen.rows else []
    if not left:
        raise Stop("no setting could be chosen by validation. Without --tuned, all are shown.")
    return left


def _section(table: Table, command: Report) -> Section:
    try:
        return Section(table, BASELINES[command.baseline](table))
    except NoBaseline as error:
        return Section(table, reason=str(error))


def _print(sections: Sequence[Section]) -> None:
    titles = Counter(section.table.title for section in sections)
    for k, section in enumerate(sections):
        title, *lines = section.lines()
        clash = f", test data {section.table.fingerprint}" if titles[title] > 1 else ""
        for line in (*([""] if k else []), title + clash, *lines):
            terminal.print_text(line)
        for grid in section.grids():
            terminal.print_grid(grid)
