"""CelebA: photographs of faces, 40 attributes each."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor
from torchvision.datasets.folder import pil_loader
from torchvision.transforms.v2.functional import pil_to_tensor

from flatmtl_bench.choices import one_of, whole_number
from flatmtl_bench.data.attributes import ATTRIBUTES, AttributeDataset
from flatmtl_bench.data.base import SPLITS
from flatmtl_bench.data.faces40 import Faces40
from flatmtl_bench.data.findings import Broken, Finding, Missing, Report, raise_if_any

SOURCES = ("auto", "full", "faces40")
SIZE = (64, 64)
FIXED_SEED = 1989  # of the choice of samples, the same for all run seeds
HASHED = 16  # pictures of which the fingerprint has the contents

LISTS = {"list_attr_celeba": ATTRIBUTES, "list_eval_partition": ("partition",)}
"""List -> the names of its columns."""
CODES = {"list_attr_celeba": {"-1": 0, "1": 1}, "list_eval_partition": {"0": 0, "1": 1, "2": 2}}
"""List -> what stands in it -> no and yes, or the place of the split in ``SPLITS``."""

_BASES = (".", "celeba")
_LIST_FOLDERS = [Path(base, folder) for base in _BASES for folder in (".", "Anno", "Eval")]
_PICTURE_FOLDERS = [
    Path(base, folder)
    for base in _BASES
    for folder in ("img_align_celeba/img_align_celeba", "img_align_celeba", "Img/img_align_celeba")
]
_LAYOUT = (
    "list_attr_celeba and list_eval_partition (.txt or .csv) and the folder img_align_celeba, together or in Anno, "
    "Eval and Img"
)
_HINT = "`flatmtl data where celeba` says how to obtain CelebA; --source faces40 needs no files."


class CelebA(AttributeDataset):
    """Photographs of celebrities with 40 attributes, 162,770 for training, 19,867 for validation, 19,962 for testing.

    Items are ``(picture, {attribute: 0 or 1})``: float32 pictures ``(3, 64, 64)``, see ``preprocessing``, made of
    aligned crops of 218x178 pixels. Splits are those of the partition list.

    Three layouts are told apart by what is there: the original one (lists in ``Anno`` and ``Eval``, pictures in
    ``Img/img_align_celeba``), that of Sener and Koltun (lists in root, pictures in ``img_align_celeba`` twice over) and
    that of torchvision (everything in ``celeba``; its own class asks for boxes and landmarks, too). Lists are the
    original .txt files, or Kaggle's .csv files where there are none.

    Checks: always, that lists are whole and fit together, and that every picture is there; with ``check``, that every
    picture of the split is whole, by its first and last bytes. `check_celeba` decodes them all.

    Args:
        split: ``train``, ``validation`` or ``test``.
        root: folder of the data.
        samples: number of pictures, chosen by a draw that is always the same; None: all.
        validation_share: 0: there is no validation split; else it is the official one, whatever the share.
        check: look into every file of the split.
        preprocessing: see `AttributeDataset`, as for ``logits`` and the attributes.
        logits: outputs of a model for each attribute.

    Attributes:
        folder: of the pictures.
        names: of the files.

    Raises:
        FileNotFoundError: a list or a picture is missing; the message names it.
        ValueError: a list or a picture is not as it should be; the message names it. Or an option is wrong.

    References:
        - Liu et al. (2015), *Deep learning face attributes in the wild*, ICCV.
        - Sener and Koltun (2018), *Multi-task learning as multi-objective optimization*, NeurIPS.
    """

    def __init__(
        self,
        split: str,
        root: str | Path,
        *,
        samples: int | None = None,
        validation_share: float = 0.1,
        check: bool = True,
        preprocessing: str = "rgb",
        logits: int = 1,
    ) -> None:
        super().__init__(
            split, validation_share=validation_share, size=SIZE, preprocessing=preprocessing, logits=logits
        )
        root = Path(root).expanduser()
        self.folder, attributes, partition = read_folder(root)
        names = [name for name, (part,) in partition.items() if SPLITS[part] == split]
        self.names = _take(split, names, samples)
        raise_if_any(
            missing(self.folder, self.names) or (list(damaged(self.folder, self.names)) if check else []),
            f"flatmtl data check {root} --dataset celeba",
        )
        labels = b"".join(attributes[name] for name in self.names)
        self.labels = np.frombuffer(labels, np.uint8).reshape(len(self.names), len(ATTRIBUTES))
        self.source = "full"

    def picture(self, index: int) -> Tensor:
        """Return one picture as it is: uint8 ``(3, 218, 178)``.

        Raises:
            ValueError: it is no whole JPEG; the message names the file.
        """
        return decoded(self.folder / self.names[index])

    @property
    def fingerprint(self) -> str:
        """A short hash of names and labels, and of the contents of a few pictures."""
        digest = hashlib.sha256("\n".join(self.names).encode() + self.labels.tobytes())
        for name in self.names[:: -(-len(self.names) // HASHED)]:
            digest.update((self.folder / name).read_bytes())
        return digest.hexdigest()[:16]

    def __str__(self) -> str:
        return f"celeba {self.split}: {len(self):,} pictures of {self.folder}, 40 attributes each"


def celeba(
    split: str,
    *,
    seed: int = 0,
    root: str | Path | None = None,
    source: str = "auto",
    samples: int | None = None,
    validation_share: float = 0.1,
    check: bool = True,
    preprocessing: str = "rgb",
    logits: int = 1,
) -> AttributeDataset:
    """Return one split of CelebA, or of drawn faces in its place.

    Args:
        split: ``train``, ``validation`` or ``test``.
        seed: changes nothing.
        root: folder of the data, by default ``data``.
        source: ``full`` reads the files, ``faces40`` draws faces; ``auto`` is ``full`` if root is given or there is
            anything of CelebA in ``data``.
        samples: number of pictures; None: all, or the usual number of drawn ones.
        validation_share: 0: there is no validation split; else it is the official one, whatever the share.
        check: look into every file of the split.
        preprocessing: ``rgb``, ``imagenet``, or ``official`` as in the authors' code; see `AttributeDataset`.
        logits: outputs of a model for each attribute.

    Raises:
        FileNotFoundError, ValueError: files are missing or not as they should be, or an option is wrong.

    Example:
        >>> len(celeba("test", source="faces40"))
        1000
    """
    one_of("source", source, SOURCES)
    whole_number("seed", seed, 0, 2**32)
    folder = Path("data" if root is None else root).expanduser()
    if source != "faces40" and root is not None and not folder.exists():
        raise FileNotFoundError(f"root {folder} does not exist; expected a folder of data. Correct it, or omit it.")
    if source == "auto" and root is not None and not any_of(folder):  # who says where it is wants no other
        raise FileNotFoundError(
            f"no CelebA in {folder}; expected its lists and pictures. `flatmtl data where celeba` says how they should "
            "lie; --source faces40 needs no files."
        )
    common = {
        "samples": samples,
        "validation_share": validation_share,
        "preprocessing": preprocessing,
        "logits": logits,
    }
    if source == "full" or (source == "auto" and any_of(folder)):
        return CelebA(split, folder, check=check, **common)
    return Faces40(split, size=SIZE, **common)


def any_of(root: Path) -> bool:
    """Return whether a folder has anything of CelebA."""
    return any(_list(root, name) for name in LISTS) or any((root / folder).is_dir() for folder in _PICTURE_FOLDERS)


def _list(root: Path, name: str) -> Path | None:
    paths = (root / folder / f"{name}{ending}" for ending in (".txt", ".csv") for folder in _LIST_FOLDERS)
    return next((path for path in paths if path.is_file()), None)


def read_folder(root: Path) -> tuple[Path, dict[str, bytes], dict[str, bytes]]:
    """Return the folder of the pictures, and for each the codes of its attributes and of its split.

    Raises:
        FileNotFoundError: a list or the folder is not there.
        Broken: a list is not as it should be, or the two differ.
    """
    paths = {name: _list(root, name) for name in LISTS}
    folder = next((root / folder for folder in _PICTURE_FOLDERS if (root / folder).is_dir()), None)
    lacking = [f"{name}.txt" for name, path in paths.items() if path is None] + ["img_align_celeba"] * (folder is None)
    if lacking or folder is None:
        raise FileNotFoundError(f"no {' and no '.join(lacking)} in {root}; expected {_LAYOUT}. {_HINT}")
    attributes, partition = (read_list(path, name) for name, path in paths.items() if path is not None)
    if differing := attributes.keys() ^ partition.keys():
        name = min(differing)
        there, path = paths.values() if name in attributes else reversed(paths.values())
        others = f"; {len(differing):,} pictures are in one of the two only" if len(differing) > 1 else ""
        given = f"{name} is not in it, though in {there}{others}"
        raise Broken(Finding(path or root, "names", given, "the same pictures in both lists", "Fetch both again."))
    return folder, attributes, partition


def read_list(path: Path, name: str) -> dict[str, bytes]:
    """Return picture -> its values in a list, one byte each, as coded in ``CODES``.

    A .csv file has a header; a .txt file has the number of pictures and the names of the columns above the pictures
    where there are several columns, and else nothing.

    Raises:
        Broken: naming the file, the line and what is expected there.
    """
    columns, codes = LISTS[name], CODES[name]
    try:
        lines = path.read_text(encoding="utf-8-sig").rstrip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _broken(path, f"cannot be read ({error})", "a text file") from None
    separator, above = (",", 1) if path.suffix == ".csv" else (None, 2 if len(columns) > 1 else 0)
    titles = [*(["image_id"] if separator else []), *columns]
    if above and "".join(lines[above - 1 : above]).split(separator) != titles:
        raise _broken(path, f"line {above} has other columns", f"{titles[0]}, ..., {titles[-1]} in the usual order")
    rows: dict[str, bytes] = {}
    for number, line in enumerate(lines[above:], start=above + 1):
        picture, *values = line.split(separator) or [""]
        try:
            row = bytes([codes[value] for value in values])
        except KeyError as error:
            raise _broken(path, f"line {number} has the value {error}", " or ".join(codes)) from None
        if len(row) != len(columns):
            raise _broken(path, f"line {number} has {len(row)} values", f"a picture and {len(columns)}")
        if picture in rows:
            raise _broken(path, f"line {number} has {picture} again", "each picture once")
        rows[picture] = row
    if above == 2 and lines[0].strip() != str(len(rows)):
        raise _broken(path, f"line 1 says {lines[0].strip()[:20]!r}", f"{len(rows)}, the number of pictures below")
    return rows


def _broken(path: Path, given: str, expected: str) -> Broken:
    return Broken(Finding(path, "list", given, expected, "Fetch it again."))


def _take(split: str, names: list[str], samples: int | None) -> list[str]:
    """Return the chosen number of pictures of a split, or all."""
    if not names:
        raise ValueError(f"list_eval_partition has no pictures for {split}. Fetch it again, or choose another split.")
    if samples is None:
        return names
    whole_number("samples", samples, 1)
    if samples > len(names):
        raise ValueError(f"samples={samples}, but {split} has {len(names)} pictures. Ask for as many, or fewer.")
    chosen = np.random.RandomState(FIXED_SEED).permutation(len(names))[:samples]
    return [names[index] for index in sorted(chosen.tolist())]


def missing(folder: Path, names: Sequence[str]) -> list[Finding]:
    """Return which pictures are not there."""
    with os.scandir(folder) as entries:  # one look at the folder, not one for each of 200,000 files
        there = {entry.name for entry in entries}
    given, expected = "there is no such file, though the lists have it", "all pictures of the lists"
    remedy = "Unpack all of img_align_celeba.zip."
    return [Missing(folder / name, "missing", given, expected, remedy) for name in names if name not in there]


def damaged(folder: Path, names: Sequence[str], *, decode: bool = False) -> Iterator[Finding]:
    """Yield which pictures are no whole JPEG files; unless all are decoded, those are that do not end like one."""
    for path in map(folder.joinpath, names):
        try:
            if decode or not looks_whole(path):
                decoded(path)
        except Broken as broken:
            yield broken.finding


def looks_whole(path: Path) -> bool:
    """Return whether a file starts and ends as a JPEG does."""
    with path.open("rb", buffering=0) as file:
        start = file.read(2)
        file.seek(max(0, path.stat().st_size - 2))
        return (start, file.read(2)) == (b"\xff\xd8", b"\xff\xd9")


def decoded(path: Path) -> Tensor:
    """Return the picture in a file: uint8 ``(3, H, W)``, red, green and blue.

    Raises:
        Broken: it is no whole picture, or cannot be read.
    """
    try:
        return pil_to_tensor(pil_loader(str(path)))
    except Exception as error:  # a damaged picture can raise nearly anything
        given = f"cannot be read ({str(error).splitlines()[0].rstrip('.')})"
        raise Broken(Finding(path, "unreadable", given, "a whole JPEG file", "Unpack it again.")) from None


def check_celeba(root: Path) -> Report:
    """Return what CelebA in a folder holds, and what is wrong with it; every picture is decoded.

    Raises:
        FileNotFoundError: a list or the folder of pictures is not there.
    """
    report = Report()
    try:
        folder, attributes, partition = read_folder(root)
    except Broken as broken:
        report.findings.append(broken.finding)
        return report
    for place, split in enumerate(SPLITS):
        count = sum(part == bytes([place]) for part in partition.values())
        report.facts.append(f"{split}: {count:,} pictures")
        if not count:
            path = _list(root, "list_eval_partition") or root
            given, expected = f"no picture of partition {place} ({split})", "some of each of 0, 1 and 2"
            report.findings.append(Finding(path, f"no {split}", given, expected, "Fetch the whole list again."))
    report.findings += missing(folder, list(attributes))
    absent = {finding.path.name for finding in report.findings}
    report.findings += damaged(folder, [name for name in attributes if name not in absent], decode=True)
    return report
