"""What is lost between a world and the files of a data set: to the camera, the depth sensor and the annotator."""

import numpy as np

from flatmtl_bench.data.rendering.camera import Camera
from flatmtl_bench.data.rendering.draws import Draws


def photograph(draws: Draws, picture: np.ndarray) -> np.ndarray:
    """Return a picture ``(3, H, W)`` as a camera with automatic exposure stores it: noisy, cut off, uint8."""
    exposed = picture * (draws.between(0.36, 0.54) / picture.mean())
    noise = draws.between(0.005, 0.02) * draws.stream.standard_normal(picture.shape)
    return np.rint(255 * np.clip(exposed + noise, 0, 1)).astype(np.uint8)


def blobs(draws: Draws, height: int, width: int, share: float) -> np.ndarray:
    """Return a mask ``(H, W)`` of soft random patches that cover a share of the pixels."""
    count = int(share * height * width)
    if not count:
        return np.zeros((height, width), bool)
    rows, columns = 7, 9
    field = _between(rows, height) @ draws.stream.random_sample((rows, columns)) @ _between(columns, width).T
    return field >= np.partition(field, -count, axis=None)[-count]


def _between(points: int, pixels: int) -> np.ndarray:
    """Return the weights ``(pixels, points)`` that go smoothly from one of some evenly spaced points to the next."""
    place = np.linspace(0, points - 1, pixels)
    away = np.clip(np.abs(place[:, None] - np.arange(points)), 0, 1)
    return 1 - away * away * (3 - 2 * away)


def borders(labels: np.ndarray, width: int) -> np.ndarray:
    """Return the pixels of a map ``(H, W)`` that have another label up to some pixels to the right of, or below, them.

    Example:
        >>> borders(np.array([[0, 0, 1], [0, 0, 1]]), 1)
        array([[False,  True, False],
               [False,  True, False]])
    """
    found = np.zeros(labels.shape, bool)
    for step in range(1, width + 1):
        found[:, :-step] |= labels[:, :-step] != labels[:, step:]
        found[:-step] |= labels[:-step] != labels[step:]
    return found


def grazed(camera: Camera, normals: np.ndarray, least: float) -> np.ndarray:
    """Return the pixels ``(H, W)`` where the cosine between the ray back and the normal is below ``least``."""
    x, y = camera.rays(*normals.shape[1:])
    towards = normals[2] - normals[0] * x - normals[1] * y[:, None]
    return towards < least * np.sqrt(x * x + (y * y + 1)[:, None])
