"""Delta m: by how many per cent a method's metrics are worse than those of a baseline."""

import math
from collections.abc import Mapping
from numbers import Real
from statistics import fmean

from flatmtl_bench.choices import one_of


def delta_m(values: Mapping[str, float], baseline: Mapping[str, float], better: Mapping[str, str]) -> float:
    r"""Return the mean relative change against a baseline, in per cent; negative is better.

    With the metrics :math:`M_k` of a method and :math:`B_k` of the baseline, usually single-task learning,

    .. math::
        \Delta m = \frac{100}{K} \sum_{k=1}^{K} (-1)^{h_k} \frac{M_k - B_k}{B_k},
        \qquad h_k = 1 \text{ if higher is better, else } 0.

    Every metric counts the same: a task with five metrics counts five times as much as one with a single metric. This
    is the sign of the result tables of Phan et al. (2025); the formula in their text has the opposite one.

    Args:
        values: metric -> its value for the method; other names may be there, too.
        baseline: metric -> its value for the baseline, above 0; likewise.
        better: the metrics that count, and which direction is good: ``"higher"`` or ``"lower"``.

    Raises:
        ValueError: no metric counts; a value is missing or not finite; a value of the baseline is not above 0; a
            direction is unknown.

    References:
        - Maninis et al. (2019), *Attentive single-tasking of multiple tasks*, CVPR.
        - Phan et al. (2025), *Beyond losses reweighting: empowering multi-task learning via the generalization
          perspective*, ICCV.

    Example:
        >>> better = {"miou": "higher", "abs_err": "lower"}
        >>> delta_m({"miou": 50.0, "abs_err": 2.0}, {"miou": 40.0, "abs_err": 4.0}, better)
        -37.5
    """
    if not better:
        raise ValueError("Delta m of no metric is not defined; expected a direction for at least one.")
    return 100 * fmean(_worsening(name, values, baseline, direction) for name, direction in better.items())


def _worsening(name: str, values: Mapping[str, float], baseline: Mapping[str, float], direction: str) -> float:
    """Return by which share of the baseline one metric is worse."""
    one_of(f"direction of {name!r}", direction, ("higher", "lower"))
    value, reference = _value(name, values, "method"), _value(name, baseline, "baseline")
    if reference <= 0:
        raise ValueError(
            f"Delta m: {name!r} of the baseline is {reference}; expected a number above 0, as changes are relative to "
            "it. Choose another baseline, or leave the metric out."
        )
    change = (value - reference) / reference
    return -change if direction == "higher" else change


def _value(name: str, values: Mapping[str, float], whose: str) -> float:
    """Return one metric, which is there and finite."""
    if name not in values:
        raise ValueError(
            f"Delta m: the {whose} has no {name!r} (it has: {', '.join(values) or 'nothing'}). Expected a number for "
            "each metric that counts; leave out those that it lacks."
        )
    value = values[name]
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(
            f"Delta m: {name!r} of the {whose} is {value!r}; expected a finite number. Leave the metric out, or see in "
            "its run why there is none."
        )
    return float(value)
