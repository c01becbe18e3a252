"""The command that makes a table of the paper again."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from flatmtl_bench.choices import one_of, whole_number
from flatmtl_bench.commands.words import users_mistakes
from flatmtl_bench.output import Stop, answer, say
from flatmtl_bench.recipes import RECIPES
from flatmtl_bench.reports import latex, markdown, terminal
from flatmtl_bench.reports.choice import NoChoice
from flatmtl_bench.reports.reading import Run as FinishedRun
from flatmtl_bench.reports.reading import read
from flatmtl_bench.reproduce import needs
from flatmtl_bench.reproduce.outcome import Outcome, Tuning, outcome, tuned
from flatmtl_bench.reproduce.plan import Part, Radii, Runs
from flatmtl_bench.reproduce.scales import SCALES
from flatmtl_bench.reproduce.tables import TABLES, PaperTable
from flatmtl_bench.sweep import Sweep, at_a_time, train_runs

Protocol = Literal["honest", "paper", "official"]


@dataclass(frozen=True)
class Reproduce:
    """Train what a table of the paper is made of, and show the paper's numbers beside ours.

    First radii of the flat methods are chosen by validation, then all methods are trained with every seed. Finished
    runs are not trained again and interrupted ones go on, so the same command continues. Every flag of `flatmtl run`
    can be given too, and holds for all runs: --root, --epochs, --device, --out and so on.
    """

    tables: Annotated[Positional[tuple[str, ...]], arg(metavar="TABLE ...")]
    """table1 to table9."""
    scale: Literal["full", "small"] = "full"
    """full: as in the paper. small: sized for two CPU cores: small nets, data that need no files except for clothes."""
    data: tuple[str, ...] = ()
    """Data sets of the table; none: all whose files are there. E.g. multimnist."""
    methods: tuple[str, ...] = ()
    """Methods of the table; none: all. E.g. stl mgda."""
    seeds: int | None = None
    """Seeds of the runs whose results count; None: three, or five on multimnist at the small scale."""
    radii: tuple[float, ...] = ()
    """Radii of which validation chooses; none: those of the scale. With a single one nothing is to be chosen."""
    protocol: Protocol = "honest"
    """Which test result counts; radii are always chosen by the protocol honest."""
    jobs: int | None = None
    """Runs at a time; None: as `flatmtl sweep` has it."""
    threads: int | None = None
    """Threads of each run; None: as `flatmtl sweep` has it."""
    dry_run: bool = False
    """Say what it needs, runs, data and hours, and train nothing."""
    format: Literal["terminal", "markdown", "latex"] = "terminal"
    """How the tables are printed."""
    json: bool = False
    """Print the numbers as JSON, unrounded."""

    def __post_init__(self) -> None:
        if not self.tables:
            raise ValueError(f"name a table first: flatmtl reproduce TABLE, one of {', '.join(TABLES)}.")
        for name in self.tables:
            one_of("table", name, TABLES)
        if self.json and self.format != "terminal":
            raise ValueError(f"--json and --format {self.format} are two formats; use one of them.")
        for name in ("seeds", "jobs", "threads"):
            if (value := getattr(self, name)) is not None:
                whole_number(f"--{name}", value, 1)
        known = {data for table in self._tables for data in table.data}
        for name in self.data:
            one_of("--data", name, sorted(known))
        methods = {row.method for table in self._tables for row in table.rows}
        for name in self.methods:
            one_of("--methods", name, sorted(methods))

    @property
    def _tables(self) -> list[PaperTable]:
        return [TABLES[name] for name in self.tables]

    @property
    def where(self) -> Sweep:
        """On what the runs are trained."""
        return Sweep((), jobs=self.jobs, threads=self.threads)

    def parts(self, flags: Sequence[str]) -> list[Part]:
        """Return the tables on their data sets.

        Raises:
            ValueError: the protocol has no recipes for a table.
        """
        return [
            self._part(table, data, flags)
            for table in self._tables
            for data in table.data
            if not self.data or data in self.data
        ]

    def _part(self, table: PaperTable, data: str, flags: Sequence[str]) -> Part:
        size = SCALES[self.scale][data]
        size = replace(
            size, seeds=self.seeds or size.seeds, radii=tuple(dict.fromkeys(map(str, self.radii))) or size.radii
        )
        suffix = "" if self.protocol == "honest" else f"_{self.protocol}"
        rows = [row for row in table.rows if not self.methods or row.method in self.methods]
        if self.scale == "small":
            rows = [row for row in rows if not row.quoted or row.method == "stl"]
        known = [row for row in rows if row.recipe(size.data, suffix) in RECIPES]
        if not known:
            raise ValueError(
                f"there are no recipes of {table.name} on {size.data} for the protocol {self.protocol}. "
                "Use --protocol honest."
            )
        return Part(table, table.data[data], size, known, suffix, flags)


def reproduce(command: Reproduce, flags: Sequence[str]) -> int:
    """Train what is lacking, and show each table; return the exit code, 1 if some runs are not finished.

    Raises:
        Stop: nothing can be trained, or a signal came.
    """
    with users_mistakes():
        parts = command.parts(flags)
        if command.dry_run:
            _say_needs(command, parts)
            return 0
        parts = _with_data(command, parts)
        tuning = _merged(part.tuning() for part in parts)
        left = needs.unfinished({**tuning, **_merged(_final(parts, _radii(parts, tuning)))})
    if left:
        say(f"about {len(left)} runs are to be trained; the same command with --dry-run says how long they take.")
    else:
        say("all runs are finished: nothing is trained.")
    chosen_from, _ = train_runs(command.where, tuning) if tuning else ([], 0)
    tunings = [_choice(part, chosen_from) for part in parts]
    final = _final(parts, [tuning.radii for tuning in tunings])
    finished, code = train_runs(command.where, _merged(final))
    own = [[run for run in finished if run.name in runs] for runs in final]
    _show(command, list(map(_outcome, tunings, own)))
    return code


def _merged(many: Iterable[Runs]) -> Runs:
    return dict(chain.from_iterable(runs.items() for runs in many))


def _with_data(command: Reproduce, parts: Sequence[Part]) -> list[Part]:
    """Return the parts whose data are there; the others are said to be left out, unless they were asked for by name."""
    found: list[Part] = []
    for part in parts:
        reason = needs.missing(part)
        if reason is None:
            found.append(part)
        elif command.data:
            raise ValueError(reason)
        else:
            say(f"left out: {reason}")
    if not found:
        raise ValueError(
            "there is nothing to train without data; `flatmtl data where` says how to obtain them. --scale small needs "
            "no files but for MultiFashion and MultiFashion+MNIST."
        )
    return found


def _choice(part: Part, runs: Sequence[FinishedRun]) -> Tuning:
    try:
        return tuned(part, runs)
    except NoChoice as error:
        raise Stop(error) from error


def _say_needs(command: Reproduce, parts: Sequence[Part]) -> None:
    """Print what would be trained, which data are not there, and how long the rest would take here."""
    there: list[Part] = []
    for part in parts:
        runs = f"{len(part.tuning())} runs to choose radii, {len(part.final(part.first_radii()))} that count"
        answer(f"{part.table.name} on {part.printed}: {part.data}, {len(part.rows)} rows, {part.seeds}, {runs}")
        reason = needs.missing(part)
        there += [part] if reason is None else []
        if reason is not None:
            answer(f"  its data are not there: {reason}")
    tuning = _merged(part.tuning() for part in there)
    final = _merged(_final(there, _radii(there, tuning)))
    left = needs.unfinished({**tuning, **final})
    answer(f"of {len({**tuning, **final})} different runs whose data are there, {len(left)} are not finished")
    if left:
        say(f"timing some steps of each of {len({run.config.recipe for run in left.values()})} recipes")
        jobs = at_a_time(command.where, list(left.values()))
        hours = needs.hours(left.values(), jobs)
        time = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"
        answer(f"about {time} on this machine, {jobs} at a time")


def _radii(parts: Sequence[Part], tuning: Runs) -> list[Radii]:
    """Return of each part the radii that were chosen; the first ones if not all runs for the choice are finished."""
    if needs.unfinished(tuning):
        return [part.first_radii() for part in parts]
    finished = [read(Path(run.out) / name) for name, run in tuning.items()]
    return [_choice(part, finished).radii for part in parts]


def _final(parts: Sequence[Part], radii: Sequence[Radii]) -> list[Runs]:
    """Return of each part the runs whose results count."""
    return [part.final(chosen) for part, chosen in zip(parts, radii, strict=True)]


def _outcome(tuning: Tuning, runs: Sequence[FinishedRun]) -> Outcome:
    """Return what the runs of a part came to."""
    table, calls = tuning.part.table, {}
    if table.calls:
        from flatmtl_bench.analysis.aggregations import aggregator_calls  # noqa: PLC0415  (seconds)

        methods = {run.config.recipe: run.config.method for run in runs if run.config.task is None}
        calls = {recipe: aggregator_calls(method, len(tuning.part.tasks)) for recipe, method in methods.items()}
    if table.measured:
        return outcome(tuning, runs, calls, lambda run: _calibration(run.path))
    if not (runs and tuning.part.size.smaller):
        return outcome(tuning, runs, calls)
    from flatmtl_bench.reproduce.blind import blind  # noqa: PLC0415  (seconds)

    return outcome(tuning, runs, calls, blind=blind(runs[0].config))


@cache
def _calibration(path: Path) -> Mapping[str, float]:
    """Return Brier score and calibration error of each task of a run, which both tables and all columns ask for."""
    from flatmtl_bench.analysis.calibration import calibration  # noqa: PLC0415  (seconds)
    from flatmtl_bench.analysis.trained import trained  # noqa: PLC0415

    say(f"measuring {path}")
    model = trained(path)
    found = calibration(model.model, model.batches(), model.tasks)
    brier = {f"brier/{task}": each.brier for task, each in found.items()}
    return {**brier, **{f"ece/{task}": each.ece for task, each in found.items()}}


def _show(command: Reproduce, outcomes: Sequence[Outcome]) -> None:
    chapters = [found.chapter() for found in outcomes]
    if command.json:
        answer(json.dumps([found.to_dict() for found in outcomes], indent=1))
    elif command.format == "terminal":
        terminal.print_chapters(chapters)
    else:
        answer({"markdown": markdown, "latex": latex}[command.format].render(chapters).rstrip())
