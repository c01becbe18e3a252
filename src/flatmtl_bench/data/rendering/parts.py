"""Parts of a world: shapes of a size at a place, with a label and a texture."""

from collections.abc import Iterable
from math import cos, sin
from typing import NamedTuple

from flatmtl_bench.data.rendering.textures import Texture


class Part(NamedTuple):
    """One shape in the world.

    Attributes:
        shape: a key of ``SHAPES``.
        size: half its extent along its own x, y and z: a box of these half sides, a ball of these radii, a cylinder
            of these radii and half height; of a plane, any.
        at: the place of its centre.
        label: the class; None: no class that an annotator knows.
        texture: what is painted on it.
        yaw: turn to the left, about z; after the tilt.
        tilt: turn about its own x: with pi / 2 a cylinder lies along y and a plane is a wall that faces -y.
        shadow: whether it throws one.
    """

    shape: str
    size: tuple[float, float, float]
    at: tuple[float, float, float]
    label: str | None
    texture: Texture
    yaw: float = 0.0
    tilt: float = 0.0
    shadow: bool = True


def moved(parts: Iterable[Part], x: float, y: float, z: float = 0.0, yaw: float = 0.0) -> list[Part]:
    """Return parts turned together about the z axis, then moved.

    Example:
        >>> part = Part("box", (1.0, 1.0, 1.0), (1.0, 0.0, 0.0), "table", Texture((0.5, 0.5, 0.5)))
        >>> moved([part], 2.0, 3.0, yaw=0.0)[0].at
        (3.0, 3.0, 0.0)
    """
    c, s = cos(yaw), sin(yaw)
    return [
        part._replace(at=(x + c * px - s * py, y + s * px + c * py, z + pz), yaw=part.yaw + yaw)
        for part in parts
        for px, py, pz in [part.at]
    ]
