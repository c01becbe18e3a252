"""The subcommands of `flatmtl`. Their options are dataclasses; tyro makes the flags and the help from them."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg

from flatmtl_bench import recipes
from flatmtl_bench.cli import Stop, answer, say
from flatmtl_bench.protocols import Row
from flatmtl_bench.recipes import RECIPES, Config
from flatmtl_bench.recipes.config import Placement, Source, Split

if TYPE_CHECKING:
    from flatmtl_bench.runs import RunFolder


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


def parse(command: Any, words: list[str], name: str, default: Any = None) -> Any:
    """Return the dataclass ``command`` filled from the words, or exit with tyro's help or complaint."""
    given = {} if default is None else {"default": default}
    return tyro.cli(command, args=words, prog=f"flatmtl {name}", config=(FlagCreatePairsOff,), **given)


@dataclass(frozen=True)
class List:
    """List the recipes."""

    part: Positional[str] = ""
    """Only those whose name contains this."""


def list_recipes(words: list[str]) -> int:
    """Print the names of the recipes and what they are."""
    part = parse(List, words, "list").part
    found = {name: recipe.__doc__ for name, recipe in RECIPES.items() if part in name}
    if not found:
        raise Stop(f"no recipe contains {part!r}; `flatmtl list` shows all {len(RECIPES)}.")
    for name, text in found.items():
        answer(f"{name:<36} {text}")
    return 0


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
    dry_run: bool = False
    """Print the full config and do nothing else."""


def run(words: list[str]) -> int:
    """Train a recipe; print the summary."""
    with users_mistakes():
        command: Run = parse(Run, words, "run", Run(_recipe(words)))
    if command.dry_run:
        answer(json.dumps(command.config.to_dict(), indent=2))
        return 0
    summary = _train(command)
    answer(json.dumps(summary, indent=2))
    return 0


def _recipe(words: list[str]) -> Config:
    """Return the config of the recipe, which is the first word; the default one if only help is wanted."""
    if words and not words[0].startswith("-"):
        return recipes.build(words[0])
    if {"-h", "--help"} & set(words):
        return Config()
    raise Stop("name a recipe first: flatmtl run RECIPE [OPTIONS]; `flatmtl list` shows them.")


def _train(command: Run) -> dict[str, Any]:
    from flatmtl_bench.progress import accuracies, epoch_line, training_bars  # noqa: PLC0415
    from flatmtl_bench.runs import RunError, RunFolder  # noqa: PLC0415
    from flatmtl_bench.trainer import Trainer  # noqa: PLC0415  (seconds, which help and mistakes do not need)

    with users_mistakes():
        trainer = Trainer(command.config)
        folder = RunFolder(command.out, trainer.config, resume=command.resume, overwrite=command.overwrite)
    with folder, training_bars() as bars:
        if folder.finished:
            with users_mistakes(RunError, OSError):
                trainer.check_data(folder)
                say(f"{folder.path} is finished; here is its result. Use --overwrite to train again.")
                return folder.summary()
        for dataset in trainer.data.values():
            say(str(dataset))
        bar = bars.add_task(folder.path.name, accuracy="")

        def watch(done: int, total: int, row: Row | None) -> None:
            bars.update(bar, completed=done, total=total)
            if row is not None:
                bars.update(bar, accuracy=accuracies(row, ["test"]))
                say(epoch_line(row))

        try:
            with users_mistakes(RunError, OSError):
                summary = trainer.fit(folder, watch)
        except FloatingPointError as error:
            raise Stop(f"{error} {_kept(folder)} Try a smaller --optimizer.lr or --rho.", code=1) from error
        except KeyboardInterrupt:
            raise Stop(f"interrupted. {_kept(folder)} The same command with --resume goes on.", code=130) from None
        say(f"the run is in {folder.path}")
        return summary


def _kept(folder: "RunFolder") -> str:
    return f"{folder.path} keeps {len(folder.rows())} finished epochs."


@dataclass(frozen=True)
class Show:
    """Write a sheet of pictures of a data set, each with its labels."""

    name: Positional[str] = "multimnist"
    """Data set: multimnist, multifashion or multifashionmnist."""
    split: Split = "train"
    """Which part of it."""
    source: Source = "auto"
    """Where the pictures come from; auto: the full data if present, else mnist5k, 5,000 embedded digits."""
    root: str | None = None
    """Folder of the data; None: data."""
    seed: int = 0
    """Seed of the train pairs, and of which items are shown."""
    placement: Placement = "corner"
    """Where the two pictures lie: in the corners, or moved by up to 4 pixels in each direction."""
    same_label: bool = True
    """Both pictures may carry one label (the default); --no-same-label: they never do."""
    download: bool = False
    """Fetch what is not there, for --source full."""
    rows: int = 8
    """Rows of the sheet."""
    columns: int = 8
    """Columns of the sheet."""
    out: str = "sheet.png"
    """The file to write."""
    overwrite: bool = False
    """Replace the file if it exists."""


def show_data(words: list[str]) -> int:
    """Write a contact sheet; print its path."""
    with users_mistakes():
        command: Show = parse(Show, words, "data show")
        from flatmtl_bench import data  # noqa: PLC0415  (seconds, which help does not need)

        dataset = data.build(
            command.name,
            command.split,
            seed=command.seed,
            root=command.root,
            source=command.source,
            placement=command.placement,
            same_label=command.same_label,
            download=command.download,
        )
        say(str(dataset))
        size = (command.rows, command.columns)
        answer(data.contact_sheet(dataset, command.out, *size, seed=command.seed, overwrite=command.overwrite))
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


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "demo": demo,
    "list": list_recipes,
    "run": run,
    "data show": show_data,
}
