"""`flatmtl data`: looks at data sets, checks folders of them, and says where they come from."""

from dataclasses import dataclass, field

from tyro.conf import Positional

from flatmtl_bench.commands.words import parse, users_mistakes
from flatmtl_bench.output import answer, say
from flatmtl_bench.recipes.config import Data, Source, Split


@dataclass(frozen=True)
class Show:
    """Write a sheet of pictures of a data set, each with its labels."""

    name: Positional[str | None] = None
    """Data set; None: that of --data.name."""
    split: Split = "train"
    """Which part of it."""
    source: Source = "auto"
    """Where the data come from; auto: the full data if present, else data of the same kind that need no files."""
    root: str | None = None
    """Folder of the data; None: data."""
    seed: int = 0
    """Seed of the train pairs, and of which items are shown."""
    data: Data = field(default_factory=Data)
    rows: int = 8
    """Rows of the sheet."""
    columns: int | None = None
    """Columns of the sheet; None: as many as make eight pictures and maps side by side."""
    out: str = "sheet.png"
    """The file to write."""
    overwrite: bool = False
    """Replace the file if it exists."""


def show_data(words: list[str]) -> int:
    """Write a contact sheet; print its path."""
    with users_mistakes():
        command: Show = parse(Show, words, "data show")
        from flatmtl_bench import data  # noqa: PLC0415  (seconds, which help does not need)

        options = {"source": command.source, **command.data.options(command.split)}
        name = command.name or command.data.name
        dataset = data.build(name, command.split, seed=command.seed, root=command.root, **options)
        say(str(dataset))
        size = (command.rows, command.columns)
        answer(data.contact_sheet(dataset, command.out, *size, seed=command.seed, overwrite=command.overwrite))
    return 0


@dataclass(frozen=True)
class Check:
    """Say what a folder of data holds, and all that is wrong with it (then the exit code is 1); nothing is changed."""

    path: Positional[str]
    """Folder of the data, as for --root; or a file, where the data are one."""
    dataset: str
    """Which data set it should be: nyuv2, cityscapes, celeba, multimnist, multifashion or multifashionmnist."""


def check_data(words: list[str]) -> int:
    """Print what a folder holds, and each finding in a line."""
    with users_mistakes():
        command: Check = parse(Check, words, "data check")
        from flatmtl_bench.data.check import check  # noqa: PLC0415  (seconds, which help does not need)

        report = check(command.path, command.dataset)
    answer(report)
    return 1 if report.findings else 0


@dataclass(frozen=True)
class Where:
    """Say how to obtain the data sets that others made: links, terms, sizes, layout. Nothing is fetched."""

    name: Positional[str] = ""
    """Data set; none: all of them."""


def where_data(words: list[str]) -> int:
    """Print what there is to know before fetching a data set."""
    with users_mistakes():
        name = parse(Where, words, "data where").name
        from flatmtl_bench.data.where import where  # noqa: PLC0415  (seconds, which help does not need)

        answer(where(name))
    return 0
