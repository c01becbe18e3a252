"""Where a ray meets each shape, and which way the surface faces there.

All shapes are convex, so a ray is inside one for a single interval, and all are of unit size around the origin: parts
of other sizes are seen by scaling the rays. Origins, directions and surface points have shape ``(3, N)``.
A ray along a face divides by zero, and one that misses takes the root of a negative number; the infinity or NaN that
comes out is no hit in any comparison, so callers switch the warnings off.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Interval = tuple[np.ndarray, np.ndarray]


def box_interval(origin: np.ndarray, direction: np.ndarray) -> Interval:
    """Return where rays enter and leave the cube [-1, 1]^3: the latest entry and earliest exit of its three slabs.

    Kay and Kajiya (1986), *Ray tracing complex scenes*, SIGGRAPH.

    Example:
        >>> enter, leave = box_interval(np.array([[0.5], [0.0], [3.0]]), np.array([[0.1], [0.2], [-1.0]]))
        >>> float(enter[0]), float(leave[0])
        (2.0, 4.0)
    """
    inverse = 1 / direction
    one, other = (-1 - origin) * inverse, (1 - origin) * inverse
    return np.minimum(one, other).max(axis=0), np.maximum(one, other).min(axis=0)


def ball_interval(origin: np.ndarray, direction: np.ndarray) -> Interval:
    """Return where rays enter and leave the unit ball; NaN for those that miss it."""
    return _roots(origin, direction)


def cylinder_interval(origin: np.ndarray, direction: np.ndarray) -> Interval:
    """Return where rays enter and leave the cylinder of radius 1 around z, from z = -1 to 1; NaN or none: missed."""
    inverse = 1 / direction[2]
    one, other = (-1 - origin[2]) * inverse, (1 - origin[2]) * inverse
    enter, leave = _roots(origin[:2], direction[:2])
    return np.maximum(enter, np.minimum(one, other)), np.minimum(leave, np.maximum(one, other))


def plane_interval(origin: np.ndarray, direction: np.ndarray) -> Interval:
    """Return where rays enter the half-space below z = 0, which they never leave; it is not seen from below."""
    return -origin[2] / direction[2], np.where(direction[2] < 0, np.inf, -np.inf)


def _roots(origin: np.ndarray, direction: np.ndarray) -> Interval:
    """Return both t at which ``|origin + t direction|`` is 1."""
    a = (direction * direction).sum(axis=0)
    b = (origin * direction).sum(axis=0)
    root = np.sqrt(b * b - a * ((origin * origin).sum(axis=0) - 1))
    return (-b - root) / a, (-b + root) / a


def box_normal(point: np.ndarray) -> np.ndarray:
    """Return the axis in which a point is farthest out, with its sign."""
    axis = np.abs(point).argmax(axis=0)
    return np.where(np.arange(3)[:, None] == axis, np.sign(point), 0)


def ball_normal(point: np.ndarray) -> np.ndarray:
    """Return the direction from the centre."""
    return point


def cylinder_normal(point: np.ndarray) -> np.ndarray:
    """Return the direction from the axis, or along it where the point is on a cap."""
    on_cap = np.abs(point[2]) >= np.hypot(point[0], point[1])
    return np.where(on_cap, np.sign(point) * [[0], [0], [1]], point * [[1], [1], [0]])


def plane_normal(point: np.ndarray) -> np.ndarray:
    """Return z."""
    return np.broadcast_to([[0.0], [0.0], [1.0]], point.shape)


@dataclass(frozen=True)
class Shape:
    """A convex shape of unit size.

    Attributes:
        interval: ``(origin, direction)`` -> where rays enter and leave it, in lengths of the direction.
        normal: points on its surface -> a vector of any length that faces outwards.
        bounded: whether it lies within [-1, 1]^3.
    """

    interval: Callable[[np.ndarray, np.ndarray], Interval]
    normal: Callable[[np.ndarray], np.ndarray]
    bounded: bool = True


SHAPES = {
    "box": Shape(box_interval, box_normal),
    "ball": Shape(ball_interval, ball_normal),
    "cylinder": Shape(cylinder_interval, cylinder_normal),
    "plane": Shape(plane_interval, plane_normal, bounded=False),
}
