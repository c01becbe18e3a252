"""What is painted on a surface: patterns that mix two colours, so that no class is known by its colour alone."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Colour = tuple[float, float, float]
"""Red, green and blue in [0, 1]."""


class Texture(NamedTuple):
    """A pattern in two colours.

    Attributes:
        colour: shown where the pattern is 0.
        other: shown where it is 1; between both it is a mixture.
        pattern: a key of ``PATTERNS``.
        period: size of one repeat, in metres.
        phase: where the first repeat begins, in repeats.
        glow: 0 for a surface that is only as bright as it is lit, 1 for one that shines by itself.
    """

    colour: Colour
    other: Colour = (0.0, 0.0, 0.0)
    pattern: str = "plain"
    period: float = 1.0
    phase: float = 0.0
    glow: float = 0.0


def plain(at: np.ndarray) -> np.ndarray:
    """One colour."""
    return np.zeros_like(at[:1])


def stripes(at: np.ndarray) -> np.ndarray:
    """Bands along x."""
    return (at[:1] % 1 < 0.5).astype(at.dtype)


def checks(at: np.ndarray) -> np.ndarray:
    """A chess-board."""
    return np.floor(2 * at).sum(axis=0, keepdims=True) % 2


def tiles(at: np.ndarray) -> np.ndarray:
    """Squares with joints."""
    return (np.abs(at % 1 - 0.5) > 0.46).any(axis=0, keepdims=True).astype(at.dtype)


def panes(at: np.ndarray) -> np.ndarray:
    """Upright rectangles in rows, like the windows of a house."""
    inside = (np.abs(at[:2] % 1 - 0.5) < 0.28).any(axis=0) & (np.abs(at[2] % 1 - 0.5) < 0.3)
    return inside[None].astype(at.dtype)


def grain(at: np.ndarray) -> np.ndarray:
    """Wood: long wavy lines along x."""
    across = at[1:2] + at[2:]
    bend = 0.12 * np.sin(1.3 * at[:1] + 2 * across) + 0.03 * np.sin(5 * at[:1])
    return 0.5 + 0.5 * np.sin(25 * (across + bend)) * np.sin(9 * across + 0.7 * at[:1])


def weave(at: np.ndarray) -> np.ndarray:
    """Cloth: a fine grid of soft dots."""
    return 0.5 + 0.5 * np.sin(6.3 * at[:1]) * np.sin(6.3 * (at[1:2] + at[2:]))


def clouds(at: np.ndarray) -> np.ndarray:
    """Soft patches of all sizes."""
    x, y, z = at
    coarse = np.sin(3.1 * x + 1.7 * np.sin(2.3 * y + z)) + np.sin(2.7 * y - 1.9 * np.sin(3.3 * z - x))
    fine = np.sin(7.9 * z + 2.1 * np.sin(6.1 * x)) * np.sin(8.3 * x - 7.1 * y)
    return np.clip(0.5 + 0.2 * coarse + 0.25 * fine, 0, 1)[None]


def mosaic(at: np.ndarray) -> np.ndarray:
    """Cells of random colours between the two, drawn for red, green and blue apart."""
    return _random(np.floor(2 * at))


def spines(at: np.ndarray) -> np.ndarray:
    """Books in a row: bands along x of random colours."""
    return _random(np.floor(at * [[1], [0], [0]]))


def leaves(at: np.ndarray) -> np.ndarray:
    """Small cells of random brightness."""
    return _random(np.floor(at + 0.3 * np.sin(5 * at[[1, 2, 0]])))[:1]


def _random(cell: np.ndarray) -> np.ndarray:
    """Return three numbers in [0, 1] for each cell ``(3, N)``, which look random: an integer hash."""
    x, y, z = cell.astype(np.int64).astype(np.uint32)
    mixed = x * np.uint32(374761393) + y * np.uint32(668265263) + z * np.uint32(2246822519)
    mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(1274126177)
    mixed ^= mixed >> np.uint32(16)
    return np.stack([(mixed >> np.uint32(shift)) % np.uint32(256) for shift in (0, 8, 16)]).astype(np.float32) / 255


PATTERNS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "plain": plain,
    "stripes": stripes,
    "checks": checks,
    "tiles": tiles,
    "panes": panes,
    "grain": grain,
    "weave": weave,
    "clouds": clouds,
    "mosaic": mosaic,
    "spines": spines,
    "leaves": leaves,
}
"""Name -> function from places ``(3, N)``, in repeats, to the share of the other colour, ``(1 or 3, N)``."""
