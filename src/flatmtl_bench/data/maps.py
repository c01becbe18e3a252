"""Pictures, labels, depths and normals as arrays in .npy files: how each is checked, and read as a tensor."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import ClassVar

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor

from flatmtl_bench.data.augmentation import unit_length
from flatmtl_bench.data.findings import Broken, Finding
from flatmtl_bench.metrics import Depth, Normals, Objective, Segmentation
from flatmtl_bench.metrics.segmentation import VOID

ROUNDING = 1e-3  # by which pictures may leave [0, 1]: a resized one does
UNIT = 0.01  # by which the length of a normal may differ from 1: float16 rounds to 0.0005
HEADERS = Lock()  # NumPy reads them by `ast.literal_eval`, which Python 3.11 cannot do in two threads (CPython 106905)
FARTHEST = 100.0  # metres: no indoor sensor sees as far, and inverse depths are smaller still


def open_array(path: Path) -> np.memmap:
    """Return the array in a .npy file as a read-only memory map. Nothing is unpickled, so no code in a file runs.

    Raises:
        Broken: naming the file: it is no .npy file of numbers, a cut one, or cannot be read.
    """
    try:
        with HEADERS:
            array = open_memmap(path, mode="r")
    except Exception as error:  # a damaged header can raise nearly anything
        raise _unreadable(path, " ".join(str(error).split()).rstrip(".") or type(error).__name__) from None
    size, announced = path.stat().st_size, array.offset + array.nbytes
    if size != announced:
        raise _unreadable(path, f"it has {size:,} bytes, its header announces {announced:,}")
    return array


def _unreadable(path: Path, reason: str) -> Broken:
    expected = "a whole .npy file with an array of numbers"
    return Broken(Finding(path, "unreadable", f"cannot be read ({reason})", expected, "Fetch it again."))


@dataclass(frozen=True)
class Map(ABC):
    """What the arrays of one folder show, one for each picture.

    Attributes:
        folders: names that the folder may have, the first of which that is there counts.
        values: the sizes behind height and width.
        number_kinds: NumPy's letters for the kinds of numbers that the arrays may hold.
        what: a few words that name the numbers.
        objective: what a task with such a target is trained by; None for pictures.
    """

    folders: tuple[str, ...]
    values: ClassVar[tuple[int, ...]] = ()
    number_kinds: ClassVar[str] = "f"
    what: ClassVar[str]

    @property
    def objective(self) -> Objective | None:
        """What a task with such a target is trained by; None for pictures."""
        return None

    @abstractmethod
    def tensor(self, part: np.ndarray) -> Tensor:
        """Return an array, or a part of it, as a tensor of its own with channels first."""

    @abstractmethod
    def faults(self, array: np.ndarray) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with finite numbers, each as the kind of the fault and what is there."""

    def tally(self, array: np.ndarray) -> Counter[str]:
        """Return how many pixels are what, of an array without findings."""
        return Counter()

    def valid(self, array: np.ndarray) -> np.ndarray:
        """Return the numbers that mean something."""
        return array

    def header(self, path: Path) -> tuple[tuple[int, int] | None, list[Finding]]:
        """Return height and width of the array in a file, and what is wrong with the file, its numbers apart."""
        try:
            array = open_array(path)
        except Broken as broken:
            return None, [broken.finding]
        findings = []
        if array.dtype.kind not in self.number_kinds:
            findings.append(Finding(path, "dtype", f"dtype {array.dtype}", self.what, _mend("convert it")))
        if array.ndim != 2 + len(self.values) or array.shape[2:] != self.values or 0 in array.shape:
            sizes = ", ".join(["height", "width", *map(str, self.values)])
            findings.append(
                Finding(
                    path,
                    "shape",
                    f"shape {array.shape}",
                    f"({sizes})",
                    _mend("put its axes into this order, with numpy.moveaxis and not reshape,"),
                )
            )
            return None, findings
        return (array.shape[0], array.shape[1]), findings

    def findings(self, path: Path, array: np.ndarray) -> list[Finding]:
        """Return what is wrong with the numbers of a file."""
        if lost := array.size - np.count_nonzero(np.isfinite(array)):
            given = f"{lost:,} of {array.size:,} numbers are NaN or infinite"
            return [Finding(path, "not finite", given, self.what, _mend("replace these"))]
        return [Finding(path, kind, given, self.what, _mend("mend it")) for kind, given in self.faults(array)]


def _mend(how: str) -> str:
    return f"Load it with numpy.load, {how} and save it with numpy.save, or fetch it again."


class Picture(Map):
    """An RGB picture."""

    values = (3,)
    what = "floats in [0, 1]"

    def tensor(self, part: np.ndarray) -> Tensor:
        """Return ``(3, h, w)``, float32."""
        return channels_first(part).clamp_(0, 1)

    def faults(self, array: np.ndarray) -> Iterator[tuple[str, str]]:
        """Yield whether it leaves the range: as 0..255 it would be another input to every network."""
        low, high = array.min(), array.max()
        if low < -ROUNDING or high > 1 + ROUNDING:
            yield "range", f"values from {low:.4g} to {high:.4g}"


@dataclass(frozen=True)
class Labels(Map):
    """A class for each pixel."""

    classes: tuple[str, ...]
    number_kinds: ClassVar[str] = "fiu"

    @property
    def what(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The numbers in words."""
        return f"whole numbers 0..{len(self.classes) - 1}, or {VOID} for void"

    @property
    def objective(self) -> Segmentation:
        """Segmentation into the classes."""
        return Segmentation(self.classes)

    def tensor(self, part: np.ndarray) -> Tensor:
        """Return ``(h, w)``, int64."""
        return torch.from_numpy(np.array(part, np.int64))

    def faults(self, array: np.ndarray) -> Iterator[tuple[str, str]]:
        """Yield whether a label is no class, or none is one."""
        low, high = array.min(), array.max()
        if (array != np.rint(array)).any():
            yield "not whole", "labels that are no whole numbers"
        if low < VOID or high >= len(self.classes):
            yield "range", f"labels from {low:.6g} to {high:.6g}"
        if high == VOID:
            yield "nothing valid", "every pixel is void"

    def tally(self, array: np.ndarray) -> Counter[str]:
        """Return how many pixels are void, and how many have which class."""
        counts = np.bincount(array.astype(np.int64).ravel() - VOID, minlength=1 + len(self.classes))
        return Counter(dict(zip(("void", *self.classes), counts.tolist(), strict=True)))


class DepthMap(Map):
    """A depth, or inverse depth, for each pixel; 0 where it is not known."""

    values = (1,)
    what = f"floats from 0 (invalid) to {FARTHEST:g}, metres or normalised disparities"

    @property
    def objective(self) -> Depth:
        """Depth estimation."""
        return Depth()

    def tensor(self, part: np.ndarray) -> Tensor:
        """Return ``(1, h, w)``, float32."""
        return channels_first(part)

    def faults(self, array: np.ndarray) -> Iterator[tuple[str, str]]:
        """Yield whether a depth is none, or none is known."""
        low, high = array.min(), array.max()
        if low < 0 or high > FARTHEST:
            yield "range", f"values from {low:.4g} to {high:.4g}"
        if low == high == 0:
            yield "nothing valid", "every pixel is 0, so none is valid"

    def valid(self, array: np.ndarray) -> np.ndarray:
        """Return the depths that are known."""
        return array[array != 0]

    def tally(self, array: np.ndarray) -> Counter[str]:
        """Return how many pixels are invalid."""
        return Counter(invalid=int((array == 0).sum()))


class NormalMap(Map):
    """A unit vector for each pixel; (0, 0, 0) where it is not known."""

    values = (3,)
    what = "floats, each pixel a vector of length 1, or (0, 0, 0) for invalid"

    @property
    def objective(self) -> Normals:
        """Estimation of normals."""
        return Normals()

    def tensor(self, part: np.ndarray) -> Tensor:
        """Return ``(3, h, w)``, float32, each normal of length 1 or 0."""
        return unit_length(channels_first(part))

    def faults(self, array: np.ndarray) -> Iterator[tuple[str, str]]:
        """Yield whether lengths are wrong: a few may be too short, as those between two surfaces are when resized."""
        lengths = _lengths(array)
        if not lengths.any():
            yield "nothing valid", "every normal is (0, 0, 0), so none is valid"
        elif lengths.max() > 1 + UNIT:
            yield "too long", f"normals of length up to {lengths.max():.4g}"
        elif np.median(lengths[lengths > 0]) < 1 - UNIT:
            yield "too short", f"half of the normals no longer than {np.median(lengths[lengths > 0]):.4g}"

    def tally(self, array: np.ndarray) -> Counter[str]:
        """Return how many pixels are invalid, and how many normals are too short."""
        lengths = _lengths(array)
        short = np.count_nonzero((lengths > 0) & (lengths < 1 - UNIT))
        return Counter({"invalid": lengths.size - np.count_nonzero(lengths), "shorter than 1": short})


def _lengths(array: np.ndarray) -> np.ndarray:
    vectors = np.asarray(array, np.float32)
    return np.sqrt(np.einsum("hwc,hwc->hw", vectors, vectors))


def channels_first(part: np.ndarray) -> Tensor:
    """Return ``(h, w, C)`` as ``(C, h, w)``, float32, in memory of its own: a memory map can be closed."""
    return torch.from_numpy(np.array(part.transpose(2, 0, 1), np.float32, order="C"))
