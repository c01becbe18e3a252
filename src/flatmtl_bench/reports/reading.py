"""A finished run, as its folder tells it."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatmtl_bench.config_file import read_config
from flatmtl_bench.recipes import Config
from flatmtl_bench.reports.epochs import EPOCH, LARGEST, Columns, read_columns
from flatmtl_bench.runs import ERROR, METRICS, run_name


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        path: its folder.
        config: every value of the recipe.
        environment: versions, machine, threads.
        metrics: of each a column with a number for each epoch.
        summary: what it came to.
    """

    path: Path
    config: Config
    environment: dict[str, Any]
    metrics: Columns
    summary: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.path.name

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks."""
        return [name.removeprefix("loss/") for name in self.summary["test"] if name.startswith("loss/")]

    @property
    def better(self) -> dict[str, str]:
        """Names of the metrics of a result table, as ``miou/segmentation``; and which direction is good."""
        return self.summary.get("better", {})

    @property
    def main(self) -> dict[str, str]:
        """The first metric of each task in result tables: task -> name, as ``miou``."""
        found: dict[str, str] = {}
        for key in self.better:
            name, _, task = key.partition("/")
            found.setdefault(task, name)
        return found

    @property
    def fingerprint(self) -> str | None:
        """What tells the run's test data from others."""
        return self.summary.get("fingerprints", {}).get("test")

    @property
    def epochs(self) -> list[int]:
        """The numbers of its epochs, from 1 on."""
        return [int(epoch) for epoch in self.metrics[EPOCH]]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The metrics of each epoch by name, as in ``metrics.jsonl``; None where one was not finite."""
        names = [name for name in self.metrics if name != EPOCH]
        values = zip(self.epochs, *map(self.series, names), strict=True)
        return [dict(zip((EPOCH, *names), row, strict=True)) for row in values]

    def series(self, name: str) -> list[float | None]:
        """Return one metric over the epochs; None where it was not finite or is not there."""
        if name not in self.metrics:
            return [None] * len(self.epochs)
        return [None if math.isnan(value) else value for value in self.metrics[name].tolist()]

    def result(self, name: str, split: str = "test") -> float | None:
        """Return one metric of the epochs that count; None if it is not there or not finite."""
        value = self.summary.get(split, {}).get(name)
        return value if value is not None and abs(value) <= LARGEST else None


def read(path: Path) -> Run:
    """Return the finished run in a folder.

    Raises:
        OSError, ValueError: there is none, it is not complete, or a file is broken.
    """
    config, environment, summary = read_config(path / "config.json"), _json(path / "env.json"), _summary(path)
    found = Run(path, config, environment, read_columns(path / METRICS), summary)
    _check_epochs(found)
    return found


def _check_epochs(run: Run) -> None:
    """Raise a `ValueError` unless the metrics are those of all epochs that were trained."""
    count, wanted = len(run.epochs), run.config.epochs
    if count < wanted and not run.summary.get("stopped_early"):
        raise ValueError(f"{run.path / METRICS} has {count} of {wanted} epochs, but the run is said to be finished.")
    if not 1 <= min(run.summary["epochs"]) <= max(run.summary["epochs"]) <= count:
        raise ValueError(
            f"{run.path / METRICS} has {count} epochs, of which {run.summary['epochs']} are said to count."
        )


def _summary(path: Path) -> dict[str, Any]:
    summary = _json(path / "summary.json")
    metrics = [summary.get("test"), summary.get("validation", {})]
    if not all(isinstance(values, dict) and all(map(_is_number, values.values())) for values in metrics):
        raise ValueError(f"{path / 'summary.json'} is broken: its metrics are no numbers by name.")
    better = summary.get("better", {})
    if not (isinstance(better, dict) and all("/" in name and better[name] in ("higher", "lower") for name in better)):
        raise ValueError(f"{path / 'summary.json'} is broken: 'better' is no direction of each metric/task.")
    prints = summary.get("fingerprints", {})
    if not (isinstance(prints, dict) and all(isinstance(text, str) for text in prints.values())):
        raise ValueError(f"{path / 'summary.json'} is broken: 'fingerprints' is no text for each split.")
    for name, (is_right, expected) in EXPECTED.items():
        if not is_right(summary.get(name)):
            raise ValueError(
                f"{path / 'summary.json'} is broken: {name!r} is {summary.get(name)!r:.80}, not {expected}."
            )
    return summary


def _are_epochs(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(epoch) is int for epoch in value)


EXPECTED: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "epochs": (_are_epochs, "the epochs that count"),
    "seconds": (lambda value: value is not None and _is_number(value), "a number"),
    "data": (lambda value: isinstance(value, dict) and all(isinstance(v, str) for v in value.values()), "a text each"),
}
"""Of entries of a summary whether a value is right, and what is."""


def _is_number(value: object) -> bool:
    """Whether a value is a number that a float can hold, or None for one that was not finite."""
    if type(value) is int:
        return abs(value) <= sys.float_info.max
    return value is None or type(value) is float


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is broken: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is broken: expected an object, got {found!r:.80}.")
    return found


@dataclass(frozen=True)
class Found:
    """What lies in folders: finished runs, and of everything else why it is none, in a sentence."""

    runs: Sequence[Run]
    others: Sequence[str]


def find(folders: Sequence[str | Path]) -> Found:
    """Return the runs in folders, each a run folder or a folder of run folders.

    A run that lies in two places is taken once: its seed must not count twice.

    Raises:
        OSError: something that was named is not there, or no folder.
    """
    found: dict[tuple[str, Any], tuple[Path, Run]] = {}
    others: list[str] = []
    for path in _candidates(folders):
        try:
            run = _finished(path)
        except (OSError, ValueError) as error:
            others.append(str(error) if str(path) in str(error) else f"{path}: {error}")
            continue
        same, _ = found.setdefault((run_name(run.config), run.fingerprint), (path, run))
        if same != path:
            others.append(f"{path} is the same run as {same}, which is taken.")
    return Found([run for _, run in found.values()], others)


def _candidates(folders: Sequence[str | Path]) -> Iterator[Path]:
    """Yield the folders that are or should be those of runs, each once."""
    seen: set[Path] = set()
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is no folder; expected one of a run, or one of such folders.")
        inside = sorted(path for path in folder.iterdir() if path.is_dir())
        for path in [folder] if (folder / "config.json").exists() else inside:
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield path


def _finished(path: Path) -> Run:
    """Return the run in a folder.

    Raises:
        OSError, ValueError: with the reason why there is no finished one.
    """
    if not (path / "config.json").exists():
        raise ValueError(f"{path} is no run: it has no config.json.")
    if not (path / "summary.json").exists():
        read_config(path / "config.json")  # what has none of ours is no run that is not finished
        raise ValueError(f"{path} {f'has failed; see its {ERROR}' if (path / ERROR).exists() else 'is not finished'}.")
    run = read(path)
    if not run.better:
        raise ValueError(f"{path} does not say which metrics count: it is of another version. Train it again.")
    return run
