"""`flatmtl run`: trains a recipe, says what becomes of it, and ends well whatever stops it."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from time import sleep
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from flatmtl_bench import recipes
from flatmtl_bench.choices import whole_number
from flatmtl_bench.commands.words import parse, users_mistakes
from flatmtl_bench.output import Stop, answer, say
from flatmtl_bench.protocols import Row
from flatmtl_bench.recipes import Config
from flatmtl_bench.signals import FirstSignal

if TYPE_CHECKING:
    from flatmtl_bench.runs import RunFolder
    from flatmtl_bench.trainer import Trainer


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
                trainer.provenance.check_result(folder)
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
