"""Laws and errors of Delta m; the paper's rows are in ``test_metrics_golden.py``."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatmtl_bench.reports.delta import delta_m

BETTER = {"miou": "higher", "abs_err": "lower", "median": "lower"}
VALUES = st.fixed_dictionaries({name: st.floats(0.01, 100) for name in BETTER})
SINGLE = {"miou": 0.5, "abs_err": 2.0, "median": 20.0}


@given(values=VALUES)
def test_it_is_zero_for_the_baseline_itself(values):
    assert delta_m(values, values, BETTER) == 0


@given(values=VALUES, baseline=VALUES, units=st.floats(1e-3, 1e3))
def test_units_do_not_matter(values, baseline, units):
    scaled = ({**numbers, "abs_err": units * numbers["abs_err"]} for numbers in (values, baseline))
    assert delta_m(*scaled, BETTER) == pytest.approx(delta_m(values, baseline, BETTER), rel=1e-9, abs=1e-9)


@given(values=VALUES, baseline=VALUES)
def test_the_order_of_metrics_does_not_matter(values, baseline):
    assert delta_m(values, baseline, dict(reversed(BETTER.items()))) == delta_m(values, baseline, BETTER)


@pytest.mark.parametrize(("name", "direction"), BETTER.items())
def test_what_is_better_by_a_tenth_counts_for_a_tenth(name, direction):
    better = {**SINGLE, name: SINGLE[name] * (1.1 if direction == "higher" else 0.9)}
    assert delta_m(better, SINGLE, BETTER) == pytest.approx(-10 / len(BETTER))


def test_names_that_do_not_count_may_be_there():
    assert delta_m({**SINGLE, "loss": math.nan}, {**SINGLE, "valid": 0}, BETTER) == 0


def test_numbers_of_numpy_are_numbers():
    assert delta_m({"miou": np.float32(0.25)}, {"miou": np.float64(0.5)}, {"miou": "higher"}) == 50


class TestErrors:
    @pytest.mark.parametrize("whose", ["method", "baseline"])
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "0.5"])
    def test_a_value_that_is_not_finite(self, whose, value):
        wrong = {**SINGLE, "miou": value}
        numbers = (wrong, SINGLE) if whose == "method" else (SINGLE, wrong)
        with pytest.raises(ValueError, match=f"'miou' of the {whose} is {value!r}; expected a finite number"):
            delta_m(*numbers, BETTER)

    @pytest.mark.parametrize("whose", ["method", "baseline"])
    def test_a_missing_value(self, whose):
        less = {name: value for name, value in SINGLE.items() if name != "median"}
        numbers = (less, SINGLE) if whose == "method" else (SINGLE, less)
        with pytest.raises(ValueError, match=rf"the {whose} has no 'median' \(it has: miou, abs_err\)"):
            delta_m(*numbers, BETTER)

    @pytest.mark.parametrize("value", [0.0, -1.0])
    def test_a_baseline_that_is_not_positive(self, value):
        with pytest.raises(ValueError, match=f"'abs_err' of the baseline is {value}; expected a number above 0"):
            delta_m(SINGLE, {**SINGLE, "abs_err": value}, BETTER)

    def test_an_unknown_direction(self):
        with pytest.raises(ValueError, match="unknown direction of 'miou' 'up'. Known: higher, lower"):
            delta_m(SINGLE, SINGLE, {"miou": "up"})

    def test_no_metric(self):
        with pytest.raises(ValueError, match="no metric"):
            delta_m(SINGLE, SINGLE, {})
