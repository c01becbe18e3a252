"""Which faces have which of CelebA's attributes: a distribution much like that of the real ones."""

from collections.abc import Mapping, Sequence
from math import fsum, sqrt
from statistics import NormalDist

import numpy as np

DISTRIBUTION: Mapping[str, tuple[float, Mapping[str, float]]] = {
    "5_o_Clock_Shadow": (0.11, {"man": 0.75, "beard": 0.45}),
    "Arched_Eyebrows": (0.27, {"man": -0.5, "style": 0.3}),
    "Attractive": (0.51, {"man": -0.35, "old": -0.45, "style": 0.4, "weight": -0.3}),
    "Bags_Under_Eyes": (0.20, {"man": 0.35, "old": 0.35}),
    "Bald": (0.02, {"man": 0.6, "old": 0.5}),
    "Bangs": (0.15, {"man": -0.25, "old": -0.25}),
    "Big_Lips": (0.24, {"man": -0.15, "style": 0.15}),
    "Big_Nose": (0.24, {"man": 0.4, "old": 0.3, "weight": 0.3}),
    "Black_Hair": (0.24, {}),
    "Blond_Hair": (0.15, {}),
    "Blurry": (0.05, {}),
    "Brown_Hair": (0.20, {}),
    "Bushy_Eyebrows": (0.14, {"man": 0.45, "old": -0.15}),
    "Chubby": (0.06, {"weight": 0.85, "old": 0.2}),
    "Double_Chin": (0.05, {"weight": 0.8, "old": 0.35}),
    "Eyeglasses": (0.06, {"man": 0.3, "old": 0.4}),
    "Goatee": (0.06, {"man": 0.7, "beard": 0.5}),
    "Gray_Hair": (0.04, {"man": 0.25, "old": 0.75}),
    "Heavy_Makeup": (0.39, {"man": -0.75, "style": 0.5}),
    "High_Cheekbones": (0.45, {"man": -0.2, "joy": 0.75}),
    "Male": (0.42, {"man": 1.0}),
    "Mouth_Slightly_Open": (0.48, {"joy": 0.65}),
    "Mustache": (0.04, {"man": 0.7, "beard": 0.45, "old": 0.1}),
    "Narrow_Eyes": (0.12, {"joy": 0.2}),
    "No_Beard": (0.83, {"man": -0.75, "beard": -0.55}),
    "Oval_Face": (0.28, {"style": 0.2, "weight": -0.3}),
    "Pale_Skin": (0.04, {"man": -0.2}),
    "Pointy_Nose": (0.28, {"man": -0.2, "style": 0.3, "weight": -0.2}),
    "Receding_Hairline": (0.08, {"man": 0.35, "old": 0.5}),
    "Rosy_Cheeks": (0.07, {"man": -0.45, "style": 0.4}),
    "Sideburns": (0.06, {"man": 0.7, "beard": 0.35}),
    "Smiling": (0.48, {"joy": 0.9}),
    "Straight_Hair": (0.21, {"waves": -0.9}),
    "Wavy_Hair": (0.32, {"man": -0.4, "waves": 0.8}),
    "Wearing_Earrings": (0.19, {"man": -0.5, "style": 0.35}),
    "Wearing_Hat": (0.05, {"man": 0.25, "old": -0.1}),
    "Wearing_Lipstick": (0.47, {"man": -0.8, "style": 0.45}),
    "Wearing_Necklace": (0.12, {"man": -0.4, "style": 0.2}),
    "Wearing_Necktie": (0.07, {"man": 0.6, "old": 0.25}),
    "Young": (0.77, {"old": -0.9, "weight": -0.15}),
}
"""Attribute -> the share of faces that have it, much as in CelebA, and its loadings on ``FACTORS``."""

FACTORS = ("man", "old", "style", "joy", "weight", "beard", "waves")
"""What several attributes have in common."""

HAIR = {"Black_Hair": (0.0, 0.24), "Brown_Hair": (0.36, 0.56), "Blond_Hair": (0.85, 1.0)}
"""Which quantiles of the lightness of hair are called what; those between have no name."""

EXCLUDED: Sequence[tuple[tuple[str, ...], tuple[str, ...]]] = (
    (("Bald",), ("Wearing_Hat",)),
    (("Gray_Hair",), ("Bald",)),
    (tuple(HAIR), ("Gray_Hair", "Bald")),
    (("Bangs", "Straight_Hair", "Wavy_Hair", "Receding_Hairline"), ("Bald", "Wearing_Hat")),
    (("Bangs",), ("Receding_Hairline",)),
    (("Straight_Hair",), ("Wavy_Hair",)),
    (("5_o_Clock_Shadow", "Goatee", "Mustache"), ("No_Beard",)),
)
"""Attributes, and others that a face with one of them cannot have."""


def draw_margins(count: int, rng: np.random.RandomState) -> dict[str, np.ndarray]:
    r"""Return for each attribute by how much each of ``count`` faces has it: it has it if that is above 0.

    A factor model (Spearman, 1904): with independent factors :math:`f_j` and :math:`e_k` of mean 0 and variance 1,
    loadings :math:`l_{kj}`, and :math:`q_k` that a standard normal variable exceeds in the wanted share of faces, the
    margin of attribute k is

    .. math:: z_k = \sum_j l_{kj} f_j + \sqrt{1 - \sum_j l_{kj}^2} \; e_k - q_k .

    Black, brown and blond are ranges of one lightness of the hair, which is returned as ``Hair``, of mean 0 and
    variance 1. What excludes each other is made to: "a and not b" has the margin ``min(a, -b)``. The first faces are
    the same for any ``count``.

    Example:
        >>> margins = draw_margins(1000, np.random.RandomState(0))
        >>> bool(((margins["Goatee"] > 0) & (margins["No_Beard"] > 0)).any())
        False
    """
    bells = iter(draw_bells(count, len(FACTORS) + len(DISTRIBUTION) + 1, rng))
    factors = {name: next(bells) for name in FACTORS}
    margins = {}
    for attribute, (share, loadings) in DISTRIBUTION.items():
        own = 1.0 - fsum(loading * loading for loading in loadings.values())
        margin = sqrt(own) * next(bells) - quantile(1.0 - share)
        for factor, loading in loadings.items():
            margin += loading * factors[factor]
        margins[attribute] = margin
    hair = sqrt(0.91) * next(bells) - 0.3 * factors["man"]
    for colour, (low, high) in HAIR.items():
        margins[colour] = np.minimum(hair - quantile(low), quantile(high) - hair)
    for attributes, others in EXCLUDED:
        for attribute in attributes:
            for other in others:
                margins[attribute] = np.minimum(margins[attribute], -margins[other])
    return margins | {"Hair": hair}


def quantile(share: float) -> float:
    """Return what a standard normal variable is below of in a share of cases, to six digits; 0 and 1 are far out."""
    return round(NormalDist().inv_cdf(min(max(share, 1e-9), 1.0 - 1e-9)), 6)


def draw_bells(count: int, kinds: int, rng: np.random.RandomState) -> np.ndarray:
    """Return ``(kinds, count)`` numbers of mean 0 and variance 1, nearly normal: each the sum of twelve uniform ones.

    Such sums are the same on any machine; a normal variable takes a logarithm, which is not.
    """
    uniform = rng.random_sample((count, kinds, 12))
    total = uniform[..., 0]
    for term in range(1, 12):
        total = total + uniform[..., term]
    return (total - 6.0).T
