"""Checkpoints: where a run can go on, in files whose damage is seen.

``checkpoints/epoch-0003-step-0012-<checksum>.pt`` is the state after three epochs and twelve steps of the next one.
The checksum of the whole content is part of the name, so one rename puts both in place, and the file is an ordinary one
for ``torch.load``. ``snapshots/epoch-0003-<checksum>.pt`` holds the weights alone.
"""

import hashlib
import io
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flatmtl_bench.files import WriteError, make_folder, remove, remove_drafts, write_whole
from flatmtl_bench.runs import CHECKPOINTS, DAMAGED, SNAPSHOTS, RunError

NAME = re.compile(r"epoch-\d+-step-\d+-[0-9a-f]+\.pt")
SNAPSHOT = re.compile(r"epoch-\d+-[0-9a-f]+\.pt")
KEPT = 2
"""How many of the last checkpoints stay, beside the best."""


class Checkpoints:
    """The checkpoints in the folder of a run, of which the last two and the best are kept."""

    def __init__(self, run: Path) -> None:
        self.path = run / CHECKPOINTS

    def save(self, state: Mapping[str, Any], epochs: int, steps: int, best: int | None) -> None:
        """Write the state after ``epochs`` epochs and ``steps`` steps, then remove what is not kept.

        Args:
            state: what ``torch.load(weights_only=True)`` accepts.
            epochs: finished epochs.
            steps: steps of the epoch after them.
            best: number of the epoch whose end is kept, however old it is.

        Raises:
            WriteError: it cannot be written, and the earlier checkpoints are as they were; or it is written, and what
                is not kept cannot be removed.
        """
        _write(self.path, f"epoch-{epochs:04}-step-{steps:04}", state)
        for path in self._files()[:-KEPT]:
            if _position(path) != (best, 0):
                remove(path)

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the last checkpoint that is whole, and its file; ``None`` if there are none.

        Damaged files after it are named in a warning, and renamed so that they are not taken for checkpoints again.

        Raises:
            RunError: every checkpoint is damaged, or what is whole is no checkpoint.
            WriteError: a damaged file cannot be renamed, or one half-written cannot be removed.
        """
        remove_drafts(self.path)
        files = self._files()[::-1]
        whole = next((path for path in files if _is_whole(path)), None)
        if whole is None:
            if files:
                raise RunError(f"every checkpoint in {self.path} is damaged. Use --overwrite to start again.")
            return None
        state = _load(whole)
        for path in files[: files.index(whole)]:
            _set_aside(path)
            warnings.warn(
                f"{path} is damaged: its content is not what its name says. The one before it, {whole.name}, is used.",
                stacklevel=2,
            )
        return whole, state

    def of_epoch(self, epoch: int) -> dict[str, Any]:
        """Return the state after an epoch.

        Raises:
            RunError: there is no such checkpoint, or it is damaged.
        """
        found = [path for path in self._files() if _position(path) == (epoch, 0)]
        if not found:
            raise RunError(f"{self.path} has no checkpoint of epoch {epoch}. Train the run again with --overwrite.")
        _check_whole(found[0])
        return _load(found[0])

    def _files(self) -> list[Path]:
        """Return the checkpoints, the oldest first."""
        found = self.path.iterdir() if self.path.is_dir() else ()
        return sorted((path for path in found if NAME.fullmatch(path.name) and path.is_file()), key=_position)


def save_snapshot(run: Path, weights: Mapping[str, Any], epoch: int) -> None:
    """Write the weights as an epoch left them into the run's ``snapshots/``.

    Raises:
        WriteError: they cannot be written.
    """
    remove_drafts(run / SNAPSHOTS)
    _write(run / SNAPSHOTS, f"epoch-{epoch:04}", weights)


def snapshots(run: Path) -> dict[int, Path]:
    """Return the snapshots of a run: epoch -> file, in the order of the epochs."""
    found = (run / SNAPSHOTS).glob("epoch-*.pt")
    return {int(path.stem.split("-")[1]): path for path in sorted(found) if SNAPSHOT.fullmatch(path.name)}


def load_snapshot(path: Path) -> dict[str, Any]:
    """Return the weights that a snapshot holds.

    Raises:
        RunError: it is damaged, or it is none.
    """
    _check_whole(path)
    return _load(path)


def _write(folder: Path, stem: str, state: Mapping[str, Any]) -> None:
    """Write a state into a new file, then remove others of the same stem, of runs that were interrupted after it."""
    buffer = io.BytesIO()  # so that a full disk is an error of `write`, which says so
    torch.save(dict(state), buffer)
    path = folder / f"{stem}-{_checksum(buffer)}.pt"
    make_folder(folder)
    write_whole(path, buffer.getbuffer())
    for other in folder.glob(f"{stem}-*.pt"):
        if other != path:
            remove(other)


def _set_aside(path: Path) -> None:
    try:
        path.rename(path.with_name(path.name + DAMAGED))
    except OSError as error:
        raise WriteError(f"{path} is damaged and could not be renamed: {error}.") from error


def _load(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what was not written here can raise nearly anything
        raise RunError(
            f"{path} is no checkpoint of a run, and nothing in it was executed ({type(error).__name__}). Remove it, "
            "or use --overwrite to start again."
        ) from error
    if not isinstance(state, dict):
        raise RunError(
            f"{path} is no checkpoint of a run but a {type(state).__name__}. Use --overwrite to start again."
        )
    return state


def _position(path: Path) -> tuple[int, int]:
    """Return the epochs and steps in a checkpoint's name."""
    _, epochs, _, steps, _ = path.stem.split("-")
    return int(epochs), int(steps)


def _check_whole(path: Path) -> None:
    if not _is_whole(path):
        raise RunError(f"{path} is damaged: its content is not what its name says. Train the run again.")


def _is_whole(path: Path) -> bool:
    with open(path, "rb") as file:
        return path.stem.rpartition("-")[2] == _checksum(file)


def _checksum(file: io.BufferedIOBase) -> str:
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()[:16]
