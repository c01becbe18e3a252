"""What a folder of data holds, and everything that is wrong with it; nothing is changed."""

from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from flatmtl_bench.choices import one_of
from flatmtl_bench.data.celeba import check_celeba
from flatmtl_bench.data.cityscapes import CityScapes
from flatmtl_bench.data.dense import READERS
from flatmtl_bench.data.findings import Broken, Finding, Report
from flatmtl_bench.data.folders import Layout, Part, survey
from flatmtl_bench.data.maps import Map, open_array
from flatmtl_bench.data.multimnist import KINDS, check_multimnist
from flatmtl_bench.data.nyuv2 import NYUv2


@dataclass
class Contents:
    """What the files of one map hold together, and what is wrong with their numbers.

    Attributes:
        dtypes: types of numbers.
        low, high: the least and the greatest number.
        pixels: how many there are.
        tally: how many of them are what.
        findings: about the files whose numbers are not counted.
    """

    dtypes: set[str] = field(default_factory=set)
    low: float = np.inf
    high: float = -np.inf
    pixels: int = 0
    tally: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def add(self, other: "Contents") -> None:
        """Take in another file."""
        self.dtypes |= other.dtypes
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.pixels += other.pixels
        self.tally.update(other.tally)
        self.findings += other.findings

    def __str__(self) -> str:
        if not self.pixels:
            return "no file that can be read as it is"
        shares = [f"{name} {count / self.pixels:.1%}" for name, count in self.tally.items()]
        return ", ".join([f"{' and '.join(sorted(self.dtypes))} from {self.low:.4g} to {self.high:.4g}", *shares])


def _contents(kind: Map, path: Path) -> Contents:
    """Return what one file holds; only the findings if there are any."""
    try:
        array = np.array(open_array(path))
    except Broken as broken:  # since its header was read
        return Contents(findings=[broken.finding])
    if findings := kind.findings(path, array):
        return Contents(findings=findings)
    numbers = kind.valid(array)
    pixels = array.shape[0] * array.shape[1]
    return Contents({str(array.dtype)}, numbers.min(), numbers.max(), pixels, kind.tally(array))


def check_dense(layout: Layout, path: Path) -> Report:
    """Return what folders of .npy files hold, and what is wrong with them; every file is read.

    Raises:
        FileNotFoundError: there are no such folders.
    """
    report = Report()
    folder = layout.choose("full", path)
    assert folder is not None  # it is the full data or an error
    report.facts.append(f"{layout.name} in {folder}")
    for name in layout.pictures:
        _check_part(survey(folder / name, layout), layout, report)
    return report


def _check_part(part: Part, layout: Layout, report: Report) -> None:
    contents: defaultdict[str, Contents] = defaultdict(Contents)
    files = list(part.whole_files())
    with ThreadPoolExecutor(READERS) as pool:
        each = pool.map(lambda file: _contents(layout.maps[file[0]], file[1]), files)
        for (name, _), read in zip(files, each, strict=True):
            contents[name].add(read)
    height, width = part.size
    usual = layout.pictures[part.folder.name]
    report.facts.append(
        f"{part.folder.name}: {len(part.numbers):,} pictures of {height}x{width} (the full data have {usual:,})"
    )
    report.facts += [f"  {folder.name}: {contents[name]}" for name, folder in part.folders.items()]
    report.findings += [*part.findings, *(finding for read in contents.values() for finding in read.findings)]


CHECKS: dict[str, Callable[[Path], Report]] = {
    **{name: partial(check_multimnist, name) for name in KINDS},
    "celeba": check_celeba,
    "nyuv2": partial(check_dense, NYUv2.layout),
    "cityscapes": partial(check_dense, CityScapes.layout),
}
"""Data set -> what looks at a folder of it."""


def check(path: str | Path, name: str) -> Report:
    """Return what a folder or file of the data set ``name`` holds, and what is wrong with it.

    Raises:
        ValueError: the name is unknown, or a file of pictures for pairs is broken.
        FileNotFoundError: there is nothing of the kind at the path.
    """
    one_of("dataset", name, CHECKS)
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected a folder of data. Correct it.")
    return CHECKS[name](path)
