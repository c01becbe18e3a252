"""Shapes painted on a picture, with smooth edges."""

from dataclasses import dataclass, replace

import numpy as np

Colour = tuple[float, float, float]
"""Red, green and blue, 0..255."""


@dataclass(frozen=True)
class Canvas:
    """A picture with coordinates of its own, on which shapes are painted one over the other.

    A shape is given by the signed distance of each pixel to its edge, negative inside. An edge is one pixel wide, so
    shapes may lie between pixels. Only operations that IEEE 754 rounds exactly are used here, so the same numbers
    give the same bytes on any machine.

    Attributes:
        picture: float32, ``(3, H, W)``, red, green and blue, 0..255; painted on in place.
        x: to the right, ``(H, W)``.
        y: downwards, ``(H, W)``.
        scale: pixels in a unit of x and y.

    Example:
        >>> canvas = Canvas.blank(2, 4, (0.0, 0.0, 0.0))
        >>> canvas.paint(canvas.x, (200.0, 100.0, 0.0))  # the left half
        >>> canvas.picture[0].tolist()
        [[200.0, 200.0, 0.0, 0.0], [200.0, 200.0, 0.0, 0.0]]
    """

    picture: np.ndarray
    x: np.ndarray
    y: np.ndarray
    scale: float

    @classmethod
    def blank(cls, height: int, width: int, colour: Colour) -> "Canvas":
        """Return a canvas of one colour; the shorter side is 2 units long, and (0, 0) is the centre."""
        scale = min(height, width) / 2
        x = (np.arange(width, dtype=np.float32) + (1 - width) / 2) / np.float32(scale)
        y = (np.arange(height, dtype=np.float32) + (1 - height) / 2) / np.float32(scale)
        picture = np.empty((3, height, width), np.float32)
        picture[:] = np.array(colour, np.float32)[:, None, None]
        x, y = np.broadcast_arrays(x[None, :], y[:, None])
        return cls(picture, x, y, scale)

    def placed(self, x: float, y: float, scale: float, tilt: float) -> "Canvas":
        """Return the same picture in coordinates with another origin and unit, and turned.

        ``tilt`` is the tangent of half the angle, clockwise.
        """
        cosine, sine = (1 - tilt * tilt) / (1 + tilt * tilt), 2 * tilt / (1 + tilt * tilt)
        right, down = (self.x - x) / scale, (self.y - y) / scale
        turned = {"x": right * cosine + down * sine, "y": down * cosine - right * sine}
        return replace(self, scale=self.scale * scale, **turned)

    def part(self, left: float, right: float, top: float, bottom: float) -> "Canvas":
        """Return the smallest upright piece of the canvas that holds a box, to paint on at less cost."""
        inside = (self.x > left) & (self.x < right) & (self.y > top) & (self.y < bottom)
        rows, columns = np.flatnonzero(inside.any(axis=1)), np.flatnonzero(inside.any(axis=0))
        if not len(rows):
            return replace(self, picture=self.picture[:, :0, :0], x=self.x[:0, :0], y=self.y[:0, :0])
        window = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
        return replace(self, picture=self.picture[:, *window], x=self.x[window], y=self.y[window])

    def paint(self, distance: np.ndarray, colour: Colour, opacity: float = 1.0, soft: float = 0.0) -> None:
        """Paint the inside of a shape; with ``soft`` its edge is so many units wide, not one pixel."""
        width = max(soft, 1 / self.scale)
        cover = distance * (-1 / width) + 0.5
        np.clip(cover, 0.0, 1.0, out=cover)
        cover *= opacity
        picture = self.picture
        picture += (np.array(colour, np.float32)[:, None, None] - picture) * cover


def ellipse(x: np.ndarray, y: np.ndarray, across: float, down: float) -> np.ndarray:
    """Return the distance to an ellipse about (0, 0) with these half axes; exact for a circle."""
    x, y = x / across, y / down
    return (np.sqrt(x * x + y * y) - 1.0) * min(across, down)


def box(x: np.ndarray, y: np.ndarray, across: float, down: float) -> np.ndarray:
    """Return the distance to an upright box about (0, 0) with these half sides; too short beyond its corners."""
    return np.maximum(np.abs(x) - across, np.abs(y) - down)


def ring(distance: np.ndarray, width: float) -> np.ndarray:
    """Return the distance to the edge of a shape, drawn as a line of some width."""
    return np.abs(distance) - width / 2


def waves(t: np.ndarray) -> np.ndarray:
    """Return a wave between -1 and 1 with period 2, made of parabolas: 0 at whole numbers.

    Example:
        >>> waves(np.array([0.25, 0.5, 1.5])).tolist()
        [0.75, 1.0, -1.0]
    """
    half = np.floor(t)
    rest = t - half
    return 4.0 * rest * (1.0 - rest) * (1.0 - 2.0 * (half - 2.0 * np.floor(half / 2.0)))


def mix(one: Colour, other: Colour, share: float) -> Colour:
    """Return the colour between two; share 0 is the first.

    Example:
        >>> mix((0.0, 0.0, 0.0), (200.0, 100.0, 50.0), 0.5)
        (100.0, 50.0, 25.0)
    """
    red, green, blue = (a + (b - a) * share for a, b in zip(one, other, strict=True))
    return red, green, blue
