"""A finished run, as its folder tells it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatmtl_bench.recipes import Config


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        name: of its folder.
        config: every value of the recipe.
        environment: versions, machine, threads.
        rows: the metrics of each epoch.
        summary: what it came to.
    """

    name: str
    config: Config
    environment: dict[str, Any]
    rows: list[dict[str, Any]]
    summary: dict[str, Any]

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks."""
        return [name.removeprefix("accuracy/") for name in self.summary["test"] if name.startswith("accuracy/")]

    def series(self, name: str) -> list[float | None]:
        """Return one metric over the epochs; None where it was not finite."""
        return [row.get(name) for row in self.rows]


def read(path: Path) -> Run:
    """Return the finished run in a folder.

    Raises:
        OSError, ValueError: if there is none, or it is not complete.
    """
    config, environment, summary = (
        json.loads((path / name).read_text(encoding="utf-8")) for name in ("config.json", "env.json", "summary.json")
    )
    lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return Run(path.name, Config.from_dict(config), environment, [json.loads(line) for line in lines], summary)
