"""Files that are replaced as a whole, and are not written through links."""

import os
from contextlib import suppress
from pathlib import Path


class WriteError(OSError):
    """A file of a run could not be written or removed: the disk is full, or it is not allowed."""


def write_whole(path: Path, content: str | bytes | memoryview) -> None:
    """Replace ``path`` in one go: a reader or a crash sees the old or the new content, never a part.

    Raises:
        WriteError: naming ``path``; it is as it was.
    """
    draft = path.with_name(temporary(path.name))
    remove(draft)
    try:
        with open(draft, "xb", opener=_no_link) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        _sync(path.parent)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise WriteError(f"{path} could not be written: {error}.") from error


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def remove(path: Path) -> None:
    """Remove a file, if it is there.

    Raises:
        WriteError: naming ``path``.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise WriteError(f"{path} could not be removed: {error}.") from error


def make_folder(path: Path) -> None:
    """Make a folder in one that is there, unless it is there, too.

    Raises:
        WriteError: naming ``path``.
    """
    try:
        path.mkdir(exist_ok=True)
        _sync(path.parent)
    except OSError as error:
        raise WriteError(f"{path} could not be made: {error}.") from error


def check_writable(folder: Path) -> None:
    """Raise a `NotADirectoryError` unless a folder is there, or can be made, and can be written to."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise NotADirectoryError(f"{there} is no folder that can be written to. Choose another --out.")


def _sync(folder: Path) -> None:
    """Make sure that the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_drafts(folder: Path) -> None:
    """Remove what processes that were killed have left half-written in a folder, if it is there.

    Raises:
        WriteError: naming what cannot be removed.
    """
    for draft in folder.glob(temporary("*")):
        remove(draft)


def temporary(name: str) -> str:
    """Return the name of the draft of a file."""
    return f".{name}.part"
