"""Rooms with furniture, and a place to look at them from."""

from collections.abc import Callable
from math import atan2, hypot, pi

from flatmtl_bench.data.rendering import furniture, materials
from flatmtl_bench.data.rendering.camera import Camera
from flatmtl_bench.data.rendering.caster import Light, World
from flatmtl_bench.data.rendering.draws import Draws
from flatmtl_bench.data.rendering.furniture import Piece
from flatmtl_bench.data.rendering.parts import Part, moved
from flatmtl_bench.data.rendering.textures import Texture

Make = Callable[[Draws], Piece]
Rectangle = tuple[float, float, float, float]
"""Least x, greatest x, least y, greatest y."""

AT_WALLS: dict[str, list[tuple[Make, float]]] = {
    "bedroom": [
        (furniture.bed, 1.0),
        (furniture.cupboard, 1.0),
        (furniture.cupboard, 0.9),
        (furniture.table, 0.4),
        (furniture.cupboard, 0.7),
        (furniture.shelf, 0.4),
    ],
    "living room": [
        (furniture.sofa, 1.0),
        (furniture.tv_stand, 0.6),
        (furniture.shelf, 0.8),
        (furniture.sofa, 0.5),
        (furniture.cupboard, 0.8),
        (furniture.table, 0.4),
    ],
    "study": [
        (furniture.table, 1.0),
        (furniture.shelf, 1.0),
        (furniture.cupboard, 0.9),
        (furniture.table, 0.4),
        (furniture.bed, 0.25),
        (furniture.sofa, 0.2),
        (furniture.shelf, 0.4),
    ],
    "dining room": [
        (furniture.cupboard, 1.0),
        (furniture.cupboard, 0.9),
        (furniture.tv_stand, 0.25),
        (furniture.shelf, 0.5),
        (furniture.sofa, 0.2),
    ],
    "kitchen": [(furniture.counter, 1.0), (furniture.counter, 0.8), (furniture.cupboard, 0.9), (furniture.table, 0.5)],
}
"""Kind of room -> what stands at its walls, and how likely it does."""

SMALL = [furniture.plant, furniture.lamp, furniture.clutter, furniture.clutter, furniture.clutter, furniture.chair]
ON_WALLS = [furniture.picture, furniture.picture, furniture.picture, furniture.picture, furniture.tv_on_wall]


class Room:
    """A room under construction: what is in it, and where there is still space.

    Its corners are (0, 0) and (width, length); the camera stands at its near side, y = 0, and looks ahead. Walls are
    numbered 0 to 3: the far one, the left, the right and the near one.
    """

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.width, self.length = draws.between(2.5, 4.6), draws.between(2.8, 5.2)
        self.height = draws.between(2.35, 3.0)
        self.parts: list[Part] = []
        self.taken: list[Rectangle] = []
        self.hung: dict[int, list[tuple[float, float]]] = {wall: [] for wall in range(4)}

    def shell(self) -> None:
        """Put up floor, ceiling and walls; the walls have one paper, or one of them has its own."""
        floor, ceiling = materials.flooring(self.draws), materials.wallpaper(self.draws)
        paper = materials.wallpaper(self.draws)
        own = materials.wallpaper(self.draws) if self.draws.chance(0.3) else paper
        white = Texture(materials.shade(materials.WHITE, self.draws.between(0.75, 1.05)))
        ceiling = white if self.draws.chance(0.8) else ceiling
        middle = (self.width / 2, self.length / 2)
        self.parts.append(_plane((*middle, 0.0), "floor", floor))
        self.parts.append(_plane((*middle, self.height), "ceiling", ceiling, tilt=pi))
        for wall in range(4):
            x, y, yaw = self.along(wall, 0.5)
            texture = own if wall == 0 else paper
            self.parts.append(_plane((x, y, self.height / 2), "wall", texture, tilt=-pi / 2, yaw=yaw))
        if self.draws.chance(0.7):
            self._skirting()

    def _skirting(self) -> None:
        texture, high = materials.wood(self.draws), self.draws.between(0.06, 0.14)
        for wall in range(4):
            x, y, yaw = self.along(wall, 0.5)
            half = max(self.width, self.length)
            board = furniture.block("wall", texture, (-half, half), (0, 0.015), (0, high))
            self.parts += moved([board], x, y, yaw=yaw)

    def along(self, wall: int, share: float) -> tuple[float, float, float]:
        """Return the place at a share of a wall, and the yaw of what faces the room there."""
        return [
            (share * self.width, self.length, pi),
            (0.0, share * self.length, -pi / 2),
            (self.width, share * self.length, pi / 2),
            (share * self.width, 0.0, 0.0),
        ][wall]

    def reserve(self, area: Rectangle) -> bool:
        """Take an area of the floor, if it is free and inside."""
        x0, x1, y0, y1 = area
        inside = x0 >= -0.01 and y0 >= -0.01 and x1 <= self.width + 0.01 and y1 <= self.length + 0.01
        free = all(x1 <= a or b <= x0 or y1 <= c or d <= y0 for a, b, c, d in self.taken)
        if inside and free:
            self.taken.append(area)
        return inside and free

    def stand_at_wall(self, piece: Piece) -> bool:
        """Put a piece with its back to a wall where there is space, if some is found; mostly in view."""
        for _ in range(12):
            wall = self.draws.one_of([0, 0, 0, 1, 1, 2, 2])
            span = self.width if wall in (0, 3) else self.length
            if piece.width > span:
                continue
            half = piece.width / 2 / span
            x, y, yaw = self.along(wall, self.draws.between(half, 1 - half))
            if self.reserve(_footprint(piece, x, y, wall)):
                self.parts += moved(piece.parts, x, y, yaw=yaw)
                if max(part.at[2] + part.size[2] for part in piece.parts) > 1.3:
                    at = x if wall in (0, 3) else y
                    self.hung[wall].append((at - piece.width / 2, at + piece.width / 2))
                return True
        return False

    def stand_free(self, piece: Piece, yaw: float) -> tuple[float, float] | None:
        """Put a piece anywhere on the floor, turned by a yaw; return the place of its middle, if there is one."""
        radius = 0.45 * hypot(piece.width, piece.depth)
        for _ in range(8):
            x, y = self.draws.between(0, self.width), self.draws.between(0, self.length)
            if self.reserve((x - radius, x + radius, y - radius, y + radius)):
                self.parts += moved(moved(piece.parts, 0, -piece.depth / 2), x, y, yaw=yaw)
                return x, y
        return None

    def hang(self, piece: Piece, height: float) -> None:
        """Put a piece on a wall at a height, where nothing hangs or stands that high, if such a place is found."""
        for _ in range(6):
            wall = self.draws.one_of([0, 0, 1, 2])
            span = self.width if wall in (0, 3) else self.length
            if piece.width > span:
                continue
            half = piece.width / 2
            at = self.draws.between(half, span - half)
            if all(at + half <= low or high <= at - half for low, high in self.hung[wall]):
                x, y, yaw = self.along(wall, at / span)
                self.hung[wall].append((at - half, at + half))
                flat = [part._replace(shadow=False) for part in piece.parts]
                self.parts += moved(flat, x, y, height, yaw)
                return


def _plane(at: tuple[float, float, float], label: str, texture: Texture, tilt: float = 0.0, yaw: float = 0.0) -> Part:
    return Part("plane", (1.0, 1.0, 1.0), at, label, texture, yaw, tilt, shadow=False)


def _footprint(piece: Piece, x: float, y: float, wall: int) -> Rectangle:
    """Return the floor that a piece takes with its back to a wall."""
    half, depth = piece.width / 2, piece.depth
    return [
        (x - half, x + half, y - depth, y),
        (x, x + depth, y - half, y + half),
        (x - depth, x, y - half, y + half),
        (x - half, x + half, y, y + depth),
    ][wall]


def room(draws: Draws) -> tuple[World, Camera]:
    """Return a furnished room, and a camera in it.

    Example:
        >>> world, camera = room(Draws(0))
        >>> {"ceiling", "floor", "wall"} <= {part.label for part in world.parts}
        True
    """
    here = Room(draws)
    here.shell()
    camera = _camera(here)
    x, y, _ = camera.eye
    here.taken.append((x - 0.6, x + 0.6, 0.0, y + 0.7))
    kind = draws.one_of(list(AT_WALLS))
    for make, probability in AT_WALLS[kind]:
        if draws.chance(probability):
            here.stand_at_wall(make(draws))
    if draws.chance(0.95 if kind == "dining room" else 0.5):
        _table_with_chairs(here)
    for make in (furniture.window, furniture.window, furniture.door):
        if draws.chance(0.75):
            here.hang(make(draws), 0.0 if make is furniture.door else draws.between(1.4, 1.6))
    for _ in range(draws.count(1, 6)):
        here.hang(draws.one_of(ON_WALLS)(draws), draws.between(1.45, 1.8))
    for _ in range(draws.count(3, 8)):
        here.stand_at_wall(draws.one_of(SMALL)(draws))
    if draws.chance(0.35):
        rug = furniture.rug(draws)
        here.parts += moved(rug.parts, here.width / 2, here.length * draws.between(0.3, 0.5), yaw=draws.around(0.3))
    return World(here.parts, _lights(here), _tint(draws, draws.between(0.35, 0.6))), camera


def _camera(here: Room) -> Camera:
    """Return a camera near the near wall that looks at the middle of the far half."""
    draws = here.draws
    x, y, z = here.width * draws.between(0.2, 0.8), draws.between(0.15, 0.6), draws.between(1.15, 1.7)
    to_x, to_y = here.width * draws.between(0.2, 0.8), here.length * draws.between(0.6, 1.0)
    to_z = draws.between(0.5, 1.4)
    yaw = atan2(x - to_x, to_y - y)
    pitch = atan2(to_z - z, hypot(to_x - x, to_y - y))
    return Camera((x, y, z), yaw, pitch, draws.around(0.04), draws.between(0.77, 0.86))


def _table_with_chairs(here: Room) -> None:
    """Put a table somewhere and chairs around it that face it."""
    draws, yaw = here.draws, here.draws.around(0.5)
    piece = furniture.table(draws)
    place = here.stand_free(piece, yaw)
    if place is None:
        return
    seat = furniture.chair(draws)
    gap = piece.depth / 2 + seat.depth - draws.between(0.05, 0.3)
    for turn, out in ((0.0, gap), (pi, gap), (pi / 2, gap - piece.depth / 2 + piece.width / 2)):
        if draws.chance(0.75):
            around = moved(seat.parts, draws.around(0.1), -out, yaw=draws.around(0.2))
            here.parts += moved(around, *place, yaw=yaw + turn)


def _lights(here: Room) -> list[Light]:
    """Return a lamp below the ceiling, and mostly a second one, which throws no shadows."""
    draws, lamps = here.draws, []
    for power in (draws.between(0.4, 0.8), draws.one_of([0.0, draws.between(0.2, 0.5)])):
        if power:
            eye = (draws.between(0.2, 0.8) * here.width, draws.between(0.2, 0.8) * here.length, here.height - 0.15)
            lamps.append(
                Light(Camera(eye, pitch=-pi / 2, focal=0.3), _tint(draws, power), draws.between(2.5, 5), not lamps)
            )
    return lamps


def _tint(draws: Draws, level: float) -> tuple[float, float, float]:
    """Return light of a brightness, from bluish to yellowish."""
    warm = draws.around(0.12)
    return level * (1 + warm), level, level * (1 - warm)
