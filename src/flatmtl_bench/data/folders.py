"""Folders of numbered .npy files: where they are, which there are, and whether they fit together."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flatmtl_bench.choices import one_of
from flatmtl_bench.data.findings import Finding, Missing
from flatmtl_bench.data.maps import Map

PARTS = {"train": "train", "validation": "train", "test": "val"}
"""split -> the folder with its files: validation is held out of train, and what is called val is for testing."""


@dataclass(frozen=True)
class Layout:
    """What a data set consists of on disk: ``<root>/{train,val}/<folder of a map>/{0, 1, ...}.npy``.

    Attributes:
        name: of the data set, and of the folder in which it may lie under root.
        maps: ``image`` and the tasks -> what their folders hold.
        embedded: source of pictures of the same kind that need no files.
        pictures: part -> how many there are of it in the full data.
    """

    name: str
    maps: Mapping[str, Map]
    embedded: str
    pictures: Mapping[str, int]

    @property
    def text(self) -> str:
        """Which folders and files are expected, in words."""
        folders = ", ".join(" or ".join(kind.folders) for kind in self.maps.values())
        return f"train/ and val/ with the folders {folders}, each with 0.npy, 1.npy, ..."

    def find(self, root: Path) -> Path | None:
        """Return the folder of the data: ``root``, or the one of their name in it; None if there is none."""
        names = [name for kind in self.maps.values() for name in kind.folders]
        for folder in (root, root / self.name):
            if any((folder / part / name).is_dir() for part in self.pictures for name in names):
                return folder
        return None

    def choose(self, source: str, root: str | Path | None, size: object = None) -> Path | None:
        """Return the folder of the full data; None if the embedded kind is taken, which can have any size.

        Raises:
            ValueError: the source is unknown, or a size is wanted of files, which have theirs.
            FileNotFoundError: the full data are not there, but must be or were said to be; or a root does not exist.
        """
        one_of("source", source, ("auto", "full", self.embedded))
        folder = Path("data" if root is None else root).expanduser()
        if source == self.embedded:
            return None
        if root is not None and not folder.exists():
            raise FileNotFoundError(f"root {folder} does not exist; expected a folder of data. Correct it, or omit it.")
        found = self.find(folder)
        if found is None and (source == "full" or root is not None):  # who says where they are wants no others
            raise FileNotFoundError(
                f"no {self.name} in {folder} or {folder / self.name}; expected {self.text}. `flatmtl data where "
                f"{self.name}` says how to obtain it; --source {self.embedded} needs no files."
            )
        if found is not None and size is not None:
            raise ValueError(
                f"size={size} is for rendered pictures (source {self.embedded!r}); those in {found} are read as they "
                "are. Omit it."
            )
        return found


@dataclass
class Part:
    """The files of ``train`` or ``val``.

    Attributes:
        folder: with a folder for each map.
        folders: ``image`` and the tasks -> their folders.
        numbers: of the pictures, from 0 on.
        size: height and width of most of the files.
        findings: what is wrong with names, headers and lengths of the files.
    """

    folder: Path
    folders: dict[str, Path] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    size: tuple[int, int] = (0, 0)
    findings: list[Finding] = field(default_factory=list)

    def path(self, name: str, number: int) -> Path:
        """Return the file of one picture or target."""
        return self.folders[name] / f"{number}.npy"

    def whole_files(self) -> Iterator[tuple[str, Path]]:
        """Yield each file that is there without a finding, with the name of its map."""
        broken = {finding.path for finding in self.findings}
        paths = ((name, self.path(name, number)) for number in self.numbers for name in self.folders)
        yield from ((name, path) for name, path in paths if not {path, path.parent} & broken)


def survey(folder: Path, layout: Layout) -> Part:
    """Return which files are in a folder, and what is wrong with them; only their headers are read."""
    part = Part(folder)
    found = {name: _numbers(_folder(folder, kind), layout, part.findings) for name, kind in layout.maps.items()}
    part.folders = {name: _folder(folder, kind) for name, kind in layout.maps.items()}
    part.numbers = sorted(set.union(*found.values()))
    gap = next((number for number, other in enumerate(part.numbers) if number != other), None)
    if gap is not None:
        given = f"there is no such file in any folder, though {len(part.numbers) - gap:,} higher numbers"
        expected = "numbers from 0 on without a gap"
        part.findings.append(
            Missing(part.path("image", gap), "gap", given, expected, "Fetch it, or renumber the files.")
        )
    for name, numbers in found.items():
        if numbers:  # else the folder as a whole is a finding
            part.findings += [_lacking(part, name, n) for n in part.numbers if n not in numbers]
    _read_headers(part, layout, found)
    return part


def _folder(folder: Path, kind: Map) -> Path:
    """Return the folder of a map: of the names that it may have, the first that is there."""
    names = [folder / name for name in kind.folders]
    return next((path for path in names if path.is_dir()), names[0])


def _numbers(folder: Path, layout: Layout, findings: list[Finding]) -> set[int]:
    """Return the numbers of the files in a folder; add what else is there, and what is not, to the findings."""
    where = f"`flatmtl data where {layout.name}` says how to obtain the data."
    if not folder.is_dir():
        findings.append(Missing(folder, f"no {folder.name}", "there is no such folder", layout.text, where))
        return set()
    numbers = set()
    for path in sorted(folder.iterdir()):
        if path.suffix == ".npy" and path.stem.isdecimal() and path.stem == str(int(path.stem)) and path.is_file():
            numbers.add(int(path.stem))
        elif not path.name.startswith("."):  # which file managers leave behind
            findings.append(Finding(path, "foreign", "it is no sample", "files 0.npy, 1.npy, ...", "Move it away."))
    if not numbers:
        findings.append(
            Missing(folder, f"empty {folder.name}", "there are no samples", "files 0.npy, 1.npy, ...", where)
        )
    return numbers


def _lacking(part: Part, name: str, number: int) -> Finding:
    given, expected = "there is no such file, though other folders have it", "one file in each folder for each picture"
    return Missing(part.path(name, number), "missing", given, expected, "Fetch it again, or make it anew.")


def _read_headers(part: Part, layout: Layout, found: Mapping[str, set[int]]) -> None:
    """Find the size of the pictures, and the files that are not whole or differ."""
    sizes: dict[Path, tuple[int, int]] = {}
    for name, numbers in found.items():
        for number in sorted(numbers):
            path = part.path(name, number)
            size, findings = layout.maps[name].header(path)
            part.findings += findings
            if size is not None:
                sizes[path] = size
    if sizes:
        part.size = Counter(sizes.values()).most_common(1)[0][0]
    expected = f"{part.size[0]} x {part.size[1]}, as most files of this part have"
    for path, (height, width) in sizes.items():
        if (height, width) != part.size:
            given = f"height and width are {height} x {width}"
            part.findings.append(Finding(path, "size", given, expected, "Resize it, or fetch it again."))
