"""Random choices of a world."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


class Draws:
    """A stream of random choices, the same on any version of NumPy.

    Args:
        numbers: what tells this stream from others.

    Attributes:
        stream: a `numpy.random.RandomState`, whose streams NumPy has frozen.

    Example:
        >>> Draws(1, 2).between(3.0, 4.0) == Draws(1, 2).between(3.0, 4.0)
        True
    """

    def __init__(self, *numbers: int) -> None:
        self.stream = np.random.RandomState(numbers)

    def between(self, low: float, high: float) -> float:
        """Return a number between two, uniformly."""
        return low + (high - low) * self.stream.random_sample()

    def around(self, spread: float) -> float:
        """Return a number between ``-spread`` and ``spread``, uniformly."""
        return self.between(-spread, spread)

    def chance(self, probability: float) -> bool:
        """Return True with a probability."""
        return self.stream.random_sample() < probability

    def one_of(self, items: Sequence[T]) -> T:
        """Return one of some items, each with the same probability."""
        return items[int(self.stream.random_sample() * len(items))]

    def count(self, low: int, high: int) -> int:
        """Return a whole number from ``low`` to ``high``, both included."""
        return low + int(self.stream.random_sample() * (high - low + 1))
