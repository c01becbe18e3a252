"""Run folders: where a run keeps what it is, what it did and where it can go on.

``runs/<recipe>-<hash of the config>-s<seed>/`` holds

* ``config.json``: every value that decides the numbers;
* ``env.json``: versions, machine, threads;
* ``metrics.jsonl``: one object for each finished epoch; the same whenever the run is repeated or was interrupted;
* ``times.jsonl``: one object for each finished epoch, of how long it took;
* ``checkpoints/``: where to go on; see `flatmtl_bench.checkpoints`;
* ``logs/``: the metrics as loggers have them; see `flatmtl_bench.loggers`;
* ``snapshots/``: the weights of every so many epochs, if wanted;
* ``error.txt``: why the run has failed, if a sweep has found that it does;
* ``summary.json``: the result; it is there if and only if the run is finished.

Every file is replaced as a whole, so a crash leaves the old or the new one, never a part.
"""

import fcntl
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from flatmtl_bench.config_file import check_name, config_values, read_config
from flatmtl_bench.files import WriteError, remove, remove_drafts, temporary, write_whole
from flatmtl_bench.recipes import Config

METRICS, TIMES = "metrics.jsonl", "times.jsonl"
FILES = ("config.json", "env.json", METRICS, TIMES, "summary.json")
CHECKPOINTS, SNAPSHOTS, LOGS = "checkpoints", "snapshots", "logs"
DAMAGED = ".damaged"
"""Ending of a checkpoint that was found damaged."""
ERROR = "error.txt"
LOCK = ".lock"
ELSEWHERE = (
    *("seed", "root", "device", "devices", "num_nodes", "strategy", "workers", "loggers"),
    *("data.download", "data.unchecked"),
)
"""What in a config is no part of the hash in the name of a run."""


class RunError(ValueError):
    """A file of a run is broken, missing, or of something else."""


def digest(config: Config) -> str:
    """Return six hexadecimal digits of the hash of what decides a run's numbers beside the seed.

    Where the data lie and how they are fetched, which and how many devices and processes are used, and who is told
    the metrics does not count.
    """
    text = json.dumps(settings(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def run_name(config: Config) -> str:
    """Return the name of the folder of a run.

    Raises:
        ValueError: the recipe's name could lead out of the folder of runs.
    """
    check_name(config.recipe)
    return f"{config.recipe}-{digest(config)}-s{config.seed}"


def settings(config: Config) -> dict[str, Any]:
    """Return what decides the numbers of a run beside the seed, by dotted names.

    Example:
        >>> from flatmtl_bench import recipes
        >>> found = settings(recipes.build("multimnist_f_cagrad"))
        >>> found["rho"], found["method.options.c"], "seed" in found
        (0.5, 0.4, False)
    """
    return {name: value for name, value in config.flat().items() if name not in ELSEWHERE}


class RunFolder:
    """The folder of one run, locked until it is closed.

    Use it as a context manager. ``resume`` goes on where the run stopped, or starts it; ``overwrite`` removes the
    files of the run first.

    Raises:
        FileExistsError: if the folder holds a run and neither is asked for, or something that is no run.
        BlockingIOError: if another process has it.
        ValueError: if the run in the folder has another config.
        RunError: if something that a run writes is a symbolic link, or neither a file nor a folder.
        WriteError: if a file cannot be written or removed.
    """

    def __init__(self, out: str | Path, config: Config, *, resume: bool = False, overwrite: bool = False) -> None:
        if resume and overwrite:
            raise ValueError("--resume goes on with a run and --overwrite removes it; use one of them.")
        self.path = Path(out) / run_name(config)
        self.config = config
        _refuse_links(self.path)
        self._refuse_foreign()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            self._acquire()
            self._enter(resume, overwrite)
        except BaseException:
            self.close()
            raise

    def _refuse_foreign(self) -> None:
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise FileExistsError(f"{self.path} is a file; expected a folder for the run. Choose another --out.")
        others = {entry.name for entry in self.path.iterdir()} - {LOCK, *map(temporary, FILES)}
        if others and not _is_run(self.path):
            raise FileExistsError(
                f"{self.path} holds {sorted(others)[0]} but no config.json of a run, so it is left alone. "
                "Choose another --out, or move it away."
            )

    def _acquire(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"{self.path} is in use by another process. Wait for it to end, or choose another --out or --seed."
            ) from None
        self.check_held()

    def check_held(self) -> None:
        """Raise unless the folder is the one that was locked.

        Raises:
            WriteError: it was removed, moved or replaced, so that another process may be writing there.
        """
        try:
            held = os.path.samestat(os.fstat(self._lock), os.lstat(self.path / LOCK))
        except OSError:
            held = False
        if not held:
            raise WriteError(
                f"{self.path} was removed or replaced while this process had it, so nothing more is written there."
            )

    def _enter(self, resume: bool, overwrite: bool) -> None:
        if _is_run(self.path):
            if overwrite:
                self._clear()
            elif resume:
                self._check_config()
            else:
                raise FileExistsError(
                    f"{self.path} already holds {_epochs(len(self.rows()))}. "
                    "Use --resume to go on or --overwrite to start again."
                )
        if not _is_run(self.path):
            self.write("config.json", _json(self.config.to_dict()))

    def _clear(self) -> None:
        """Remove what runs write and nothing else, the result first, the config last."""
        for name in ("summary.json", ERROR):
            remove(self.path / name)
        for folder in (self.path / CHECKPOINTS, self.path / SNAPSHOTS):
            remove_drafts(folder)
            for path in [*folder.glob("epoch-*.pt"), *folder.glob(f"epoch-*.pt{DAMAGED}")]:
                remove(path)
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        for name in reversed(FILES):
            remove(self.path / name)
            remove(self.path / temporary(name))

    def _check_config(self) -> None:
        try:
            found = read_config(self.path / "config.json")
        except ValueError as error:
            raise RunError(f"{error} Use --overwrite to start again, or choose another --out.") from error
        kept, now = ({**settings(config), "seed": config.seed} for config in (found, self.config))
        if different := sorted(key for key in {*kept, *now} if kept.get(key) != now.get(key)):
            raise ValueError(
                f"{self.path} was made with another config: {', '.join(different)} differ. "
                "Use --overwrite to start again, or choose another --out."
            )

    @property
    def finished(self) -> bool:
        """Whether the run has its result."""
        return (self.path / "summary.json").exists()

    def summary(self) -> dict[str, Any]:
        """Return the result of a finished run.

        Raises:
            RunError: the file holds something else.
        """
        path = self.path / "summary.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise RunError(_broken(path, error)) from error
        if not isinstance(found, dict):
            raise RunError(_broken(path, f"expected an object, got {found!r:.80}"))
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics of the finished epochs."""
        path = self.path / METRICS
        if not path.exists():
            return []
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except (ValueError, RecursionError) as error:
            raise RunError(_broken(path, error)) from error
        if not all(isinstance(row, dict) and "epoch" in row for row in rows):
            raise RunError(_broken(path, "a line is no object with an epoch"))
        return rows

    def check_fresh(self) -> None:
        """Raise unless the run, which has no checkpoint, has not begun.

        Raises:
            RunError: there are metrics, so it has.
        """
        if rows := self.rows():
            raise RunError(
                f"{self.path} has metrics of {_epochs(len(rows))} but no checkpoint in {CHECKPOINTS}/ to go on from. "
                "Use --overwrite to start again."
            )

    def append(self, row: Mapping[str, Any], name: str = METRICS) -> None:
        """Add a row to the metrics or, with their name, to the times."""
        path = self.path / name
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        self.write(name, before + _json(row, indent=None))

    def write_rows(self, rows: Sequence[Mapping[str, Any]], name: str = METRICS) -> None:
        """Replace the metrics or, with their name, the times by these."""
        self.write(name, "".join(_json(row, indent=None) for row in rows))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the result; the run is finished, and an error of before is of no interest."""
        self.write("summary.json", _json(summary))
        remove(self.path / ERROR)

    def write_error(self, text: str) -> None:
        """Record why the run has failed."""
        self.write(ERROR, text)

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Write what the run is made with."""
        self.write("env.json", _json(environment))

    def write(self, name: str, content: str | bytes) -> None:
        """Replace a file of the run in one go."""
        self.check_held()
        write_whole(self.path / name, content)

    def close(self) -> None:
        """Let another process have the folder."""
        os.close(self._lock)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _refuse_links(run: Path) -> None:
    """Raise if a run in a folder would read, write or remove something elsewhere, or wait for ever for what it reads.

    Raises:
        RunError: naming what is a symbolic link, or neither a file nor a folder.
    """
    for path in _written(run):
        kind = path.lstat().st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            what = f"a symbolic link to {os.readlink(path)}" if stat.S_ISLNK(kind) else "neither a file nor a folder"
            raise RunError(
                f"{path} is {what}; a run reads and writes ordinary files in its own folder only. "
                "Remove it, or choose another --out."
            )


def _written(run: Path) -> Iterator[Path]:
    """Yield what is there of that which runs write, each folder before what is in it.

    What a logger keeps within its own folder is left out: W&B makes links there, and removing them follows none.
    """
    folders = (CHECKPOINTS, SNAPSHOTS, LOGS)
    names = {*FILES, ERROR, LOCK, *folders, *map(temporary, (*FILES, ERROR))}
    entries = list(run.iterdir()) if run.is_dir() else []
    yield from (entry for entry in entries if entry.name in names)
    for entry in entries:
        if entry.name in folders and entry.is_dir():
            yield from entry.iterdir()


def _is_run(path: Path) -> bool:
    """Whether a config of ours lies there, whatever its version."""
    try:
        config = config_values(path / "config.json")
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "recipe" in config and isinstance(config.get("data"), dict)


def _json(value: Any, indent: int | None = 2) -> str:
    """Return JSON that every parser reads: numbers that are not finite become null."""
    return json.dumps(finite(value), indent=indent, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """Return plain values in which numbers that are not finite are None, as they are in the files."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _broken(path: Path, reason: object) -> str:
    return f"{path} is broken ({reason}). Use --overwrite to start again."


def _epochs(count: int) -> str:
    return f"{count} finished epoch{'' if count == 1 else 's'}"
