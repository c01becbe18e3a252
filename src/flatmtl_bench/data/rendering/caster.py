"""The picture of a world, with the exact depth, normal and part at each pixel."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flatmtl_bench.data.rendering.camera import Camera
from flatmtl_bench.data.rendering.parts import Part
from flatmtl_bench.data.rendering.shapes import SHAPES, Shape
from flatmtl_bench.data.rendering.textures import PATTERNS, Colour

NEAREST = 0.05  # metres in front of the camera from which on it sees
CORNERS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], np.float64)
AT_ONCE = 2**15  # pixels of windows that are worked on together: what fits into the cache


@dataclass(frozen=True)
class Light:
    """A lamp or a sun.

    What throws shadows is told from a picture that the light takes of the world: what is farther away than what it
    shows lies in the shadow (Williams, 1978, *Casting curved shadows on curved surfaces*, SIGGRAPH).

    Attributes:
        view: a camera at its place that sees everything that throws shadows; outside of its picture all is lit.
        colour: how bright it is.
        reach: metres at which it is half as bright as close by.
        shadows: whether there are any, else it lights up everything that faces it.
    """

    view: Camera
    colour: Colour
    reach: float = float("inf")
    shadows: bool = True


@dataclass(frozen=True)
class World:
    """What there is to see.

    Attributes:
        parts: the shapes.
        lights: what they are lit by.
        ambient: light from everywhere, brighter from above.
        sky: colours at the horizon and straight up, where there is no part.
    """

    parts: Sequence[Part]
    lights: Sequence[Light] = ()
    ambient: Colour = (1.0, 1.0, 1.0)
    sky: tuple[Colour, Colour] = ((1.0, 1.0, 1.0), (0.6, 0.7, 1.0))

    @cached_property
    def centres(self) -> np.ndarray:
        """The place of each part, ``(N, 3)``."""
        return np.array([part.at for part in self.parts])

    @cached_property
    def sizes(self) -> np.ndarray:
        """Half the extent of each part, ``(N, 3)``."""
        return np.array([part.size for part in self.parts], np.float64)

    @cached_property
    def axes(self) -> np.ndarray:
        """World vectors -> vectors along the axes of each part, ``(N, 3, 3)``."""
        angles = np.array([(part.yaw, part.tilt) for part in self.parts])
        (a, b), (c, d) = np.cos(angles).T, np.sin(angles).T
        zero = np.zeros_like(a)
        return np.array([[a, c, zero], [-c * b, a * b, d], [c * d, -a * d, b]]).transpose(2, 0, 1)


@dataclass(frozen=True)
class Hits:
    """What the rays of a camera meet first.

    Attributes:
        camera: whose rays they are.
        part: number of the part at each pixel, ``(H, W)``; -1: none.
        depth: distance along the optical axis in metres, float32 ``(H, W)``; infinite where there is no part.
    """

    camera: Camera
    part: np.ndarray
    depth: np.ndarray

    @cached_property
    def seen(self) -> np.ndarray:
        """The pixels that show a part, as flat indices ``(P,)``."""
        return np.flatnonzero(self.part.ravel() >= 0)

    @cached_property
    def parts(self) -> np.ndarray:
        """The part at each of those, ``(P,)``."""
        return self.part.ravel()[self.seen]

    @cached_property
    def points(self) -> np.ndarray:
        """The surface points at those, in camera coordinates, float32 ``(3, P)``."""
        height, width = self.part.shape
        x, y = (values.astype(np.float32) for values in self.camera.rays(height, width))
        row, column = np.divmod(self.seen, width)
        return self.depth.ravel()[self.seen] * np.stack([x[column], y[row], np.full(len(row), -1, np.float32)])


def cast(world: World, camera: Camera, height: int, width: int, only: Sequence[int] | None = None) -> Hits:
    """Return the nearest part along the ray through each pixel; ``only`` some parts, or all."""
    depth = np.full(height * width, np.inf, np.float32)
    part = np.full(height * width, -1, np.int32)
    chosen = np.arange(len(world.parts)) if only is None else np.asarray(only, int)
    x, y = camera.rays(height, width)
    scaled = world.axes[chosen] @ camera.axes.T / world.sizes[chosen, :, None]  # camera vectors -> unit shapes
    away = (world.centres[chosen] - camera.eye) @ camera.axes.T
    origins = -(scaled @ away[..., None])[..., 0].T.astype(np.float32)
    across, down, back = (scaled[..., axis].T[..., None] for axis in range(3))
    across, down = ((a.astype(np.float32)).reshape(3, -1) for a in (across * x - back, down * y))
    windows = _windows(world, camera, chosen, height, width)
    for shape, group in _groups(world, chosen, windows):
        which, row, column = _pixels(group, windows)
        direction = across.take(which * width + column, axis=1) + down.take(which * height + row, axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):  # rays along a face, and rays that miss
            enter, leave = shape.interval(origins.take(which, axis=1), direction)
            met = np.flatnonzero((enter < leave) & (enter > NEAREST))
        pixel, enter = (row * width + column)[met], enter[met]
        np.minimum.at(depth, pixel, enter)
        first = np.flatnonzero(enter == depth[pixel])
        part[pixel[first]] = chosen[which[met[first]]]
    return Hits(camera, part.reshape(height, width), depth.reshape(height, width))


def _windows(world: World, camera: Camera, chosen: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return the rectangle of pixels that each part may cover: top, left, height and width, ``(N, 4)``."""
    corners = world.centres[chosen, None] + (CORNERS * world.sizes[chosen, None]) @ world.axes[chosen]
    x, y, back = np.moveaxis((corners - camera.eye) @ camera.axes.T, 2, 0)
    scale = camera.focal * width / np.maximum(-back, NEAREST)
    down, across = height / 2 - y * scale, width / 2 + x * scale
    low = np.stack([down.min(axis=1), across.min(axis=1)], axis=1)
    high = np.stack([down.max(axis=1), across.max(axis=1)], axis=1)
    bounded = np.array([SHAPES[world.parts[i].shape].bounded for i in chosen], bool)
    whole = ~bounded | (back.max(axis=1) > -NEAREST)  # also of a part that is partly behind the camera
    low[whole], high[whole] = 0, (height, width)
    high[bounded & (back.min(axis=1) > -NEAREST)] = 0  # nothing of one that is all behind it
    low, high = (np.clip(np.rint(edge), 0, (height, width)) for edge in (low - 0.5, high + 0.5))
    return np.concatenate([low, np.maximum(high - low, 0)], axis=1).astype(int)


def _groups(world: World, chosen: np.ndarray, windows: np.ndarray) -> Iterator[tuple[Shape, np.ndarray]]:
    """Yield parts of one shape, as positions in ``chosen``, whose windows together have about ``AT_ONCE`` pixels."""
    areas = windows[:, 2] * windows[:, 3]
    shapes = np.array([world.parts[i].shape for i in chosen])
    for name, shape in SHAPES.items():
        members = np.flatnonzero((shapes == name) & (areas > 0))
        group = areas[members].cumsum() // AT_ONCE
        yield from ((shape, part) for part in np.split(members, np.flatnonzero(np.diff(group)) + 1) if len(part))


def _pixels(group: np.ndarray, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all pixels of the windows of a group: whose it is, its row and its column."""
    top, left, height, width = windows[group].T
    owner = np.repeat(np.arange(len(group)), height)  # of each row of a window
    row = np.arange(len(owner)) + (top - height.cumsum() + height)[owner]
    length = width[owner]
    line = np.repeat(np.arange(len(owner)), length)  # of each pixel
    column = np.arange(len(line)) + (left[owner] - length.cumsum() + length)[line]
    return group[owner][line], row[line], column


def surface(world: World, hits: Hits) -> tuple[np.ndarray, np.ndarray]:
    """Return at each pixel that shows a part the unit normal in camera coordinates, and the place on the part.

    Both are float32 ``(3, P)``. A place is that along the part's own axes, in metres from its centre.
    """
    axes = np.ascontiguousarray((world.axes @ hits.camera.axes.T).transpose(1, 2, 0), np.float32)
    centres = ((world.centres - hits.camera.eye) @ hits.camera.axes.T).T.astype(np.float32)
    sizes = world.sizes.T.astype(np.float32).take(hits.parts, axis=1)
    axes = axes.take(hits.parts, axis=2)
    place = (axes * (hits.points - centres.take(hits.parts, axis=1))).sum(axis=1)
    unit = place / sizes
    normal = np.empty_like(place)
    kinds = np.array([list(SHAPES).index(part.shape) for part in world.parts])[hits.parts]
    for kind, shape in enumerate(SHAPES.values()):
        here = np.flatnonzero(kinds == kind)
        normal[:, here] = shape.normal(unit.take(here, axis=1))
    normal /= sizes
    normal /= np.sqrt((normal * normal).sum(axis=0))
    return (axes * normal[:, None]).sum(axis=0), place * (1 - np.abs(normal))


def paint(world: World, hits: Hits, place: np.ndarray) -> np.ndarray:
    """Return the colour of the surface at each pixel that shows a part, float32 ``(3, P)``."""
    textures = [part.texture for part in world.parts]
    numbers = np.array([(t.period, t.phase, *t.colour, *t.other) for t in textures], np.float32).T.take(
        hits.parts, axis=1
    )
    at = place / numbers[0] + numbers[1]
    kinds = np.array([list(PATTERNS).index(t.pattern) for t in textures])[hits.parts]
    colour, other = numbers[2:5], numbers[5:8]
    for kind in np.unique(kinds):
        here = np.flatnonzero(kinds == kind)
        share = list(PATTERNS.values())[kind](at[:, here])
        colour[:, here] += share * (other[:, here] - colour[:, here])
    return colour


def shine(world: World, hits: Hits, normal: np.ndarray) -> np.ndarray:
    """Return how much light falls on the surface at each pixel that shows a part, float32 ``(3, P)``."""
    above = hits.camera.axes[:, 2].astype(np.float32) @ normal
    light = np.array(world.ambient, np.float32)[:, None] * (0.8 + 0.2 * above)
    for lamp in world.lights:
        way = (hits.camera.axes @ (np.array(lamp.view.eye) - hits.camera.eye)).astype(np.float32)[:, None] - hits.points
        squared = (way * way).sum(axis=0)
        facing = np.maximum((way * normal).sum(axis=0), 0) / np.sqrt(squared)
        facing *= (lit(world, hits, lamp) if lamp.shadows else 1) / (1 + squared / lamp.reach**2)
        light += np.array(lamp.colour, np.float32)[:, None] * facing
    glow = np.array([part.texture.glow for part in world.parts], np.float32)[hits.parts]
    return light + glow * (1 - light)


def lit(world: World, hits: Hits, lamp: Light) -> np.ndarray:
    """Return which of the pixels that show a part are not in the shadow of another, seen from a lamp."""
    side = max(96, min(hits.part.shape))
    throwing = [i for i, part in enumerate(world.parts) if part.shadow]
    if not throwing:
        return np.ones(len(hits.seen), bool)
    nearest = cast(world, lamp.view, side, side, only=throwing).depth
    turn = lamp.view.axes @ hits.camera.axes.T
    moved = lamp.view.axes @ (np.array(hits.camera.eye) - lamp.view.eye)
    x, y, back = turn.astype(np.float32) @ hits.points + moved.astype(np.float32)[:, None]
    depth = np.maximum(-back, NEAREST)
    scale = lamp.view.focal * side / depth
    column, row = np.floor(side / 2 + x * scale), np.floor(side / 2 - y * scale)
    shown = (back < 0) & (np.minimum(column, row) >= 0) & (np.maximum(column, row) < side)
    inside = (np.where(shown, row, 0).astype(int), np.where(shown, column, 0).astype(int))
    margin = 0.02 + 2 / scale  # two pixels of the lamp's picture: a slanted surface throws none on itself
    return ~shown | (depth < nearest[inside] + margin)


@dataclass(frozen=True)
class Rendering:
    """A picture with what it shows.

    Attributes:
        picture: float32 ``(3, H, W)``, red, green and blue; 1 is the colour of a surface in full light.
        part: see `Hits`.
        depth: see `Hits`.
        normals: unit vectors towards the camera, in its coordinates, float32 ``(3, H, W)``; zero where there is no
            part.
    """

    picture: np.ndarray
    part: np.ndarray
    depth: np.ndarray
    normals: np.ndarray


def render(world: World, camera: Camera, height: int, width: int) -> Rendering:
    """Return what a camera sees of a world.

    Example:
        >>> from flatmtl_bench.data.rendering.textures import Texture
        >>> ball = Part("ball", (1.0, 1.0, 1.0), (0.0, 5.0, 0.0), "objects", Texture((1.0, 0.0, 0.0)))
        >>> view = render(World([ball]), Camera(eye=(0.0, 0.0, 0.0)), 3, 3)
        >>> float(view.depth[1, 1]), view.normals[:, 1, 1].round(3).tolist(), view.part[0].tolist()
        (4.0, [0.0, 0.0, 1.0], [-1, -1, -1])
    """
    hits = cast(world, camera, height, width)
    normal, place = surface(world, hits)
    picture = _sky(world, camera, height, width)
    normals = np.zeros((3, height * width), np.float32)
    picture[:, hits.seen] = paint(world, hits, place) * shine(world, hits, normal)
    normals[:, hits.seen] = normal
    shape = (3, height, width)
    return Rendering(picture.reshape(shape), hits.part, hits.depth, normals.reshape(shape))


def _sky(world: World, camera: Camera, height: int, width: int) -> np.ndarray:
    """Return the colours of the sky, ``(3, H * W)``."""
    x, y = camera.rays(height, width)
    up = camera.axes[:, 2]
    steep = (up[0] * x + up[1] * y[:, None] - up[2]) / np.sqrt(x * x + (y * y + 1)[:, None])
    share = np.sqrt(np.clip(steep.ravel(), 0, 1)).astype(np.float32)
    horizon, zenith = np.array(world.sky, np.float32)[..., None]
    return horizon + share * (zenith - horizon)
