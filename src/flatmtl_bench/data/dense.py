"""Pictures with a target for each pixel, read from folders of .npy files as Liu et al. (2019) share them."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from flatmtl_bench.choices import whole_number
from flatmtl_bench.data.augmentation import AugmentedDataset, Zoom, show
from flatmtl_bench.data.base import TaskDataset, check_split
from flatmtl_bench.data.findings import Broken, Finding, raise_if_any
from flatmtl_bench.data.folders import PARTS, Layout, Part, survey
from flatmtl_bench.data.maps import Labels, Map, open_array

HELD_OUT_SEED = 1989  # of the validation split, the same for all run seeds
READERS = 4  # threads: more do not make a disk faster
HASHED = 4  # samples of which the fingerprint has the contents


class DenseDataset(AugmentedDataset):
    """Pictures ``(3, H, W)`` with maps as targets; the base of `NYUv2` and `CityScapes`.

    Each file is mapped into memory while an item is made of it, and only what the item shows of it is read.

    Splits: ``test`` is what the files call val. For validation a share of train is held out, by a draw that is the same
    for every ``seed``. The draw is by picture: pictures of one room may fall on both sides, as the files do not tell
    rooms apart.

    Checks: always, that every file is there, whole, and of a right shape and type; with ``check``, the numbers of
    every file of the split.

    Args:
        split: ``train``, ``validation`` or ``test``.
        folder: with the folders ``train`` and ``val``.
        seed: of the augmentation.
        samples: number of pictures, chosen by a draw that is the same for every ``seed``; None: all.
        validation_share: of the pictures in train; 0: none.
        check: read every file of the split, to find what is wrong with it.
        augment: whether train pictures are enlarged, cropped and mirrored at random, see `augmentation.augment`. The
            others never are.

    Raises:
        FileNotFoundError: a file or folder is missing; the message names it.
        ValueError: a file is not as it should be; the message names it. Or an option is wrong.

    Attributes:
        numbers: of the files.
        size: height and width of the pictures.
    """

    layout: ClassVar[Layout]
    zoom: Zoom = "divide"

    def __init__(
        self,
        split: str,
        folder: str | Path,
        *,
        seed: int = 0,
        samples: int | None = None,
        validation_share: float = 0.1,
        check: bool = True,
        augment: bool = True,
    ) -> None:
        check_split(split, validation_share, seed)
        maps, folder = self.layout.maps, Path(folder).expanduser()
        self._part = survey(folder / PARTS[split], self.layout)
        command = f"flatmtl data check {folder} --dataset {self.layout.name}"
        raise_if_any(self._part.findings, command)
        self.numbers = _take(split, len(self._part.numbers), validation_share, samples)
        if check:
            files = [(maps[name], self._part.path(name, n)) for name in maps for n in self.numbers]
            raise_if_any(findings_in(files), command)
        self.split, self.source, self.size = split, "full", self._part.size
        self.seed, self.augment = seed, augment and split == "train"
        self.objectives = {task: kind.objective for task, kind in maps.items() if kind.objective is not None}
        self.classes = {task: kind.classes for task, kind in maps.items() if isinstance(kind, Labels)}
        self._fingerprint = _fingerprint(self._part, self.numbers)

    @property
    def fingerprint(self) -> str:
        """A short hash of names and lengths of all files of this split, and of the contents of a few."""
        return self._fingerprint

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        number = self.numbers[index]
        view = self.view(number, self.size)
        parts = {
            name: kind.tensor(open_array(self._part.path(name, number))[view.window])
            for name, kind in self.layout.maps.items()
        }
        return show(view, parts.pop("image"), parts, self.objectives, self.zoom)

    def __str__(self) -> str:
        whence = "held out of" if self.split == "validation" else "of"
        size, changed = "x".join(map(str, self.size)), ", cropped and mirrored at random" * self.augment
        return f"{self.layout.name} {self.split}: {len(self):,} pictures {whence} {self._part.folder}, {size}{changed}"


def files_or_rendered(
    files: type[DenseDataset],
    rendered: Callable[..., TaskDataset],
    split: str,
    *,
    root: str | Path | None,
    source: str,
    size: Sequence[int] | None,
    check: bool,
    **common: Any,
) -> TaskDataset:
    """Return a split of the files that a source stands for, or of rendered pictures of the same kind.

    Args:
        files: class of the files.
        rendered: makes rendered pictures.
        split: ``train``, ``validation`` or ``test``.
        root: folder of the files.
        source: ``full``, ``auto`` or the name of the rendered kind; see `Layout.choose`.
        size: of rendered pictures.
        check: whether files are read to find what is wrong with them.
        common: options of both.
    """
    folder = files.layout.choose(source, root, size)
    if folder is None:
        return rendered(split, size=size, **common)
    return files(split, folder, check=check, **common)


def _take(split: str, total: int, validation_share: float, samples: int | None) -> list[int]:
    """Return which of the files numbered 0, ..., total - 1 belong to a split, or the chosen number of them."""
    order = np.random.RandomState(HELD_OUT_SEED).permutation(total)
    held_out = 0 if split == "test" else round(validation_share * total)
    numbers = order[:held_out] if split == "validation" else order[held_out:]
    if not len(numbers):
        raise ValueError(
            f"no pictures for split {split!r}: validation_share={validation_share} divides {total} into "
            f"{total - held_out} train and {held_out} validation. Change it."
        )
    if samples is not None:
        whole_number("samples", samples, 1)
        if samples > len(numbers):
            raise ValueError(f"samples={samples}, but {split} has {len(numbers)} pictures. Ask for as many, or fewer.")
    return sorted(numbers[:samples].tolist())


def findings_in(files: Iterable[tuple[Map, Path]]) -> list[Finding]:
    """Return what is wrong with the numbers of files, in the order of the files."""
    with ThreadPoolExecutor(READERS) as pool:
        return [finding for findings in pool.map(_findings_in_one, files) for finding in findings]


def _findings_in_one(file: tuple[Map, Path]) -> list[Finding]:
    kind, path = file
    try:
        return kind.findings(path, np.array(open_array(path)))
    except Broken as broken:  # since its header was read
        return [broken.finding]


def _fingerprint(part: Part, numbers: list[int]) -> str:
    digest = hashlib.sha256()
    sampled = {numbers[i * (len(numbers) - 1) // (HASHED - 1)] for i in range(HASHED)}
    for name, folder in part.folders.items():
        for number in numbers:
            path = part.path(name, number)
            digest.update(f"{name} {folder.name} {number} {path.stat().st_size}\n".encode())
            if number in sampled:
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
