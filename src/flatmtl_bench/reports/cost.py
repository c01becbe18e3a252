"""What a flat method costs beside its plain form: time and memory of a step, and how often gradients conflict."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from flatmtl_bench.reports.columns import Values
from flatmtl_bench.reports.comparison import spread
from flatmtl_bench.reports.pairs import Pair
from flatmtl_bench.reports.reading import Run
from flatmtl_bench.reports.results import Result

MIB = 2**20


@dataclass(frozen=True)
class Quantity:
    """Something that a step costs.

    Attributes:
        name: as a key, with its unit.
        heading: as it is read, with its unit.
        value: of a run; None if it is not known.
        form: how it is written.
        timed: whether it can be compared only of runs on one machine with as many threads.
        ratio: whether flat over plain is of interest.
    """

    name: str
    heading: str
    value: Callable[[Run], float | None]
    form: str
    timed: bool = False
    ratio: bool = True

    def values(self, results: Sequence[Result]) -> Values:
        """Return the value of each seed; of single-task learning the mean over the tasks."""
        return [mean([self.value(run) for run in result.runs]) for result in results]

    def ratios(self, pair: Pair) -> list[float]:
        """Return flat over plain of each seed; nothing if one is not known, or times cannot be compared."""
        plain, flat = (self.values(results) for results in pair.results)
        known = [(p, f) for p, f in zip(plain, flat, strict=True) if p and f]
        if not self.ratio or len(known) < len(plain) or (self.timed and not comparable(pair)):
            return []
        return [f / p for p, f in known]


def milliseconds(run: Run) -> float | None:
    """Return the median time of a step."""
    seconds = _positive(run, "step_seconds")
    return None if seconds is None else 1000 * seconds


def mebibytes(run: Run) -> float | None:
    """Return the memory of a step; None for runs of versions that did not measure it."""
    size = _positive(run, "step_bytes")
    return None if size is None else size / MIB


def _positive(run: Run, name: str) -> float | None:
    """Return a number of the summary that can be a cost; None for any other."""
    value = run.summary.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 < value <= sys.float_info.max else None


def conflict(run: Run) -> float | None:
    """Return the share of task pairs in conflict, mean over the epochs, in per cent; None where none is recorded."""
    known = [value for value in run.series("train/conflict") if value is not None]
    return 100 * fmean(known) if known and run.config.task is None else None


QUANTITIES = (
    Quantity("step_milliseconds", "ms per step", milliseconds, ".1f", timed=True),
    Quantity("step_mebibytes", "MiB per step", mebibytes, ".1f"),
    Quantity("conflict_percent", "conflict in %", conflict, ".1f", ratio=False),
)


def mean(values: Values) -> float | None:
    """Return the mean, None if a value is not known."""
    known = [value for value in values if value is not None]
    return fmean(known) if values and len(known) == len(values) else None


def text(values: Values, form: str) -> str:
    """Return mean and standard deviation over the seeds; a dash if a value is not known.

    Example:
        >>> text([1.0, 3.0], ".1f"), text([1.0, None], ".1f")
        ('2.0 ± 1.4', '-')
    """
    known = [value for value in values if value is not None]
    return spread(known, form) if values and len(known) == len(values) else "-"


def machine(run: Run) -> str | None:
    """Return what the time of a step depends on beside the run itself, in words; None if its folder does not tell."""
    told = run.environment
    processor, threads, ranks = (told.get(name) for name in ("processor", "threads", "ranks"))
    if not processor or not threads:
        return None
    device = f"{told['accelerator']}, " if told.get("accelerator") and run.config.device != "cpu" else ""
    cores = f" with {told['cpu_count']} cores" if told.get("cpu_count") else ""
    several = f", {ranks} ranks" if ranks not in (None, 1) else ""
    return f"{device}{processor}{cores}, {threads} thread{'s' * (threads != 1)}{several}"


def machines(pair: Pair) -> list[str | None]:
    """Return on what the runs of a pair were made, each once."""
    runs = [run for results in pair.results for result in results for run in result.runs]
    return list(dict.fromkeys(map(machine, runs)))


def comparable(pair: Pair) -> bool:
    """Whether the runs of a pair are known to be made on one machine, with as many threads."""
    known = machines(pair)
    return len(known) == 1 and None not in known


def to_dict(pair: Pair) -> Mapping[str, object]:
    """Return the costs as plain values: of each quantity the value of each seed, and flat over plain."""
    return {
        "machines": machines(pair),
        **{
            quantity.name: {
                "plain": list(quantity.values(pair.results[0])),
                "flat": list(quantity.values(pair.results[1])),
                "ratio": mean(quantity.ratios(pair)),
            }
            for quantity in QUANTITIES
        },
    }
