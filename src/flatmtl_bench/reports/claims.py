"""What Phan et al. (2025) say of flat minima, and whether the numbers of runs show it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

PLAIN, FLAT = "CAGrad", "F-CAGrad"

Seen = Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]
"""Quantity -> data set -> method -> a number of each seed."""
Verdict = Callable[[Mapping[str, Mapping[str, Sequence[float]]]], Sequence[bool]]
"""From the quantities of one data set (quantity -> method -> numbers) to whether each seed shows the claim."""


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper and what would show it.

    Attributes:
        paper: the sentence, in our words.
        where: figure or table of the paper.
        shown: quantities, and how their numbers are written.
        holds: whether each seed shows it.
    """

    paper: str
    where: str
    shown: Mapping[str, str]
    holds: Verdict

    def row(self, seen: Seen, data: str) -> list[str] | None:
        """Return the row of a data set: the claim, what is seen, and in how many seeds; None if it is not measured."""
        if not all(data in seen.get(name, {}) for name in self.shown):
            return None
        own = {name: seen[name][data] for name in self.shown}
        numbers = "; ".join(f"{name}: {spelled(own[name], form)}" for name, form in self.shown.items())
        verdict = list(self.holds(own))
        told = "yes" if all(verdict) else "no" if not any(verdict) else "in part"
        return [self.paper, self.where, data, numbers, f"{told} ({sum(verdict)} of {len(verdict)})"]


def spelled(methods: Mapping[str, Sequence[float]], form: str) -> str:
    """Return the mean and the standard deviation of each method.

    Example:
        >>> spelled({"CAGrad": [1.0, 3.0], "F-CAGrad": [2.0]}, ".1f")
        'CAGrad 2.0 ± 1.4, F-CAGrad 2.0'
    """

    def numbers(values: Sequence[float]) -> str:
        spread = f" ± {stdev(values):{form}}" if len(values) > 1 else ""
        return f"{fmean(values):{form}}{spread}"

    return ", ".join(f"{method} {numbers(values)}" for method, values in methods.items())


def above(first: Sequence[float], second: Sequence[float]) -> list[bool]:
    """Return for each seed whether the first number is the larger one."""
    return [a > b for a, b in zip(first, second, strict=True)]


def both(*verdicts: Sequence[bool]) -> list[bool]:
    """Return for each seed whether all hold."""
    return [all(some) for some in zip(*verdicts, strict=True)]


def lower(*names: str) -> Verdict:
    """The flat method has the smaller number of each of these quantities."""
    return lambda own: both(*(above(own[name][PLAIN], own[name][FLAT]) for name in names))


def higher(*names: str) -> Verdict:
    """The flat method has the larger number of each of these quantities."""
    return lambda own: both(*(above(own[name][FLAT], own[name][PLAIN]) for name in names))


def grows(name: str, first: str, last: str) -> Verdict:
    """A quantity of the plain method grows in training, and ends above that of the flat method."""
    early, late = f"{name}, {first}", f"{name}, {last}"
    return lambda own: both(above(own[late][PLAIN], own[early][PLAIN]), above(own[late][PLAIN], own[late][FLAT]))


SNAPSHOTS = "first snapshot", "last snapshot"
FIRST_TEN, LAST_TEN = (f"conflict, {which} ten epochs" for which in ("first", "last"))


def stable(own: Mapping[str, Mapping[str, Sequence[float]]]) -> list[bool]:
    """Whether, seed by seed, accuracy is above that at rho 0 at all radii, and differs by less than that among them."""
    plain, *flat = own["test accuracy at rho"].values()  # in the order of the radii
    return [
        min(some) > zero and max(some) - min(some) < min(some) - zero for zero, *some in zip(plain, *flat, strict=True)
    ]


CLAIMS = (
    Claim(
        "Plain: task gradients conflict in about half of the mini-batches (40% or more), and more as training goes on",
        "figures 3, 11",
        {FIRST_TEN: ".0f", LAST_TEN: ".0f"},
        lambda own: [b > a and b >= 40 for a, b in zip(own[FIRST_TEN][PLAIN], own[LAST_TEN][PLAIN], strict=True)],
    ),
    Claim(
        "Flat: they conflict in less than 5%",
        "figure 11",
        {LAST_TEN: ".0f"},
        lambda own: [share < 5 for share in own[LAST_TEN][FLAT]],
    ),
    Claim(
        "The flat form has fewer conflicts (the weaker form of the two above)",
        "figures 3, 11",
        {LAST_TEN: ".0f"},
        lower(LAST_TEN),
    ),
    Claim(
        "From epoch 20 on the flat form is ahead in test accuracy",
        "figure 12",
        {
            "ahead in test accuracy from epoch": ".0f",
            "test accuracy, epoch 20": ".2f",
            "test accuracy, epoch 50": ".2f",
        },
        higher("test accuracy, epoch 20", "test accuracy, epoch 50"),
    ),
    Claim(
        "Both are near 100% in training accuracy (99% or more) at epoch 50",
        "figure 13",
        {"training accuracy, last": ".2f"},
        lambda own: [min(some) >= 99 for some in zip(*own["training accuracy, last"].values(), strict=True)],
    ),
    Claim(
        "The sharpness of the plain method grows in training, beyond that of the flat one",
        "figure 14",
        {f"sharpness, {when}": ".3g" for when in SNAPSHOTS},
        grows("sharpness", *SNAPSHOTS),
    ),
    Claim(
        "So does the norm of its flat gradient",
        "figure 15",
        {f"norm of the flat gradient, {when}": ".3g" for when in SNAPSHOTS},
        grows("norm of the flat gradient", *SNAPSHOTS),
    ),
    Claim(
        "Test loss surfaces of the flat form are lower",
        "figure 9",
        {"landscape, centre": ".3f"},
        lower("landscape, centre"),
    ),
    Claim(
        "and flatter (mean rise over the square)",
        "figure 9",
        {"landscape, rise": ".3g"},
        lower("landscape, rise"),
    ),
    Claim(
        "The flat form withstands larger random perturbations, relative to the norm of the weights",
        "figure 10",
        {"withstood, relative": ".2f"},
        higher("withstood, relative"),
    ),
    Claim(
        "and in absolute terms (the paper: r = 800 of 1,000 for a ResNet-18, whose plain form falls at once)",
        "figure 10",
        {"withstood, absolute": ".1f"},
        higher("withstood, absolute"),
    ),
    Claim(
        "The flat form has the lower Brier score (0.120 against 0.159, mean over the three sets)",
        "table 8",
        {"brier": ".3f"},
        lower("brier"),
    ),
    Claim(
        "and the lower ECE (0.036 against 0.076)",
        "table 9, figure 7",
        {"ece": ".3f"},
        lower("ece"),
    ),
    Claim(
        "Its predictive entropy is higher in domain",
        "figure 5",
        {"entropy, in domain": ".4f"},
        higher("entropy, in domain"),
    ),
    Claim(
        "and out of domain",
        "figure 6",
        {"entropy, out of domain": ".4f"},
        higher("entropy, out of domain"),
    ),
    Claim(
        "So it tells the two apart (ours: AUROC of the entropy; the paper has no number for it)",
        "figures 5, 6",
        {"AUROC of entropy": ".3f"},
        higher("AUROC of entropy"),
    ),
    Claim(
        "Accuracy is about the same for all radii from 0.5 (it differs by less than it gains over rho 0)",
        "figure 8",
        {"test accuracy at rho": ".2f"},
        stable,
    ),
)


def rows(seen: Seen) -> list[list[str]]:
    """Return the table: a row for each claim and data set; what a claim says stands in its first row only."""
    names = list(dict.fromkeys(data for methods in seen.values() for data in methods))
    table = [["the paper says", "where", "data", "we see (mean ± standard deviation over seeds)", "seeds that show it"]]
    for claim in CLAIMS:
        found = [row for data in names if (row := claim.row(seen, data)) is not None]
        table += found[:1] + [["", "", *row[2:]] for row in found[1:]]
    return table
