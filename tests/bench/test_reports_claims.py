"""Claims of the paper against made-up numbers, for which it is plain whether they show them."""

import pytest

from flatmtl_bench.reports.claims import CLAIMS, FIRST_TEN, FLAT, LAST_TEN, PLAIN, rows


def verdict(text, quantities):
    """Return what the table says of a claim, of quantities of one data set."""
    (claim,) = [claim for claim in CLAIMS if text in claim.paper]
    return claim.row({name: {"digits": numbers} for name, numbers in quantities.items()}, "digits")[-1]


@pytest.mark.parametrize(
    ("text", "quantity", "plain", "flat", "told"),
    [
        ("lower Brier", "brier", [0.2, 0.3], [0.1, 0.2], "yes (2 of 2)"),
        ("lower Brier", "brier", [0.2, 0.3], [0.1, 0.4], "in part (1 of 2)"),
        ("lower Brier", "brier", [0.2, 0.3], [0.2, 0.3], "no (0 of 2)"),
        ("higher in domain", "entropy, in domain", [0.1], [0.2], "yes (1 of 1)"),
        ("higher in domain", "entropy, in domain", [0.2], [0.1], "no (0 of 1)"),
        ("less than 5%", LAST_TEN, [50.0, 50.0], [4.9, 5.0], "in part (1 of 2)"),
        ("near 100%", "training accuracy, last", [99.0, 98.9], [100.0, 100.0], "in part (1 of 2)"),
    ],
)
def test_a_claim_is_seen_in_the_seeds_whose_numbers_show_it(text, quantity, plain, flat, told):
    assert verdict(text, {quantity: {PLAIN: plain, FLAT: flat}}) == told


def test_conflict_of_the_plain_method_must_rise_and_be_about_half():
    def told(first, last):
        return verdict("about half", {FIRST_TEN: {PLAIN: first, FLAT: first}, LAST_TEN: {PLAIN: last, FLAT: last}})

    assert told([30.0, 30.0, 50.0], [45.0, 39.0, 45.0]) == "in part (1 of 3)"
    assert told([30.0], [45.0]) == "yes (1 of 1)"


def test_sharpness_must_grow_and_end_above_that_of_the_flat_form():
    def told(first, last, flat):
        names = [f"sharpness, {when} snapshot" for when in ("first", "last")]
        numbers = {name: {PLAIN: [plain], FLAT: [flat]} for name, plain in zip(names, (first, last), strict=True)}
        return verdict("sharpness of the plain", numbers)

    assert told(0.1, 0.3, 0.2) == "yes (1 of 1)"
    assert told(0.3, 0.1, 0.05) == "no (0 of 1)"
    assert told(0.1, 0.3, 0.4) == "no (0 of 1)"


def test_accuracy_is_stable_if_radii_differ_by_less_than_they_gain():
    def told(*accuracies):
        return verdict("about the same", {"test accuracy at rho": {f"{k}": [a] for k, a in enumerate(accuracies)}})

    assert told(90.0, 92.0, 93.0) == "yes (1 of 1)"
    assert told(90.0, 91.0, 92.0) == "no (0 of 1)"
    assert told(90.0, 89.0, 92.0) == "no (0 of 1)"


def test_the_table_has_a_row_for_each_claim_and_data_set_that_was_measured():
    numbers = {PLAIN: [0.2, 0.4], FLAT: [0.1, 0.1]}
    heading, *found = rows({"brier": {"digits": numbers, "clothes": numbers}, "ece": {"digits": numbers}})
    assert all(len(row) == len(heading) for row in found)
    assert [(row[2], row[3]) for row in found] == [
        ("digits", "brier: CAGrad 0.300 ± 0.141, F-CAGrad 0.100 ± 0.000"),
        ("clothes", "brier: CAGrad 0.300 ± 0.141, F-CAGrad 0.100 ± 0.000"),
        ("digits", "ece: CAGrad 0.300 ± 0.141, F-CAGrad 0.100 ± 0.000"),
    ]
