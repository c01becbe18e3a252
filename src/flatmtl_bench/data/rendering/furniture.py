"""What stands in rooms, made of simple shapes.

Each function returns a `Piece` whose parts are placed as if the piece stood with its back to the plane y = 0, in the
middle of x, and faced y; what hangs on a wall does so as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import pi

from flatmtl_bench.data.rendering import materials
from flatmtl_bench.data.rendering.draws import Draws
from flatmtl_bench.data.rendering.parts import Part, moved
from flatmtl_bench.data.rendering.textures import Texture


@dataclass(frozen=True)
class Piece:
    """A thing of several parts.

    Attributes:
        parts: of it and of what lies on it.
        width: its extent in x.
        depth: its extent in y.
    """

    parts: list[Part]
    width: float
    depth: float


def block(
    label: str | None, texture: Texture, x: tuple[float, float], y: tuple[float, float], z: tuple[float, float]
) -> Part:
    """Return a box between two x, two y and two z."""
    spans = (x, y, z)
    dx, dy, dz = ((high - low) / 2 for low, high in spans)
    mx, my, mz = ((high + low) / 2 for low, high in spans)
    return Part("box", (dx, dy, dz), (mx, my, mz), label, texture)


def pole(label: str | None, texture: Texture, x: float, y: float, z: tuple[float, float], radius: float) -> Part:
    """Return an upright cylinder between two z."""
    low, high = z
    return Part("cylinder", (radius, radius, (high - low) / 2), (x, y, (low + high) / 2), label, texture)


def _legs(label: str, texture: Texture, width: float, depth: float, height: float) -> Iterator[Part]:
    """Yield four legs at the corners of a width and a depth from the wall."""
    for x in (0.05 - width / 2, width / 2 - 0.05):
        for y in (0.05, depth - 0.05):
            yield pole(label, texture, x, y, (0, height), 0.025)


def bed(draws: Draws) -> Piece:
    """Return a bed with its head at the wall, a cover over a part of it, and pillows."""
    width, length, height = draws.between(0.95, 1.9), draws.between(1.9, 2.15), draws.between(0.4, 0.65)
    frame, sheet, half = materials.wood(draws), materials.cloth(draws), width / 2
    parts = [
        block("bed", frame, (-half, half), (0, length), (0.1, height - 0.2)),
        block("bed", sheet, (0.02 - half, half - 0.02), (0.05, length - 0.02), (height - 0.2, height)),
        block("bed", frame, (-half, half), (0, 0.06), (0, height + draws.between(0.1, 0.6))),
    ]
    if draws.chance(0.7):
        start, drop = draws.between(0.5, 1.2), draws.between(0.1, 0.35)
        over = (-0.02 - half, half + 0.02), (start, length + 0.02), (height - drop, height + 0.03)
        parts.append(block("bed", materials.cloth(draws), *over))
    cover = materials.cloth(draws)
    pillows = 1 if width < 1.3 else 2
    for x in [width * ((i + 0.5) / pillows - 0.5) for i in range(pillows)]:
        label = "objects" if draws.chance(0.5) else "bed"
        parts.append(Part("ball", (0.3, 0.19, 0.1), (x, 0.3, height + 0.06), label, cover))
    return Piece(parts, width, length)


def sofa(draws: Draws) -> Piece:
    """Return a sofa or an armchair with arms and cushions."""
    width, depth, seat = draws.one_of([0.9, 1.5, 1.9, 2.2]), draws.between(0.8, 1.0), draws.between(0.38, 0.48)
    back, arm = seat + draws.between(0.3, 0.5), seat + draws.between(0.1, 0.25)
    cover, half, thick = materials.cloth(draws), width / 2, draws.between(0.12, 0.22)
    parts = [
        block("sofa", cover, (-half, half), (0.05, depth), (0.08, seat - 0.12)),
        block("sofa", cover, (-half, half), (0, 0.25), (0.08, back)),
        block("sofa", cover, (-half, thick - half), (0, depth), (0.05, arm)),
        block("sofa", cover, (half - thick, half), (0, depth), (0.05, arm)),
    ]
    places = max(1, round((width - 2 * thick) / 0.6))
    each = (width - 2 * thick) / places
    for left in [thick - half + i * each for i in range(places)]:
        parts.append(block("sofa", cover, (left + 0.01, left + each - 0.01), (0.2, depth + 0.02), (seat - 0.12, seat)))
    for _ in range(draws.count(0, 2)):
        place = (draws.around(half - thick - 0.2), 0.36, seat + 0.16)
        parts.append(Part("ball", (0.2, 0.2, 0.09), place, "objects", materials.cloth(draws), tilt=-1.2))
    return Piece(parts, width, depth)


def chair(draws: Draws) -> Piece:
    """Return a chair on four legs, or one on a single foot."""
    width, depth, seat = draws.between(0.4, 0.55), draws.between(0.4, 0.55), draws.between(0.42, 0.5)
    frame, half, top = materials.wood(draws), width / 2, seat + draws.between(0.35, 0.6)
    cover = materials.cloth(draws) if draws.chance(0.6) else frame
    parts = [
        block("chair", cover, (-half, half), (0, depth), (seat - 0.06, seat)),
        block("chair", cover, (-half, half), (0, 0.05), (seat + draws.between(0.05, 0.25), top)),
    ]
    if draws.chance(0.7):
        parts += _legs("chair", frame, width, depth, seat - 0.05)
        parts += [pole("chair", frame, x, 0.025, (seat, top), 0.02) for x in (0.03 - half, half - 0.03)]
    else:
        steel = materials.metal(draws)
        parts += [pole("chair", steel, 0, depth / 2, z, r) for z, r in (((0.05, seat), 0.03), ((0.02, 0.07), 0.25))]
        parts.append(block("chair", steel, (-0.04, 0.04), (-0.02, 0.02), (seat - 0.05, top - 0.1)))
    return Piece(parts, width, depth)


def table(draws: Draws) -> Piece:
    """Return a table or a low one, with things on it."""
    low = draws.chance(0.35)
    height = draws.between(0.35, 0.5) if low else draws.between(0.7, 0.8)
    width, depth = draws.between(0.8, 1.8), draws.between(0.55, 0.95)
    top, half = materials.wood(draws), width / 2
    if draws.chance(0.25):
        width = depth = draws.between(0.7, 1.2)
        parts = [pole("table", top, 0, depth / 2, (height - 0.04, height), depth / 2)]
        parts += [pole("table", top, 0, depth / 2, z, r) for z, r in (((0.03, height), 0.05), ((0, 0.04), depth / 4))]
    else:
        parts = [block("table", top, (-half, half), (0, depth), (height - 0.05, height))]
        parts += _legs("table", materials.metal(draws) if draws.chance(0.3) else top, width, depth, height - 0.04)
    parts += _things_on(draws, (0.3 * width, 0.3 * depth), depth / 2, height, draws.count(1, 6), scale=1.3)
    return Piece(parts, width, depth)


def cupboard(draws: Draws) -> Piece:
    """Return a wardrobe, a chest of drawers or a night table, with handles and gaps, and things on it if it is low."""
    width, depth, height = draws.one_of(
        [
            (draws.between(0.9, 2.2), 0.6, draws.between(1.8, 2.3)),
            (draws.between(0.7, 1.6), 0.5, draws.between(0.7, 1.2)),
            (draws.between(0.4, 0.6), 0.42, draws.between(0.4, 0.65)),
        ]
    )
    body, front, knob = materials.wood(draws), materials.wood(draws), materials.metal(draws)
    front = body if draws.chance(0.6) else front
    half = width / 2
    parts = [block("furniture", body, (-half, half), (0, depth), (0, height))]
    columns, rows = max(1, round(width / 0.55)), 1 if height > 1.4 else max(1, round(height / 0.28))
    w, h = width / columns, height / rows
    for column in range(columns):
        for row in range(rows):
            x, z = (column * w - half, column * w + w - half), (row * h, row * h + h)
            door = (x[0] + 0.02, x[1] - 0.02), (depth, depth + 0.02), (z[0] + 0.03, z[1] - 0.03)
            parts.append(block("furniture", front, *door)._replace(shadow=False))
            place = ((x[0] + x[1]) / 2, depth + 0.03, (z[0] + z[1]) / 2)
            parts.append(Part("box", (0.05, 0.012, 0.012), place, "furniture", knob, shadow=False))
    if height < 1.3:
        parts += _things_on(draws, (0.35 * width, 0.3 * depth), depth / 2, height, draws.count(1, 4), scale=1.4)
    return Piece(parts, width, depth + 0.02)


def counter(draws: Draws) -> Piece:
    """Return a kitchen counter with things on it, and mostly cabinets above it."""
    width, knob = draws.between(1.2, 2.6), materials.metal(draws)
    body, top, half = materials.wood(draws), materials.painted(draws), width / 2
    columns = round(width / 0.55)
    edges = [width * i / columns - half for i in range(columns)]
    parts = [
        block("furniture", body, (-half, half), (0, 0.58), (0.08, 0.88)),
        block("furniture", top, (-half, half), (0, 0.62), (0.88, 0.92)),
    ]
    rows = [(0.58, (0.12, 0.85))]
    if draws.chance(0.7):
        parts.append(block("furniture", body, (-half, half), (0, 0.33), (1.45, 2.1)))
        rows.append((0.33, (1.47, 2.08)))
    for depth, (low, high) in rows:
        for x in edges:
            door = (x + 0.02, x + width / columns - 0.02), (depth, depth + 0.015), (low, high)
            parts.append(block("furniture", body, *door)._replace(shadow=False))
            place = (x + width / columns / 2, depth + 0.03, high - 0.08)
            parts.append(Part("box", (0.06, 0.012, 0.012), place, "furniture", knob, shadow=False))
    parts += _things_on(draws, (half - 0.2, 0.1), 0.3, 0.92, draws.count(2, 6), 0.45, 1.3)
    return Piece(parts, width, 0.62)


def shelf(draws: Draws) -> Piece:
    """Return a bookcase with rows of books and other things."""
    width, depth, height = draws.between(0.7, 1.6), draws.between(0.28, 0.4), draws.between(1.0, 2.1)
    wood, half = materials.wood(draws), width / 2
    boards = max(2, round(height / 0.38))
    gap = (height - 0.03) / boards
    parts = [
        block("furniture", wood, (-half, 0.03 - half), (0, depth), (0, height)),
        block("furniture", wood, (half - 0.03, half), (0, depth), (0, height)),
        block("furniture", wood, (-half, half), (0, 0.02), (0, height)),
    ]
    for board in range(boards + 1):
        z = board * gap
        parts.append(block("furniture", wood, (-half, half), (0, depth), (z, z + 0.03)))
        if board < boards and draws.chance(0.75):
            parts += _books_in_a_row(draws, (0.04 - half, half - 0.04), depth, z + 0.03, gap - 0.08)
        elif board < boards:
            parts += _things_on(draws, (half - 0.2, 0.05), depth / 2, z + 0.03, draws.count(0, 2), gap - 0.06)
    return Piece(parts, width, depth)


def _books_in_a_row(draws: Draws, x: tuple[float, float], depth: float, z: float, height: float) -> Iterator[Part]:
    """Yield upright books of a few heights between two x."""
    left = x[0]
    while left < x[1] - 0.1:
        right = min(left + draws.between(0.15, 0.6), x[1])
        up = height * draws.between(0.65, 1)
        yield block(
            "books", materials.covers(draws), (left, right), (0.04, depth * draws.between(0.7, 0.95)), (z, z + up)
        )
        left = right + draws.one_of([0.0, 0.0, 0.15])


def tv_stand(draws: Draws) -> Piece:
    """Return a low cupboard with a television on it."""
    width, height = draws.between(1.0, 1.8), draws.between(0.4, 0.7)
    half, screen = width / 2, draws.between(0.4, 0.65)
    parts = [block("furniture", materials.wood(draws), (-half, half), (0, 0.45), (0, height))]
    parts += moved(_screen(draws, screen), 0, 0.15, height + 0.06 + screen * 0.56)
    parts.append(block("tv", Texture(materials.BLACK), (-0.2, 0.2), (0.1, 0.3), (height, height + 0.08)))
    parts += _things_on(draws, (half - 0.1, 0.02), 0.38, height, draws.count(0, 2), 0.2)
    return Piece(parts, width, 0.45)


def _screen(draws: Draws, half: float) -> list[Part]:
    """Return a television around the origin, switched on or off, of half a width."""
    frame = Texture(materials.shade(materials.WHITE, draws.one_of([0.05, 0.1, 0.4])))
    shown = materials.image(draws, glow=0.8) if draws.chance(0.4) else Texture(materials.BLACK, glow=0.3)
    tall = half * 0.56
    return [
        block("tv", frame, (-half, half), (0, 0.05), (-tall, tall)),
        block("tv", shown, (0.03 - half, half - 0.03), (0.04, 0.055), (0.03 - tall, tall - 0.03)),
    ]


def tv_on_wall(draws: Draws) -> Piece:
    """Return a television that hangs, around z = 0."""
    half = draws.between(0.45, 0.75)
    return Piece(_screen(draws, half), 2 * half, 0.06)


def picture(draws: Draws) -> Piece:
    """Return a picture in a frame, around z = 0."""
    half, tall, rim = draws.between(0.15, 0.6), draws.between(0.15, 0.5), draws.between(0.02, 0.06)
    parts = [
        block("picture", materials.wood(draws), (-half, half), (0, 0.03), (-tall, tall)),
        block("picture", materials.image(draws), (rim - half, half - rim), (0.01, 0.034), (rim - tall, tall - rim)),
    ]
    return Piece(parts, 2 * half, 0.04)


def window(draws: Draws) -> Piece:
    """Return a window with bars, bright or dark outside, and mostly curtains or blinds, around z = 0."""
    half, tall, frame = draws.between(0.45, 1.1), draws.between(0.5, 0.75), materials.painted(draws)
    day = draws.chance(0.75)
    level = draws.between(0.75, 1.0) if day else draws.between(0.03, 0.2)
    sky, ground = (level * 0.9, level * 0.96, level), materials.shade(materials.foliage(draws).colour, level)
    outside = Texture(
        sky, ground, draws.one_of(["clouds", "clouds", "plain"]), draws.between(0.6, 1.5), draws.between(0, 9), 0.9
    )
    parts = [block("window", outside, (-half, half), (0, 0.01), (-tall, tall))]
    bars = max(1, round(half / 0.4))
    edges = [half * (2 * i / bars - 1) for i in range(bars + 1)]
    parts += [block("window", frame, (x - 0.03, x + 0.03), (0, 0.05), (-tall, tall)) for x in edges]
    for z in (-tall, tall * draws.one_of([0.0, 0.3]), tall):
        parts.append(block("window", frame, (-half - 0.03, half + 0.03), (0, 0.05), (z - 0.03, z + 0.03)))
    kind = draws.between(0, 1)
    if kind < 0.45:
        cloth, wide = materials.cloth(draws), draws.between(0.2, 0.5)
        low = -tall - draws.one_of([0.05, 0.6])
        for x in ((-half - 0.15, wide - half), (half - wide, half + 0.15)):
            parts.append(block("window", cloth, x, (0.06, 0.12), (low, tall + 0.1)))
    elif kind < 0.6:
        slats = Texture(materials.painted(draws).colour, materials.shade(sky, 0.8), "grain", 0.12)
        parts.append(
            block("window", slats, (-half, half), (0.05, 0.07), (tall - 2 * tall * draws.between(0.3, 1), tall))
        )
    return Piece(parts, 2 * half + 0.3, 0.12)


def door(draws: Draws) -> Piece:
    """Return a door, which NYUv2 counts to the wall, from z = 0."""
    leaf, half = materials.wood(draws), draws.between(0.38, 0.48)
    parts = [
        block("wall", materials.painted(draws), (-half - 0.08, half + 0.08), (0, 0.03), (0, 2.12)),
        block("wall", leaf, (-half, half), (0, 0.045), (0, 2.03)),
        Part("ball", (0.035, 0.035, 0.035), (half - 0.08, 0.08, 1.0), "wall", materials.metal(draws)),
    ]
    return Piece(parts, 2 * half + 0.16, 0.05)


def rug(draws: Draws) -> Piece:
    """Return a rug, which NYUv2 counts to the floor."""
    width, depth = draws.between(1.2, 2.4), draws.between(1.0, 1.8)
    part = block("floor", materials.cloth(draws), (-width / 2, width / 2), (0, depth), (0, 0.012))
    return Piece([part], width, depth)


def plant(draws: Draws) -> Piece:
    """Return a plant in a pot."""
    radius, height = draws.between(0.12, 0.2), draws.between(0.2, 0.4)
    crown, leaves = draws.between(0.2, 0.4), materials.foliage(draws)
    centre = height + crown * draws.between(0.9, 1.6)
    parts = [
        pole("objects", materials.painted(draws), 0, 0.4, (0, height), radius),
        pole("objects", materials.wood(draws), 0, 0.4, (height, centre), 0.025),
        Part(
            "ball", (crown, crown, crown * draws.between(0.8, 1.5)), (0, 0.4, centre + crown * 0.3), "objects", leaves
        ),
    ]
    return Piece(parts, 0.8, 0.8)


def lamp(draws: Draws) -> Piece:
    """Return a lamp on a pole."""
    height, steel = draws.between(1.2, 1.8), materials.metal(draws)
    shade = Texture(materials.colour(draws, (0.0, 0.4), (0.8, 1.0)), glow=draws.one_of([0.0, 0.9]))
    parts = [
        pole("objects", steel, 0, 0.25, (0, 0.03), 0.15),
        pole("objects", steel, 0, 0.25, (0, height), 0.015),
        pole("objects", shade, 0, 0.25, (height - 0.3, height), draws.between(0.14, 0.24)),
    ]
    return Piece(parts, 0.5, 0.5)


def clutter(draws: Draws) -> Piece:
    """Return boxes, bins, bags and balls on the floor."""
    width, depth, scale = draws.between(0.4, 0.9), draws.between(0.4, 0.6), draws.between(1.5, 3.5)
    spread = (width / 2 - 0.15, depth / 2 - 0.15)
    return Piece(list(_things_on(draws, spread, depth / 2, 0, draws.count(1, 3), 0.8, scale)), width, depth)


def _things_on(
    draws: Draws, spread: tuple[float, float], y: float, z: float, count: int, tallest: float = 0.35, scale: float = 1.0
) -> Iterator[Part]:
    """Yield things that stand at random places around ``(0, y, z)``."""
    for _ in range(count):
        place = draws.around(spread[0]), y + draws.around(spread[1])
        yield from moved(_thing(draws, tallest, scale), *place, z, draws.around(pi))


def _thing(draws: Draws, tallest: float, scale: float) -> list[Part]:
    """Return a vessel, a box, a ball, a stack of books, a bowl with fruit or a small lamp, standing on the origin."""
    texture, radius = materials.anything(draws), scale * draws.between(0.035, 0.1)
    kind, height = draws.between(0, 1), min(tallest, scale * draws.between(0.08, 0.35))
    if kind < 0.3:
        neck = pole("objects", texture, 0, 0, (0, height), radius * 0.45)
        return [pole("objects", texture, 0, 0, (0, height * 0.7), radius), neck]
    if kind < 0.55:
        long, deep = radius * draws.between(1, 2.5), radius * draws.between(1, 2)
        return [block("objects", texture, (-long, long), (-deep, deep), (0, height))]
    if kind < 0.7:
        return [Part("ball", (radius, radius, radius), (0, 0, radius), "objects", texture)]
    if kind < 0.85:
        return _stack_of_books(draws, tallest)
    if tallest < 0.3:
        return [pole("objects", texture, 0, 0, (0, 0.06), radius * 1.4)]
    shade = Texture(materials.colour(draws, (0.0, 0.4), (0.8, 1.0)), glow=draws.one_of([0.0, 0.9]))
    return [pole("objects", texture, 0, 0, (0, 0.2), 0.025), pole("objects", shade, 0, 0, (0.18, 0.35), 0.11)]


def _stack_of_books(draws: Draws, tallest: float) -> list[Part]:
    """Return a few books that lie on each other."""
    parts, z = [], 0.0
    for _ in range(draws.count(1, 6)):
        thick = draws.between(0.015, 0.045)
        if z + thick > tallest:
            break
        w, d = draws.between(0.08, 0.12), draws.between(0.11, 0.15)
        cover = Texture(materials.colour(draws, (0.1, 0.9), (0.15, 0.95)))
        book = block("books", cover, (-w, w), (-d, d), (z, z + thick))
        parts += moved([book], 0, 0, yaw=draws.around(0.3))
        z += thick
    return parts
