"""Where a picture is taken from."""

from dataclasses import dataclass
from functools import cached_property
from math import cos, sin

import numpy as np


@dataclass(frozen=True)
class Camera:
    """A pinhole camera.

    Attributes:
        eye: its place in the world.
        yaw: turn to the left; 0: it looks along y.
        pitch: turn upwards.
        roll: turn of the camera about its axis, to the left.
        focal: focal length, in widths of the picture: half the angle of view is ``atan(0.5 / focal)``.
    """

    eye: tuple[float, float, float]
    yaw: float = 0.0
    pitch: float = 0.0
    roll: float = 0.0
    focal: float = 1.0

    @cached_property
    def axes(self) -> np.ndarray:
        """The camera's right, up and back as rows, in world coordinates: world vectors -> camera vectors.

        Example:
            >>> Camera(eye=(0.0, 0.0, 0.0)).axes @ [0.0, 5.0, 0.0]  # 5 m ahead
            array([ 0.,  0., -5.])
        """
        a, b, c = self.yaw, self.pitch, self.roll
        right = np.array([cos(a), sin(a), 0.0])
        back = np.array([sin(a) * cos(b), -cos(a) * cos(b), -sin(b)])
        up = np.array([sin(a) * sin(b), -cos(a) * sin(b), cos(b)])
        return np.stack([cos(c) * right + sin(c) * up, cos(c) * up - sin(c) * right, back])

    def rays(self, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return x of each column and y of each row: the ray through a pixel's centre is ``(x, y, -1)``.

        Example:
            >>> [values.tolist() for values in Camera(eye=(0.0, 0.0, 0.0), focal=0.5).rays(2, 4)]
            [[-0.75, -0.25, 0.25, 0.75], [0.25, -0.25]]
        """
        scale = 1 / (self.focal * width)
        x = (np.arange(width) + 0.5 - width / 2) * scale
        y = (height / 2 - np.arange(height) - 0.5) * scale
        return x, y
