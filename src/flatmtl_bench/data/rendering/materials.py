"""What things are made of: random textures of a kind."""

from colorsys import hsv_to_rgb

from flatmtl_bench.data.rendering.draws import Draws
from flatmtl_bench.data.rendering.textures import Colour, Texture

BLACK, WHITE = (0.03, 0.03, 0.04), (0.92, 0.92, 0.9)


def colour(draws: Draws, saturation: tuple[float, float], value: tuple[float, float]) -> Colour:
    """Return a colour of any hue."""
    return hsv_to_rgb(draws.between(0, 1), draws.between(*saturation), draws.between(*value))


def shade(of: Colour, factor: float) -> Colour:
    """Return a darker or brighter colour."""
    red, green, blue = (min(channel * factor, 1.0) for channel in of)
    return red, green, blue


def wood(draws: Draws) -> Texture:
    """Return wood from pale to dark brown, sometimes painted."""
    if draws.chance(0.15):
        return painted(draws)
    tone = hsv_to_rgb(draws.between(0.03, 0.12), draws.between(0.25, 0.7), draws.between(0.25, 0.85))
    dark = shade(tone, draws.between(0.6, 0.85))
    return Texture(tone, dark, "grain", draws.between(0.3, 1.0), draws.between(0, 9))


def painted(draws: Draws) -> Texture:
    """Return an even coat of any colour, mostly a pale one."""
    return Texture(colour(draws, (0.0, 0.4), (0.35, 0.95)))


def cloth(draws: Draws) -> Texture:
    """Return a cover of any colour: woven, striped, checked, clouded or plain."""
    tone = colour(draws, (0.2, 0.8), (0.3, 0.95))
    other = draws.one_of([shade(tone, draws.between(0.5, 0.8)), colour(draws, (0.0, 0.8), (0.2, 0.95))])
    pattern, period = draws.one_of(
        [("weave", 0.06), ("weave", 0.1), ("stripes", 0.25), ("checks", 0.3), ("clouds", 0.3), ("plain", 1.0)]
    )
    return Texture(tone, other, pattern, period * draws.between(0.6, 1.4), draws.between(0, 9))


def metal(draws: Draws) -> Texture:
    """Return grey, from black to bright."""
    level = draws.between(0.05, 0.8)
    return Texture((level, level, level))


def wallpaper(draws: Draws) -> Texture:
    """Return what covers a wall: mostly one pale colour, sometimes with a faint pattern, bricks or boards."""
    tone = colour(draws, (0.0, 0.3), (0.65, 0.98))
    other = shade(tone, draws.between(0.75, 0.95))
    pattern, period = draws.one_of(
        [("plain", 1.0), ("plain", 1.0), ("clouds", 1.2), ("stripes", 0.4), ("tiles", 0.3), ("weave", 0.15)]
    )
    return Texture(tone, other, pattern, period * draws.between(0.6, 1.4), draws.between(0, 9))


def flooring(draws: Draws) -> Texture:
    """Return boards, tiles or a carpet."""
    if draws.chance(0.45):
        return wood(draws)
    tone = colour(draws, (0.0, 0.5), (0.2, 0.65))
    other = shade(tone, draws.one_of([draws.between(0.6, 0.85), draws.between(1.1, 1.4)]))
    pattern, period = draws.one_of([("tiles", 0.4), ("checks", 0.6), ("weave", 0.08), ("clouds", 0.4)])
    return Texture(tone, other, pattern, period * draws.between(0.6, 1.4), draws.between(0, 9))


def image(draws: Draws, glow: float = 0.0) -> Texture:
    """Return what hangs in a frame or runs on a screen: patches of many colours."""
    tone, other = colour(draws, (0.2, 0.9), (0.1, 0.9)), colour(draws, (0.2, 0.9), (0.3, 1.0))
    pattern = draws.one_of(["mosaic", "clouds", "leaves", "stripes"])
    return Texture(tone, other, pattern, draws.between(0.1, 0.5), draws.between(0, 9), glow)


def covers(draws: Draws) -> Texture:
    """Return the spines of books in a row."""
    return Texture((0.08, 0.06, 0.05), (0.95, 0.9, 0.85), "spines", draws.between(0.02, 0.05), draws.between(0, 99))


def foliage(draws: Draws) -> Texture:
    """Return leaves from yellow to dark green."""
    tone = hsv_to_rgb(draws.between(0.17, 0.4), draws.between(0.35, 0.8), draws.between(0.3, 0.65))
    return Texture(tone, shade(tone, 0.4), "leaves", draws.between(0.05, 0.12), draws.between(0, 9))


def anything(draws: Draws) -> Texture:
    """Return what small things are made of."""
    return draws.one_of([wood, painted, cloth, metal, image])(draws)
