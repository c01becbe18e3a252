"""Plain against flat, over seeds: the table and the sentence that says what was found."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from flatmtl_bench.reports.reading import Run

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True)
class Column:
    """One quantity of a run: its heading, how to get and to write it, and how two methods are compared."""

    heading: str
    value: Callable[[Run], float]
    form: str
    ratio: bool = False


@dataclass(frozen=True)
class Comparison:
    """Runs of a plain method and of its flat form, with equal seeds in equal places."""

    plain: Sequence[Run]
    flat: Sequence[Run]

    def __post_init__(self) -> None:
        seeds = [[run.config.seed for run in runs] for runs in (self.plain, self.flat)]
        if not self.plain or seeds[0] != seeds[1]:
            raise ValueError(f"plain runs have the seeds {seeds[0]} and flat ones {seeds[1]}; expected equal seeds.")

    @property
    def labels(self) -> tuple[str, str]:
        """Names of the two methods."""
        return self.plain[0].config.label, self.flat[0].config.label

    @property
    def setting(self) -> str:
        """Data, model, length, radius and seeds in one line."""
        config = self.flat[0].config
        seeds = ", ".join(str(run.config.seed) for run in self.flat)
        radius = f"{config.method.perturbation.upper()} with rho {config.rho:g}"
        return f"{config.data.name} ({config.source}), {config.model}, {config.epochs} epochs, {radius}, seeds {seeds}"

    @property
    def columns(self) -> list[Column]:
        """What is compared: accuracy, conflict, sharpness and time."""
        rho = self.plain[0].config.sharpness.rho
        return [
            *(Column(f"{task}, %", _accuracy(f"accuracy/{task}"), ".2f") for task in self.plain[0].tasks),
            Column("average, %", _accuracy("accuracy"), ".2f"),
            Column("conflict, %", conflict, ".1f"),
            Column(f"sharpness at {rho:g}", sharpness, ".4f"),
            Column("ms per step", lambda run: 1000 * run.summary["step_seconds"], ".1f", ratio=True),
        ]

    def table(self) -> list[list[str]]:
        """Return headings, one row for each method and one for the paired differences, as text."""
        rows = [["method"], [self.labels[0]], [self.labels[1]], ["difference"]]
        for column in self.columns:
            plain, flat = ([column.value(run) for run in runs] for runs in (self.plain, self.flat))
            rows[0].append(column.heading)
            rows[1].append(spread(plain, column.form))
            rows[2].append(spread(flat, column.form))
            pairs = list(zip(plain, flat, strict=True))
            if column.ratio:
                rows[3].append("x " + spread([f / p for p, f in pairs], ".2f"))
            else:
                rows[3].append(spread([f - p for p, f in pairs], "+" + column.form))
        return rows

    def finding(self) -> str:
        """Say in words which method is ahead, by how much and with how many of the seeds."""
        plain, flat = ([_accuracy("accuracy")(run) for run in runs] for runs in (self.plain, self.flat))
        gains = [f - p for p, f in zip(plain, flat, strict=True)]
        numbers = f"{fmean(flat):.2f}% against {fmean(plain):.2f}%, {spread(gains, '+.2f')} points"
        few = f" {_number(len(gains)).capitalize()} seeds are few." if 1 < len(gains) < 5 else ""
        return f"{self._verdict(gains)}: average test accuracy {numbers}.{few} {self._side_findings()}"

    def _verdict(self, gains: Sequence[float]) -> str:
        plain, flat = self.labels
        wins, count = sum(gain > 0 for gain in gains), len(gains)
        if count == 1:
            return f"{flat} {'beats' if wins else 'does not beat'} {plain} with the one seed that was run"
        if wins == count:
            return f"{flat} beats {plain} with {'both' if count == 2 else f'all {_number(count)}'} seeds"
        if wins == 0:
            return f"{flat} does not beat {plain} with any of {_number(count)} seeds"
        return f"No clear winner: {flat} is ahead of {plain} with {_number(wins)} of {_number(count)} seeds"

    def _side_findings(self) -> str:
        means = [[fmean(map(value, runs)) for runs in (self.plain, self.flat)] for value in (conflict, sharpness)]
        time = self.columns[-1].value
        ratio = fmean(time(f) / time(p) for p, f in zip(self.plain, self.flat, strict=True))
        return (
            f"The task gradients conflict in {means[0][1]:.0f}% of its steps against {means[0][0]:.0f}%, the final "
            f"sharpness is {means[1][1]:.4f} against {means[1][0]:.4f}, and a step takes {ratio:.1f} times as long."
        )


def conflict(run: Run) -> float:
    """Return the share of task pairs in conflict, over all steps of the training, in per cent."""
    return 100 * fmean(value for value in run.series("train/conflict") if value is not None)


def sharpness(run: Run) -> float:
    """Return the sharpness of the final model, mean over the tasks."""
    return fmean(run.summary["sharpness"].values())


def spread(values: Sequence[float], form: str) -> str:
    """Return mean and standard deviation over seeds as text; the mean alone for one seed.

    Example:
        >>> spread([1.0, 2.0, 3.0], ".1f"), spread([0.5], "+.2f")
        ('2.0 ± 1.0', '+0.50')
    """
    mean = f"{fmean(values):{form}}"
    return mean if len(values) < 2 else f"{mean} ± {stdev(values):{form.lstrip('+')}}"


def _accuracy(name: str) -> Callable[[Run], float]:
    return lambda run: 100 * run.summary["test"][name]


def _number(count: int) -> str:
    return NUMBERS[count] if count < len(NUMBERS) else str(count)
