"""What a reproduction needs before it is begun: data that are there, and hours."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from flatmtl_bench.commands.training import Run
from flatmtl_bench.recipes import Config
from flatmtl_bench.reproduce.plan import Part, Runs


def missing(part: Part) -> str | None:
    """Return in a sentence why the data of a part cannot be read; None if they can."""
    from flatmtl_bench import assembly  # noqa: PLC0415  (seconds)

    first = replace(part, rows=part.rows[:1])  # whose data are those of all
    config = next(iter(first.final(first.first_radii()).values())).config
    try:
        assembly.dataset(config, "test")
    except (OSError, ValueError) as error:
        return f"{part.printed} (here {part.data}): {error}"
    return None


def unfinished(runs: Runs) -> dict[str, Run]:
    """Return the runs that have no result yet."""
    return {name: run for name, run in runs.items() if not (Path(run.out) / name / "summary.json").exists()}


def hours(runs: Iterable[Run], jobs: int) -> float:
    """Return about how long runs take here, so many at a time: some steps of each recipe are timed."""
    counts: Counter[str] = Counter()
    examples: dict[str, Config] = {}
    for run in runs:
        counts[run.config.recipe] += 1
        examples.setdefault(run.config.recipe, run.config)
    return sum(count * _seconds(examples[recipe]) for recipe, count in counts.items()) / 3600 / jobs


def _seconds(config: Config) -> float:
    from flatmtl_bench.trainer import Trainer  # noqa: PLC0415  (seconds)

    return Trainer(config).seconds()
