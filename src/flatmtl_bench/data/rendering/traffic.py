"""What stands and moves in streets, made of simple shapes.

Each function returns parts that stand on z = 0 around x = y = 0; what has a front faces y.
"""

from collections.abc import Iterator
from math import pi

from flatmtl_bench.data.rendering import materials
from flatmtl_bench.data.rendering.draws import Draws
from flatmtl_bench.data.rendering.furniture import block, pole
from flatmtl_bench.data.rendering.parts import Part
from flatmtl_bench.data.rendering.textures import Texture

GLASS = Texture((0.08, 0.1, 0.13), glow=0.15)
RUBBER = Texture((0.04, 0.04, 0.04))


def _wheels(track: float, axles: tuple[float, ...], radius: float) -> Iterator[Part]:
    """Yield wheels on both sides of axles at some y."""
    for y in axles:
        for x in (-track, track):
            yield Part("cylinder", (radius, radius, 0.11), (x, y, radius), "vehicle", RUBBER, yaw=pi / 2, tilt=pi / 2)


def car(draws: Draws) -> list[Part]:
    """Return a car, a hatchback or a delivery van."""
    paint = Texture(materials.colour(draws, draws.one_of([(0.0, 0.1), (0.5, 0.95)]), (0.05, 0.95)))
    half, long, low = draws.between(0.82, 0.95), draws.between(1.9, 2.4), draws.between(0.75, 0.95)
    top = low + draws.one_of([0.55, 0.6, 0.9])
    back, front = 0.1 - long, long * draws.between(0.3, 0.5)
    lamps = Texture(draws.one_of([(0.9, 0.1, 0.08), (0.5, 0.05, 0.05)]), glow=0.4)
    return [
        block("vehicle", paint, (-half, half), (-long, long), (0.25, low)),
        block("vehicle", GLASS, (0.06 - half, half - 0.06), (back, front), (low, top - 0.08)),
        block("vehicle", paint, (0.1 - half, half - 0.1), (back + 0.1, front - 0.3), (top - 0.08, top)),
        *[block("vehicle", lamps, (x - 0.12, x + 0.12), (-long - 0.02, 0.1 - long), (0.6, 0.72)) for x in (-0.6, 0.6)],
        *_wheels(half - 0.05, (-long * 0.62, long * 0.62), 0.33),
    ]


def lorry(draws: Draws) -> list[Part]:
    """Return a lorry or a bus."""
    tone = materials.colour(draws, (0.0, 0.8), (0.3, 0.95))
    long, high = draws.between(3.0, 5.5), draws.between(2.6, 3.4)
    side = Texture(tone, materials.shade(tone, 0.3), draws.one_of(["plain", "panes", "stripes"]), 1.4)
    return [
        block("vehicle", side, (-1.22, 1.22), (-long, long - 1.6), (0.5, high)),
        block("vehicle", Texture(materials.shade(tone, 0.7)), (-1.15, 1.15), (long - 1.6, long), (0.4, high - 0.4)),
        block("vehicle", GLASS, (-1.05, 1.05), (long - 1.0, long + 0.02), (1.4, high - 0.6)),
        block("vehicle", GLASS, (-1.0, 1.0), (-long - 0.02, 0.5 - long), (high - 1.3, high - 0.4)),
        *_wheels(1.15, (-long * 0.6, long * 0.75), 0.48),
    ]


def bicycle(draws: Draws) -> list[Part]:
    """Return a bicycle, mostly with its rider."""
    frame = Texture(materials.colour(draws, (0.0, 0.9), (0.1, 0.8)))
    parts = [
        Part("cylinder", (0.34, 0.34, 0.02), (0, y, 0.34), "vehicle", RUBBER, yaw=pi / 2, tilt=pi / 2)
        for y in (-0.5, 0.5)
    ]
    parts.append(block("vehicle", frame, (-0.03, 0.03), (-0.5, 0.5), (0.45, 0.6)))
    parts.append(block("vehicle", frame, (-0.25, 0.25), (0.35, 0.42), (0.9, 0.98)))
    if draws.chance(0.75):
        parts += person(draws, lift=0.2)
    return parts


def person(draws: Draws, lift: float = 0.0) -> list[Part]:
    """Return a person, who may walk."""
    size, step = draws.between(0.85, 1.08), draws.between(0.0, 0.25)
    skin = Texture(draws.one_of([(0.85, 0.68, 0.55), (0.6, 0.42, 0.3), (0.35, 0.22, 0.15)]))
    coat, trousers = materials.cloth(draws), Texture(materials.colour(draws, (0.0, 0.5), (0.05, 0.5)))
    hair = Texture(draws.one_of([(0.1, 0.07, 0.05), (0.4, 0.3, 0.15), (0.5, 0.5, 0.5)]))

    def limb(texture: Texture, x: float, z: float, half: float, radius: float, tilt: float) -> Part:
        place = (x * size, 0.0, lift + z * size)
        return Part("cylinder", (radius * size, radius * size, half * size), place, "human", texture, tilt=tilt)

    return [
        limb(trousers, -0.1, 0.42, 0.42, 0.085, step),
        limb(trousers, 0.1, 0.42, 0.42, 0.085, -step),
        limb(coat, -0.25, 1.12, 0.32, 0.055, -step),
        limb(coat, 0.25, 1.12, 0.32, 0.055, step),
        Part("ball", (0.22 * size, 0.15 * size, 0.36 * size), (0, 0, lift + 1.15 * size), "human", coat),
        Part("ball", (0.1 * size, 0.11 * size, 0.13 * size), (0, 0, lift + 1.62 * size), "human", skin),
        Part("ball", (0.11 * size, 0.11 * size, 0.09 * size), (0, -0.02, lift + 1.68 * size), "human", hair),
    ]


def tree(draws: Draws) -> list[Part]:
    """Return a tree with a crown of a few balls."""
    trunk, crown, leaves = draws.between(1.6, 3.2), draws.between(1.0, 2.2), materials.foliage(draws)
    bark = Texture((0.3, 0.23, 0.17), (0.15, 0.12, 0.1), "grain", 0.3)
    parts = [pole("nature", bark, 0, 0, (0, trunk + crown), draws.between(0.1, 0.22))]
    for _ in range(draws.count(1, 3)):
        size = crown * draws.between(0.7, 1.1)
        place = (draws.around(crown * 0.5), draws.around(crown * 0.5), trunk + crown * draws.between(0.8, 1.6))
        parts.append(Part("ball", (size, size, size * draws.between(0.8, 1.4)), place, "nature", leaves))
    return parts


def hedge(draws: Draws) -> list[Part]:
    """Return a hedge or a bush."""
    leaves = materials.foliage(draws)
    if draws.chance(0.5):
        size = draws.between(0.5, 1.1)
        return [Part("ball", (size, size, size), (0, 0, size * 0.7), "nature", leaves)]
    return [
        block("nature", leaves, (-0.4, 0.4), (-draws.between(1, 4), draws.between(1, 4)), (0, draws.between(0.8, 1.8)))
    ]


def lamp_post(draws: Draws) -> list[Part]:
    """Return a lamp on a post."""
    steel, high, arm = materials.metal(draws), draws.between(4.5, 7.5), draws.between(0.6, 1.8)
    return [
        pole("object", steel, 0, 0, (0, high), 0.09),
        block("object", steel, (-arm, 0.05), (-0.04, 0.04), (high - 0.05, high + 0.05)),
        block("object", materials.painted(draws), (-arm - 0.3, 0.3 - arm), (-0.12, 0.12), (high - 0.1, high + 0.08)),
    ]


def sign(draws: Draws) -> list[Part]:
    """Return a traffic sign, round or square, that faces -y."""
    high, size = draws.between(2.1, 2.8), draws.between(0.3, 0.45)
    red_or_blue = draws.one_of([(0.8, 0.08, 0.1), (0.1, 0.25, 0.7), (0.9, 0.75, 0.1)])
    face = Texture(red_or_blue, materials.WHITE, draws.one_of(["plain", "stripes", "checks"]), size * 1.5, 0.25)
    parts = [pole("object", materials.metal(draws), 0, 0, (0, high), 0.045)]
    if draws.chance(0.6):
        return [*parts, Part("cylinder", (size, size, 0.02), (0, -0.06, high), "object", face, tilt=pi / 2)]
    return [*parts, block("object", face, (-size, size), (-0.08, -0.05), (high - size, high + size))]


def traffic_light(draws: Draws) -> list[Part]:
    """Return a traffic light that faces -y."""
    dark, high = Texture((0.06, 0.07, 0.07)), draws.between(2.4, 3.4)
    lamps = [(0.95, 0.1, 0.08), (0.95, 0.65, 0.1), (0.1, 0.85, 0.35)]
    on = draws.count(0, 2)
    parts = [
        pole("object", materials.metal(draws), 0, 0, (0, high), 0.06),
        block("object", dark, (-0.16, 0.16), (-0.25, -0.05), (high - 0.5, high + 0.5)),
    ]
    for i, tone in enumerate(lamps):
        bulb = Texture(tone if i == on else materials.shade(tone, 0.2), glow=1.0 * (i == on))
        parts.append(
            Part("cylinder", (0.11, 0.11, 0.02), (0, -0.26, high + 0.3 - 0.3 * i), "object", bulb, tilt=pi / 2)
        )
    return parts


def house(draws: Draws, width: float, depth: float) -> list[Part]:
    """Return a house of a width along y; its middle is at x = 0."""
    high, half = draws.between(4, 17), width / 2
    tone = materials.colour(draws, (0.0, 0.45), (0.3, 0.95))
    glass = (0.12, 0.14, 0.17) if draws.chance(0.7) else materials.shade(tone, 1.4)
    pattern, period = draws.one_of([("panes", 2.2), ("panes", 3.0), ("panes", 3.0), ("tiles", 1.2), ("clouds", 2.0)])
    wall = Texture(tone, glass, pattern, period * draws.between(0.8, 1.3))
    parts = [block("construction", wall, (-depth / 2, depth / 2), (-half, half), (0, high))]
    base = Texture(materials.shade(tone, draws.between(0.4, 0.8)), GLASS.colour, draws.one_of(["plain", "panes"]), 3.2)
    parts.append(
        block("construction", base, (-depth / 2 - 0.1, depth / 2 + 0.1), (-half, half), (0, draws.between(0.5, 3.2)))
    )
    if draws.chance(0.6):
        roof = Texture(materials.colour(draws, (0.1, 0.6), (0.2, 0.5)))
        out = depth / 2 + 0.4
        parts.append(block("construction", roof, (-out, out), (-half, half), (high, high + draws.between(0.3, 1.2))))
    return parts


def wall(draws: Draws, width: float) -> list[Part]:
    """Return a wall or a fence along y."""
    pale = materials.colour(draws, (0.0, 0.4), (0.3, 0.8))
    face = Texture(pale, materials.shade(pale, 0.6), draws.one_of(["tiles", "clouds", "stripes"]), 0.5, 0.1)
    return [block("construction", face, (-0.12, 0.12), (-width / 2, width / 2), (0, draws.between(0.9, 2.4)))]
