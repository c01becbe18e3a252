"""Streets with houses and traffic, seen from a car."""

from math import cos, pi, sin

import numpy as np

from flatmtl_bench.data.rendering import materials, traffic
from flatmtl_bench.data.rendering.camera import Camera
from flatmtl_bench.data.rendering.caster import Light, World
from flatmtl_bench.data.rendering.draws import Draws
from flatmtl_bench.data.rendering.furniture import block
from flatmtl_bench.data.rendering.parts import Part, moved
from flatmtl_bench.data.rendering.textures import Texture

FAR = 110.0  # metres to the end of what is built


class Street:
    """A street under construction; it runs along y, the camera's car drives on the right.

    Attributes:
        parts: what is there.
        edges: x of the left and the right edge of the road.
        pavement: width of the pavement on both sides.
    """

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.parts: list[Part] = []
        self.edges = (-draws.between(4.5, 8.5), draws.between(2.2, 4.5))
        self.pavement = draws.between(1.8, 4.5)

    def ground(self) -> None:
        """Lay the road with its markings, the pavements, and perhaps grass behind them."""
        draws = self.draws
        level = draws.between(0.25, 0.5)
        grey = (level, level, level * draws.between(0.95, 1.08))
        asphalt = Texture(grey, materials.shade(grey, 0.85), "clouds", 2.5, draws.between(0, 9))
        self.parts.append(Part("plane", (1, 1, 1), (0, 0, 0), "flat", asphalt, shadow=False))
        white = materials.shade(materials.WHITE, draws.between(0.8, 1.0))
        dashes = Texture(white, grey, draws.one_of(["stripes", "plain"]), draws.between(5, 10), draws.between(0, 1))
        for x in ((self.edges[0] + self.edges[1]) / 2, *(edge * 0.93 for edge in self.edges if draws.chance(0.4))):
            line = Part("box", (FAR / 2, 0.07, 0.004), (0, 0, 0), "flat", dashes, shadow=False)
            self.parts += moved([line], x, FAR / 2 - 5, yaw=pi / 2)
        paving = materials.flooring(draws)
        for side, edge in zip((-1, 1), self.edges, strict=True):
            outer = edge + side * self.pavement
            self._strip("flat", paving, edge, outer, 0.13)
            if draws.chance(0.4):
                self._strip("nature", materials.foliage(draws), outer, outer + side * 30, 0.16)

    def _strip(self, label: str, texture: Texture, x: float, other: float, height: float) -> None:
        """Lay a strip along the whole street between two x."""
        strip = block(label, texture, (min(x, other), max(x, other)), (-5, FAR), (0, height))
        self.parts.append(strip)

    def front(self, side: int) -> None:
        """Line one side, -1 the left or 1 the right, with houses, walls and gardens."""
        draws, y = self.draws, -6.0
        line = self.edges[side > 0] + side * (self.pavement + draws.one_of([0.0, 0.5, 3.0]))
        density = draws.between(0.5, 0.95)
        while y < FAR:
            width = draws.between(5, 18)
            if draws.chance(density):
                depth = draws.between(6, 10)
                self.parts += moved(traffic.house(draws, width, depth), line + side * depth / 2, y + width / 2)
            else:
                if draws.chance(0.6):
                    self.parts += moved(traffic.wall(draws, width), line, y + width / 2)
                for _ in range(draws.count(1, 3)):
                    place = line + side * draws.between(2, 7), y + draws.between(0, width)
                    self.parts += moved(traffic.tree(draws), *place)
            y += width + draws.one_of([0.0, 0.0, 2.5])

    def close(self) -> None:
        """Put houses or trees across the far end."""
        draws, y = self.draws, self.draws.between(45, FAR)
        if draws.chance(0.5):
            self.parts += moved(traffic.house(draws, draws.between(20, 60), 8), draws.around(5), y, yaw=pi / 2)
        for _ in range(draws.count(0, 8)):
            self.parts += moved(traffic.tree(draws), draws.around(25), y - draws.between(5, 10))

    def along_pavements(self) -> None:
        """Put trees, posts, signs and people on the pavements."""
        draws = self.draws
        for side, edge in zip((-1, 1), self.edges, strict=True):
            row = draws.one_of([traffic.tree, traffic.lamp_post])
            start, gap = draws.between(3, 12), draws.between(8, 20)
            for i in range(draws.one_of([0, 5, 5])):
                self.parts += moved(row(draws), edge + side * 0.6, start + i * gap, yaw=pi * (side < 0))
            for _ in range(draws.count(1, 4)):
                make = draws.one_of([traffic.sign, traffic.sign, traffic.traffic_light, traffic.hedge])
                place = edge + side * draws.between(0.3, 0.8), draws.between(5, 40)
                self.parts += moved(make(draws), *place, yaw=draws.around(0.2))
            for _ in range(draws.count(0, 4)):
                place = edge + side * draws.between(0.5, self.pavement), draws.between(4, 30)
                self.parts += moved(traffic.person(draws), *place, 0.13, draws.between(0, 2 * pi))

    def on_the_road(self) -> None:
        """Park cars at the edges, let some drive, and let people cross."""
        draws, (left, right) = self.draws, self.edges
        for side, edge in ((-1, left), (1, right)):
            if draws.chance(0.65):
                y = draws.between(3.5, 12)
                for _ in range(draws.count(1, 6)):
                    self.parts += moved(traffic.car(draws), edge - side * 1.0, y, yaw=pi * (side < 0))
                    y += draws.between(5.2, 9)
        for lane, yaw in ((0.0, 0.0), (left * 0.45, pi)):
            if draws.chance(0.65):
                make = draws.one_of([traffic.car, traffic.car, traffic.lorry, traffic.bicycle])
                self.parts += moved(make(draws), lane + draws.around(0.4), draws.between(8, 40), yaw=yaw)
        if draws.chance(0.25):
            self.parts += moved(traffic.person(draws), draws.between(left, right), draws.between(8, 25), yaw=pi / 2)


def street(draws: Draws) -> tuple[World, Camera]:
    """Return a street, and a camera in a car, whose bonnet is at the lower border of a picture twice as wide as high.

    Example:
        >>> world, camera = street(Draws(0))
        >>> sorted({str(part.label) for part in world.parts})
        ['None', 'construction', 'flat', 'human', 'nature', 'object', 'vehicle']
    """
    here = Street(draws)
    here.ground()
    here.front(-1)
    here.front(1)
    if draws.chance(0.6):
        here.close()
    here.along_pavements()
    here.on_the_road()
    camera = Camera(
        (draws.around(0.3), 0.0, draws.between(1.2, 1.5)),
        yaw=draws.around(0.12),
        pitch=draws.between(-0.07, 0.03),
        roll=draws.around(0.02),
        focal=draws.between(0.85, 1.15),
    )
    here.parts.append(_bonnet(camera, draws))
    return _weather(draws, here.parts), camera


def _weather(draws: Draws, parts: list[Part]) -> World:
    """Return the world on a grey day, or with a sun in a blue sky."""
    grey, blue = draws.chance(0.4), draws.between(0.0, 0.2)
    level = draws.between(0.7, 1.0) if grey else draws.between(0.35, 0.55)
    ambient = (level * (1 - blue), level, level * (1 + blue))
    sky = [(0.93, 0.94, 0.95), (0.8, 0.82, 0.85)] if grey else [(0.85, 0.9, 0.95), (0.3, 0.5, 0.85)]
    horizon, zenith = (materials.shade(colour, draws.between(0.8, 1.05)) for colour in sky)
    return World(parts, [] if grey else [_sun(draws)], ambient, (horizon, zenith))


def _bonnet(camera: Camera, draws: Draws) -> Part:
    """Return the bonnet of the car, which belongs to no class."""
    paint = Texture(materials.colour(draws, (0.0, 0.3), (0.05, 0.5)))
    down, ahead = 0.5 / camera.focal * 1.5 * draws.between(0.52, 0.6), 1.5
    x, y, z = np.array(camera.eye) + np.array([0.0, -down - 0.12, -ahead]) @ camera.axes
    return Part("ball", (0.95, 0.5, 0.2), (x, y, z), None, paint, yaw=camera.yaw, shadow=False)


def _sun(draws: Draws) -> Light:
    """Return the sun: so far away that its rays are nearly parallel, with a picture of the first 70 m of street."""
    yaw, high, far, radius = draws.between(0, 2 * pi), draws.between(0.45, 1.2), 150.0, 38.0
    eye = (far * cos(high) * sin(yaw), 18 - far * cos(high) * cos(yaw), far * sin(high))
    warm = draws.between(0.0, 0.15)
    level = draws.between(0.6, 1.0)
    view = Camera(eye, yaw, -high, focal=0.5 * far / radius)
    return Light(view, (level * (1 + warm), level, level * (1 - warm)))
