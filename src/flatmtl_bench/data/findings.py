"""What is wrong with files of data: what is there, what is expected, and what to do."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMED = 3  # files that are like one whose finding is told in full


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with one file or folder.

    Attributes:
        path: of the file or folder.
        kind: a few words that tell this fault from others, the same for all files that have it.
        given: what is there.
        expected: what should be there.
        remedy: what to do, as a sentence.

    Example:
        >>> print(Finding(Path("depth/3.npy"), "range", "depth from -1 to 4", "metres from 0 on", "Mend the file."))
        depth/3.npy: depth from -1 to 4; expected metres from 0 on. Mend the file.
    """

    path: Path
    kind: str
    given: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}: {self.given}; expected {self.expected}. {self.remedy}"


class Missing(Finding):
    """A file or folder that is not there."""


class Broken(ValueError):
    """A file cannot be read; the message is the finding.

    Args:
        finding: on the file; or the message with which a loader process reports one, of which the last line is kept.
    """

    def __init__(self, finding: Finding | str) -> None:
        super().__init__(str(finding).splitlines()[-1].removeprefix(f"{__name__}.{type(self).__name__}: "))
        self.finding: Any = finding


def one_line_each(findings: Iterable[Finding]) -> list[str]:
    """Return a line for each fault of each folder: the first file that has it in full, the others by name and number.

    Example:
        >>> faults = [Finding(Path(f"depth/{i}.npy"), "NaN", "9 values are NaN", "numbers", "Mend it.") for i in (1, 4)]
        >>> one_line_each(faults)
        ['depth/1.npy: 9 values are NaN; expected numbers. Mend it. The same in 1 more file: 4.npy.']
    """
    alike: dict[tuple[Path, str], list[Finding]] = {}
    for finding in findings:
        alike.setdefault((finding.path.parent, finding.kind), []).append(finding)
    return [f"{first}{_others(rest)}" for first, *rest in alike.values()]


def _others(rest: Sequence[Finding]) -> str:
    if not rest:
        return ""
    names = ", ".join(finding.path.name for finding in rest[:NAMED]) + ", ..." * (len(rest) > NAMED)
    return f" The same in {len(rest):,} more file{'s' * (len(rest) > 1)}: {names}."


def raise_if_any(findings: Sequence[Finding], command: str) -> None:
    """Raise an error that tells the first finding, and with which command to see the others.

    Raises:
        FileNotFoundError: the first finding is that something is missing.
        ValueError: it is another one.
    """
    if not findings:
        return
    more = len(one_line_each(findings)) - 1
    others = f" There {'is 1 more finding' if more == 1 else f'are {more} more findings'}; `{command}` lists all."
    kind = FileNotFoundError if isinstance(findings[0], Missing) else ValueError
    raise kind(one_line_each(findings)[0] + others * (more > 0))


@dataclass
class Report:
    """What a folder of data holds, and what is wrong with it.

    Attributes:
        facts: lines that say what is there.
        findings: what is wrong; nothing if the data are as they should be.
    """

    facts: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        lines = one_line_each(self.findings)
        return "\n".join([*self.facts, *lines, f"{len(lines)} finding{'s' * (len(lines) != 1)}"])
