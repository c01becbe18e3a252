"""Run folders: where a run keeps what it is, what it did and where it can go on.

``runs/<recipe>-<hash of the config>-s<seed>/`` holds

* ``config.json``: every value that decides the numbers;
* ``env.json``: versions, machine, threads;
* ``metrics.jsonl``: one object for each finished epoch;
* ``checkpoint.pt``: where to go on, of the last finished epoch;
* ``summary.json``: the result; it is there if and only if the run is finished.

Every file is replaced as a whole, so a crash leaves the old or the new one, never a part.
"""

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from flatmtl_bench.recipes import Config

FILES = ("config.json", "env.json", "metrics.jsonl", "checkpoint.pt", "summary.json")
LOCK = ".lock"


class RunError(ValueError):
    """A file of a run is broken, missing, or of something else."""


def digest(config: Config) -> str:
    """Return six hexadecimal digits of the hash of what decides a run's numbers beside the seed.

    Where the data lie and which device is used does not count.
    """
    text = json.dumps(_identity(config.to_dict()), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def run_name(config: Config) -> str:
    """Return the name of the folder of a run."""
    return f"{config.recipe}-{digest(config)}-s{config.seed}"


def _identity(config: Mapping[str, Any]) -> dict[str, Any]:
    data = {name: value for name, value in config["data"].items() if name != "download"}
    return {**{k: v for k, v in config.items() if k not in ("seed", "root", "device")}, "data": data}


class RunFolder:
    """The folder of one run, locked until it is closed.

    Use it as a context manager. ``resume`` goes on where the run stopped, or starts it; ``overwrite`` removes the
    files of the run first.

    Raises:
        FileExistsError: if the folder holds a run and neither is asked for, or something that is no run.
        BlockingIOError: if another process has it.
        ValueError: if the run in the folder has another config.
    """

    def __init__(self, out: str | Path, config: Config, *, resume: bool = False, overwrite: bool = False) -> None:
        if resume and overwrite:
            raise ValueError("--resume goes on with a run and --overwrite removes it; use one of them.")
        self.path = Path(out) / run_name(config)
        self.config = config
        self._refuse_foreign()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT)
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
        others = {entry.name for entry in self.path.iterdir()} - {LOCK, *map(_temporary, FILES)}
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
        for name in reversed(FILES):
            (self.path / name).unlink(missing_ok=True)
            (self.path / _temporary(name)).unlink(missing_ok=True)

    def _check_config(self) -> None:
        kept, now = (_identity(c) for c in (_read_json(self.path / "config.json"), self.config.to_dict()))
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
        """Return the result of a finished run."""
        path = self.path / "summary.json"
        try:
            return _read_json(path)
        except ValueError as error:
            raise RunError(_broken(path, error)) from error

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics of the finished epochs."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except ValueError as error:
            raise RunError(_broken(path, error)) from error
        if not all(isinstance(row, dict) and "epoch" in row for row in rows):
            raise RunError(_broken(path, "a line is no object with an epoch"))
        return rows

    def cut_back(self, epoch: int) -> None:
        """Forget the metrics of epochs after ``epoch``, for which there is no checkpoint.

        Raises:
            RunError: if metrics of earlier epochs are missing.
        """
        rows = self.rows()
        if [row["epoch"] for row in rows[:epoch]] != list(range(1, epoch + 1)):
            raise RunError(
                f"{self.path} has a checkpoint of epoch {epoch} but metrics of {_epochs(len(rows))}. "
                "Use --overwrite to start again."
            )
        if epoch == 0 and len(rows) > 1:  # one is that of a run killed between the two writes of its first epoch
            raise RunError(
                f"{self.path} has metrics of {_epochs(len(rows))} but no checkpoint.pt to go on from. "
                "Use --overwrite to start again."
            )
        if len(rows) > epoch:
            self._write_rows(rows[:epoch])

    def append(self, row: Mapping[str, Any]) -> None:
        """Add the metrics of one more epoch."""
        self._write_rows([*self.rows(), row])

    def _write_rows(self, rows: list[Any]) -> None:
        self.write("metrics.jsonl", "".join(_json(row, indent=None) for row in rows))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the result; the run is finished."""
        self.write("summary.json", _json(summary))

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Write what the run is made with."""
        self.write("env.json", _json(environment))

    def write(self, name: str, content: str | bytes) -> None:
        """Replace a file of the run in one go."""
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


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace ``path`` in one go: a reader or a crash sees the old or the new content, never a part."""
    draft = path.with_name(_temporary(path.name))
    with open(draft, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _temporary(name: str) -> str:
    return f".{name}.part"


def _is_run(path: Path) -> bool:
    """Whether a config of ours lies there, whatever its version."""
    try:
        config = _read_json(path / "config.json")
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "recipe" in config and isinstance(config.get("data"), dict)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _json(value: Any, indent: int | None = 2) -> str:
    """Return JSON that every parser reads: numbers that are not finite become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _broken(path: Path, reason: object) -> str:
    return f"{path} is broken ({reason}). Use --overwrite to start again."


def _epochs(count: int) -> str:
    return f"{count} finished epoch{'' if count == 1 else 's'}"
