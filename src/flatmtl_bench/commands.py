"""The subcommands of `flatmtl`. Their options are dataclasses; tyro makes the flags and the help from them."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from time import sleep
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg

from flatmtl_bench import recipes
from flatmtl_bench.choices import one_of, whole_number
from flatmtl_bench.output import Stop, answer, say
from flatmtl_bench.protocols import Row
from flatmtl_bench.recipes import ABLATIONS, AGGREGATORS, FAMILIES, METHODS, RECIPES, Config
from flatmtl_bench.recipes.config import Data, Source, Split
from flatmtl_bench.signals import FirstSignal

if TYPE_CHECKING:
    from flatmtl_bench.runs import RunFolder
    from flatmtl_bench.trainer import Trainer


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


@dataclass(frozen=True)
class List:
    """List the recipes: all families of them, or those whose name contains a text."""

    part: Positional[str] = ""
    """A text, e.g. cagrad. The whole name of a recipe shows its grid too: what its source leaves open."""


def list_recipes(words: list[str]) -> int:
    """Print what recipes there are and what they are."""
    part = parse(List, words, "list").part
    for line in _listed(part) if part else _families():
        answer(line)
    return 0


def _families() -> Iterator[str]:
    for family in FAMILIES:
        for dataset, title in family.datasets.items():
            yield f"{family.names(dataset):<44} {title} ({family.origin}), {len(family.methods)} methods"
    yield f"METHOD: {', '.join(METHODS)}"
    first, *_, last = AGGREGATORS
    yield f"COMBINE: {', '.join(ABLATIONS)} (f_ and {first} to {last} only; without it as in the paper)"
    yield f"f_: the flat form. `flatmtl list PART` shows those of the {len(RECIPES)} recipes whose name contains PART."


def _listed(part: str) -> Iterator[str]:
    wanted = part.lower().replace("-", "_")  # as in the tables, too: F-IMTL
    found = {name: recipe.text for name, recipe in RECIPES.items() if wanted in name}
    if not found:
        raise Stop(f"no recipe contains {part!r}; `flatmtl list` shows how all {len(RECIPES)} are named.")
    width = max(map(len, found))
    for name, text in found.items():
        yield f"{name:<{width}} {text}"
    if part in RECIPES:
        for name, values in RECIPES[part].grid.items():
            yield f"  {part} leaves open: {name}={','.join(values)}"


@dataclass(frozen=True)
class Run:
    """Train a recipe and keep the run in a folder. Every value of the recipe can be changed by its flag."""

    config: Annotated[Config, arg(name="")] = field(default_factory=Config)
    out: str = "runs"
    """Folder of run folders."""
    resume: bool = False
    """Go on with a run that was interrupted."""
    overwrite: bool = False
    """Remove a run that is there, and start again."""
    checkpoint_every: int = 0
    """Steps between checkpoints within an epoch; 0: they are written as epochs end, and when a signal comes."""
    keep_every: int = 0
    """Epochs between snapshots of the weights in the folder snapshots/, for figures; 0: there are none."""
    log_every: int = 20
    """Steps between points of logs/live/, which TensorBoard shows while the run goes on; 0: there are none."""
    dry_run: bool = False
    """Print the full config and do nothing else."""

    def __post_init__(self) -> None:
        whole_number("--checkpoint-every", self.checkpoint_every, 0)
        whole_number("--keep-every", self.keep_every, 0)
        whole_number("--log-every", self.log_every, 0)

    @property
    def saving(self) -> dict[str, int]:
        """How often the run is saved: options of `Trainer.fit`."""
        names = ("checkpoint_every", "keep_every", "log_every")
        return {name: getattr(self, name) for name in names}


def run(words: list[str]) -> int:
    """Train a recipe; print the summary."""
    with _rank_zero_speaks():
        with users_mistakes():
            command: Run = parse(Run, words, "run", Run(_recipe(words)))
        result = command.config.to_dict() if command.dry_run else _train(command)
        answer(json.dumps(result, indent=2))
    return 0


PATIENCE = 30.0
"""Seconds that rank 0 gets to say what is wrong before another rank says it. Its end is usually that of all."""


@contextmanager
def _rank_zero_speaks() -> Iterator[None]:
    """Within it other ranks are silent, and those whose mistake rank 0 knows leave the exit code to it.

    What rank 0 does not know is loud, and an exit code at which the launcher ends all ranks. A mistake in what all
    were told is found by each: the others give rank 0 time to say it, for their end would be that of rank 0, too.
    """
    if all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")):
        yield
        return
    from flatmtl_bench.ranks import ToldRankZero  # noqa: PLC0415

    try:
        with open(os.devnull, "w", encoding="utf-8") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
            yield
    except (Stop, SystemExit) as end:
        if end.code:
            sleep(PATIENCE)
        raise
    except ToldRankZero:
        raise SystemExit(0) from None


def _recipe(words: list[str]) -> Config:
    """Return the config of the recipe, which is the first word; the default one if only help is wanted."""
    if words and not words[0].startswith("-"):
        return recipes.build(words[0])
    if {"-h", "--help"} & set(words):
        return Config()
    raise Stop("name a recipe first: flatmtl run RECIPE [OPTIONS]; `flatmtl list` shows them.")


def _train(command: Run) -> dict[str, Any]:
    from flatmtl_bench.data.findings import Broken  # noqa: PLC0415
    from flatmtl_bench.progress import RunBar, epoch_line, training_bars  # noqa: PLC0415
    from flatmtl_bench.ranks import together  # noqa: PLC0415
    from flatmtl_bench.runs import RunError, RunFolder  # noqa: PLC0415
    from flatmtl_bench.trainer import Stopped, Trainer  # noqa: PLC0415  (seconds, which help does not need)

    with users_mistakes():
        trainer = Trainer(command.config)
        with together(trainer.fabric):
            how = {"resume": command.resume, "overwrite": command.overwrite}
            folder = RunFolder(command.out, trainer.config, **how) if trainer.fabric.is_global_zero else None
    finished = trainer.fabric.broadcast(folder is not None and folder.finished)
    if folder is None:
        return {} if finished else _follow(trainer, command)
    with folder, training_bars() as bars:
        if finished:
            with users_mistakes(RunError, OSError):
                trainer.check_data(folder)
                say(f"{folder.path} is finished; here is its result. Use --overwrite to train again.")
                return folder.summary()
        for dataset in trainer.data.values():
            say(str(dataset))
        if trainer.config.task is not None:
            say(f"single-task learning: {trainer.config.task} alone; --task trains another.")
        bar = RunBar(bars, f"{trainer.config.label}, seed {trainer.config.seed}", trainer.means)

        def watch(done: int, total: int, row: Row | None) -> None:
            bar(done, total, row)
            if row is not None:
                say(epoch_line(row))

        first_signal = FirstSignal(trainer.stop)
        try:
            with users_mistakes(RunError, OSError), _failed_writes(folder), first_signal:
                summary = trainer.fit(folder, watch, **command.saving)
        except Broken as error:
            raise Stop(f"{error} {_kept(folder)} {GO_ON}", code=1) from None
        except FloatingPointError as error:
            raise Stop(f"{error} {_kept(folder)} Try a smaller --optimizer.lr or --rho.", code=1) from error
        except Stopped as stopped:
            code = 128 + (first_signal.number or signal.SIGTERM)
            raise Stop(f"{stopped} It is saved. {GO_ON}", code=code) from None
        except KeyboardInterrupt:
            raise Stop(f"interrupted. {_kept(folder)} {GO_ON}", code=130) from None
        if summary["stopped_early"]:
            say(f"stopped early: {command.config.early_stop.patience} epochs without a better score.")
        say(f"the run is in {folder.path}")
        return summary


def _follow(trainer: "Trainer", command: Run) -> dict[str, Any]:
    """Train as another rank than 0, which has the folder and says what there is to say."""
    from flatmtl_bench.trainer import Stopped, unwatched  # noqa: PLC0415

    with FirstSignal(trainer.stop), suppress(Stopped, FloatingPointError):  # which all ranks raise at once
        trainer.fit(None, unwatched, **command.saving)
    return {}


GO_ON = "The same command with --resume goes on."


@contextmanager
def _failed_writes(folder: "RunFolder") -> Iterator[None]:
    """Within it a file that cannot be written ends the run with a message: what was written before is whole."""
    from flatmtl_bench.files import WriteError  # noqa: PLC0415

    try:
        yield
    except WriteError as error:
        raise Stop(f"{error} {_kept(folder)} Make room, or let it be written to. {GO_ON}", code=1) from error


def _kept(folder: "RunFolder") -> str:
    return f"{folder.path} keeps {len(folder.rows())} finished epochs."


@dataclass(frozen=True)
class Show:
    """Write a sheet of pictures of a data set, each with its labels."""

    name: Positional[str | None] = None
    """Data set; None: that of --data.name."""
    split: Split = "train"
    """Which part of it."""
    source: Source = "auto"
    """Where the data come from; auto: the full data if present, else data of the same kind that need no files."""
    root: str | None = None
    """Folder of the data; None: data."""
    seed: int = 0
    """Seed of the train pairs, and of which items are shown."""
    data: Data = field(default_factory=Data)
    rows: int = 8
    """Rows of the sheet."""
    columns: int | None = None
    """Columns of the sheet; None: as many as make eight pictures and maps side by side."""
    out: str = "sheet.png"
    """The file to write."""
    overwrite: bool = False
    """Replace the file if it exists."""


def show_data(words: list[str]) -> int:
    """Write a contact sheet; print its path."""
    with users_mistakes():
        command: Show = parse(Show, words, "data show")
        from flatmtl_bench import data  # noqa: PLC0415  (seconds, which help does not need)

        options = {"source": command.source, **command.data.options(command.split)}
        name = command.name or command.data.name
        dataset = data.build(name, command.split, seed=command.seed, root=command.root, **options)
        say(str(dataset))
        size = (command.rows, command.columns)
        answer(data.contact_sheet(dataset, command.out, *size, seed=command.seed, overwrite=command.overwrite))
    return 0


@dataclass(frozen=True)
class Check:
    """Say what a folder of data holds, and all that is wrong with it (then the exit code is 1); nothing is changed."""

    path: Positional[str]
    """Folder of the data, as for --root; or a file, where the data are one."""
    dataset: str
    """Which data set it should be: nyuv2, cityscapes, celeba, multimnist, multifashion or multifashionmnist."""


def check_data(words: list[str]) -> int:
    """Print what a folder holds, and each finding in a line."""
    with users_mistakes():
        command: Check = parse(Check, words, "data check")
        from flatmtl_bench.data.check import check  # noqa: PLC0415  (seconds, which help does not need)

        report = check(command.path, command.dataset)
    answer(report)
    return 1 if report.findings else 0


@dataclass(frozen=True)
class Where:
    """Say how to obtain the data sets that others made: links, terms, sizes, layout. Nothing is fetched."""

    name: Positional[str] = ""
    """Data set; none: all of them."""


def where_data(words: list[str]) -> int:
    """Print what there is to know before fetching a data set."""
    with users_mistakes():
        name = parse(Where, words, "data where").name
        from flatmtl_bench.data.where import where  # noqa: PLC0415  (seconds, which help does not need)

        answer(where(name))
    return 0


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
