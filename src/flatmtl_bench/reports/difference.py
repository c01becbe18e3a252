"""Paired differences over seeds, with a confidence interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from flatmtl_bench.reports.columns import Values

LEVEL = 0.95
"""Confidence of the intervals."""


@dataclass(frozen=True)
class Difference:
    """What a second method has more than a first one, seed by seed.

    Attributes:
        values: the difference of each seed.
        better: ``"higher"`` or ``"lower"``: which values of the two are good.
        mean: over the seeds.
        low: lower end of the 95 % Student-t interval of the mean; None with one seed.
        high: its upper end.
    """

    values: Sequence[float]
    better: str
    mean: float
    low: float | None
    high: float | None

    @property
    def count(self) -> int:
        """The number of seeds."""
        return len(self.values)

    @property
    def wins(self) -> int:
        """The number of seeds with which the second method is better."""
        return sum(self._gain(value) > 0 for value in self.values)

    @property
    def ties(self) -> int:
        """The number of seeds with which both are equal."""
        return sum(value == 0 for value in self.values)

    @property
    def clear(self) -> bool:
        """Whether the interval lies on the good side of 0."""
        return self.low is not None and self.high is not None and min(map(self._gain, (self.low, self.high))) > 0

    def text(self, form: str) -> str:
        """Return the mean, the interval, and with how many of the seeds the second method is better.

        Example:
            >>> difference([0.5, 0.25], [0.75, 0.75], "higher").text(".2f")
            '+0.38 [-1.21, +1.96] 2/2'
            >>> difference([1.0], [0.5], "higher").text(".1f")
            '-0.5 0/1'

            What rounds to zero keeps its sign, by which an end lies on one side of 0 or the other:

            >>> difference([0.0, 0.0, 0.0], [0.5, 0.55, 1.0], "higher").text(".2f")
            '+0.68 [-0.00, +1.37] 3/3'
        """
        signed = f"+{form.lstrip('+z')}"
        interval = f" [{self.low:{signed}}, {self.high:{signed}}]" if self.low is not None else ""
        return f"{self.mean:{signed}}{interval} {self.wins}/{self.count}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        names = ("better", "mean", "low", "high", "wins", "ties", "count")
        return {**{name: getattr(self, name) for name in names}, "values": list(self.values)}

    def _gain(self, value: float) -> float:
        return value if self.better == "higher" else -value


def difference(first: Values, second: Values, better: str) -> Difference | None:
    """Return the second less the first, paired by seed; None if a value was not finite or there is none.

    A mean over the seeds with which both methods ended well would hide the others.

    Args:
        first: a value for each seed.
        second: those of the same seeds, in the same order.
        better: ``"higher"`` or ``"lower"``.

    Raises:
        ValueError: there are not as many values of both.

    Example:
        With differences 1, 2, 3 the mean is 2, its standard error 1 / sqrt(3), and Student's t for two degrees of
        freedom 4.3027 at 97.5 %: the interval is 2 ± 2.4841.

        >>> found = difference([1.0, 1.0, 1.0], [2.0, 3.0, 4.0], better="higher")
        >>> found.mean, round(found.low, 4), round(found.high, 4), found.wins, found.clear
        (2.0, -0.4841, 4.4841, 3, False)
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} values cannot be paired; expected one of each for each seed.")
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    if not first or len(pairs) < len(first):
        return None
    values = [b - a for a, b in pairs]
    mean, half = fmean(values), _half_width(values)
    return Difference(
        values, better, mean, None if half is None else mean - half, None if half is None else mean + half
    )


def _half_width(values: Sequence[float]) -> float | None:
    """Return half the width of the interval of the mean; None of a single value."""
    if len(values) < 2:
        return None
    from scipy.special import stdtrit  # noqa: PLC0415  (Student's quantile; `scipy.stats` takes a second to load)

    return float(stdtrit(len(values) - 1, (1 + LEVEL) / 2)) * stdev(values) / math.sqrt(len(values))
