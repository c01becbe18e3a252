"""A face, drawn from what can be seen of its attributes and from what is left to chance.

Coordinates on the head: its centre is (0, 0), its half height about 1, its half width about 0.75; y points down. Eyes,
brows, nose and mouth are moved to one side by the turn of the head.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from flatmtl_bench.data.faces.canvas import Canvas, Colour, box, ellipse, mix, ring, waves

CHANCE = (
    *("across", "down", "scale", "tilt", "turn", "skin", "iris", "hair", "length", "lips", "gaze", "brow", "strands"),
    *("light", "light_x", "light_y", "warmth", "noise", "wall", "wall_dark", "blob", "blob_x", "blob_y"),
    *("clothes", "clothes_dark", "hat", "hat_dark", "lens", "frame", "tie", "jewel"),
)
"""Names of what is left to chance, each uniform in [0, 1]."""

BLACK, WHITE, GREY = (20.0, 17.0, 18.0), (242.0, 241.0, 238.0), (178.0, 178.0, 182.0)
SKIN = ((122.0, 80.0, 58.0), (198.0, 146.0, 112.0), (232.0, 188.0, 158.0))
PALE, RED, LIPS, BLUSH = (252.0, 236.0, 228.0), (196.0, 22.0, 50.0), (150.0, 20.0, 40.0), (226.0, 70.0, 78.0)
HAIR = ((20.0, 17.0, 18.0), (44.0, 30.0, 24.0), (108.0, 66.0, 38.0), (160.0, 116.0, 70.0), (228.0, 194.0, 124.0))
IRIS = ((58.0, 36.0, 24.0), (98.0, 120.0, 72.0), (86.0, 128.0, 170.0))
GOLD, SILVER = (232.0, 190.0, 70.0), (226.0, 228.0, 236.0)
CLOTH = (
    *((170.0, 60.0, 56.0), (60.0, 84.0, 150.0), (70.0, 120.0, 84.0), (60.0, 58.0, 66.0), (206.0, 200.0, 190.0)),
    *((190.0, 140.0, 70.0), (120.0, 80.0, 130.0), (110.0, 150.0, 176.0)),
)


def blend(colours: Sequence[Colour], share: float) -> Colour:
    """Return the colour at a place between the first and the last.

    Example:
        >>> blend([(0.0, 0.0, 0.0), (100.0, 0.0, 0.0), (200.0, 50.0, 0.0)], 0.75)
        (150.0, 25.0, 0.0)
    """
    place = min(max(share, 0.0), 1.0) * (len(colours) - 1)
    first = min(int(place), len(colours) - 2)
    return mix(colours[first], colours[first + 1], place - first)


def cloth(which: float, dark: float) -> Colour:
    """Return one of a few colours, more or less dark."""
    return mix(CLOTH[min(int(which * len(CLOTH)), len(CLOTH) - 1)], BLACK, 0.5 * dark)


class Face:
    """A face to be drawn.

    Args:
        seen: attribute -> how much of it is to be seen, 0..1; the face has it above 0.5. ``Hair``: how light the hair
            is, 0..1.
        chance: what is left to chance: each of ``CHANCE``, 0..1.
        height: of the picture, in pixels.
        width: likewise.
    """

    def __init__(self, seen: Mapping[str, float], chance: Mapping[str, float], height: int, width: int) -> None:
        self.seen, self.chance = seen, chance
        self.page = Canvas.blank(height, width, cloth(chance["wall"], chance["wall_dark"]))
        self.head = self.page.placed(
            x=0.2 * (chance["across"] - 0.5),
            y=0.18 * (chance["down"] - 0.5) - 0.02,
            scale=0.6 + 0.12 * chance["scale"],
            tilt=0.2 * (chance["tilt"] - 0.5),
        )
        self.turn = 0.24 * (chance["turn"] - 0.5)
        self.man = seen["Male"]
        self.skin = mix(blend(SKIN, chance["skin"]), PALE, 0.8 * seen["Pale_Skin"])
        self.shade = mix(self.skin, (70.0, 30.0, 20.0), 0.4)
        own = blend(HAIR, seen["Hair"] + 0.1 * (chance["hair"] - 0.5))
        self.hair = mix(own, GREY, min(1.0, 1.2 * seen["Gray_Hair"]))
        self.half_width = 0.74 - 0.1 * seen["Oval_Face"] + 0.14 * seen["Chubby"] + 0.03 * self.man

    def has(self, attribute: str) -> bool:
        """Return whether the face has an attribute that is there or not."""
        return self.seen[attribute] > 0.5

    def draw(self, noise: np.ndarray) -> np.ndarray:
        """Return the picture, uint8 ``(3, H, W)``; ``noise``, of that shape and about 0, is added to its pixels."""
        for part in (self.wall, self.hair_behind, self.body, self.skull, self.cheeks, self.age, self.beard, self.mouth):
            part()
        for part in (self.nose, self.eyes, self.brows, self.hair_above, self.hat, self.glasses, self.earrings):
            part()
        return self.photograph(noise)

    def photograph(self, noise: np.ndarray) -> np.ndarray:
        """Return what a camera makes of it: light, white balance, focus and noise."""
        chance, picture = self.chance, self.page.picture
        sideways, down = 0.5 * (chance["light_x"] - 0.5), 0.4 * (chance["light_y"] - 0.5)
        picture *= 0.78 + 0.4 * chance["light"] + sideways * self.page.x + down * self.page.y
        warmth = 0.16 * (chance["warmth"] - 0.5)
        picture *= np.array([1 + warmth, 1.0, 1 - warmth], np.float32)[:, None, None]
        if (blur := 1.5 * self.seen["Blurry"] - 0.3) > 0:
            picture += (blurred(blurred(picture)) - picture) * min(1.0, blur)
        picture += noise * (4.0 + 12.0 * chance["noise"])
        return np.rint(np.clip(picture, 0.0, 255.0)).astype(np.uint8)

    def wall(self) -> None:
        """What is behind."""
        page, chance = self.page, self.chance
        blob = ellipse(page.x + 1 - 2 * chance["blob_x"], page.y + 1 - 2 * chance["blob_y"], 0.5, 0.9)
        page.paint(blob, cloth(chance["blob"], chance["blob_x"]), opacity=0.7, soft=0.5)

    def hair_behind(self) -> None:
        """Long hair falls behind the face; it is short for those who are ``Male``."""
        if self.has("Bald"):
            return
        x, y = self.head.x, self.head.y
        long = min(1.0, max(0.0, 1.15 - 1.2 * self.man)) * (0.5 + 0.5 * self.chance["length"])
        curl = self.seen["Wavy_Hair"]
        edge = x + 0.09 * curl * waves(3.2 * y)
        wide = 0.1 + 0.06 * curl - 0.04 * self.seen["Straight_Hair"]
        around = ellipse(edge, y + 0.12, self.half_width + wide, 1.0)
        falls = box(edge, y - 0.75 * long, self.half_width + wide - 0.02, 0.8 * long)
        self.head.paint(np.minimum(around, falls) if long > 0.2 else around, mix(self.hair, BLACK, 0.25))

    def body(self) -> None:
        """Neck, shoulders and what is worn there."""
        seen, chance = self.seen, self.chance
        body = self.head.part(-3.0, 3.0, 0.5, 3.0)
        x, y = body.x, body.y
        suit = self.has("Wearing_Necktie")
        coat = mix((40.0, 44.0, 60.0), BLACK, chance["clothes_dark"])
        colour = coat if suit else cloth(chance["clothes"], chance["clothes_dark"])
        neck = 0.3 + 0.12 * self.man + 0.08 * seen["Chubby"]
        body.paint(box(x, y - 1.0, neck, 0.5), self.shade)
        body.paint(ellipse(x, y - 2.0, 1.35 + 0.25 * self.man, 0.85), colour)
        if suit:
            body.paint(np.maximum(1.12 - y, np.abs(x) * 1.6 + y - 2.0), WHITE)
            tie = np.maximum(1.16 - y, np.abs(x) - 0.08 - 0.08 * (y - 1.16))
            body.paint(tie, cloth(chance["tie"], 0.4))
        else:
            body.paint(ellipse(x, y - 1.1, neck + 0.05, 0.32), self.shade)
        if self.has("Wearing_Necklace"):
            chain = ring(ellipse(x, y - 1.1, neck + 0.06, 0.34), 0.07)
            body.paint(np.maximum(chain, 1.1 - y), GOLD if chance["jewel"] > 0.4 else SILVER)

    def skull(self) -> None:
        """Ears and face."""
        x, y = self.head.x, self.head.y
        self.head.paint(ellipse(np.abs(x) - self.half_width, y, 0.11, 0.2), self.shade)
        self.head.paint(self.outline(self.head), self.skin)
        if (double := self.seen["Double_Chin"]) > 0.3:
            chin = self.head.part(-0.6, 0.6, 0.6, 1.4)
            fold = ring(ellipse(chin.x, chin.y - 0.55, 0.46, 0.52), 0.04)
            chin.paint(ellipse(chin.x, chin.y - 0.75, 0.5, 0.4), self.skin, opacity=min(1.0, 1.4 * double))
            chin.paint(np.maximum(fold, 0.85 - chin.y), self.shade, opacity=min(1.0, 1.2 * double))

    def outline(self, canvas: Canvas) -> np.ndarray:
        """Return the distance to the edge of the face: an ellipse above, a jaw below."""
        seen, x, y = self.seen, np.abs(canvas.x), canvas.y
        taper = 0.3 + 0.1 * seen["Oval_Face"] - 0.14 * self.man - 0.22 * seen["Chubby"]
        below = np.clip(y, 0.0, 1.2)
        narrow = self.half_width * (1.0 - taper * below * below)
        return 0.8 * ellipse(x / narrow, y - 0.02, 1.0, 0.98 + 0.05 * seen["Oval_Face"])  # x is stretched, y is not

    def cheeks(self) -> None:
        """Cheekbones, blush."""
        seen = self.seen
        part = self.head.part(-0.9, 0.9, -0.1, 0.75)
        x, y = np.abs(part.x - self.turn), part.y
        high = seen["High_Cheekbones"]
        part.paint(ellipse(x - 0.46, y - 0.12, 0.16, 0.09), WHITE, opacity=0.4 * high, soft=0.1)
        part.paint(ellipse(x - 0.5 - 0.25 * (0.4 - y), y - 0.4, 0.09, 0.22), self.shade, opacity=0.75 * high, soft=0.1)
        if (blush := seen["Rosy_Cheeks"]) > 0.2:
            part.paint(ellipse(x - 0.42, y - 0.22, 0.2, 0.15), BLUSH, opacity=0.75 * blush, soft=0.12)

    def age(self) -> None:
        """Wrinkles of those who are not young, bags under the eyes."""
        seen = self.seen
        part = self.head.part(-0.8, 0.8, -0.75, 0.75)
        x, y = np.abs(part.x - self.turn), part.y
        if (old := 1.0 - seen["Young"]) > 0.15:
            for height in (-0.6, -0.5):
                lines = np.abs(y - height - 0.1 * x * x) - 0.015
                part.paint(np.maximum(lines, x - 0.36), self.shade, opacity=0.9 * old)
            folds = np.abs(x - 0.22 - 0.35 * (y - 0.25)) - 0.025
            part.paint(np.maximum(folds, np.abs(y - 0.4) - 0.2), self.shade, opacity=0.9 * old)
        if (bags := seen["Bags_Under_Eyes"]) > 0.15:
            under = ring(ellipse(x - 0.31, y + 0.1, 0.19, 0.2), 0.07)
            part.paint(np.maximum(under, 0.0 - y), (92.0, 58.0, 74.0), opacity=0.7 * bags)

    def beard(self) -> None:
        """Beard, goatee, mustache, sideburns and the shadow of a beard."""
        seen = self.seen
        part = self.head.part(-0.95, 0.95, -0.35, 1.15)
        x, y = part.x - self.turn, part.y
        face, dark = self.outline(part), mix(self.hair, BLACK, 0.15)
        jaw = np.maximum(face + 0.01, 0.36 + 0.3 * (0.5 - np.abs(x)) - y)
        if (shadow := seen["5_o_Clock_Shadow"]) > 0.3:
            part.paint(jaw, (60.0, 62.0, 72.0), opacity=0.5 * shadow, soft=0.1)
        patches = self.has("Goatee") or self.has("Mustache") or self.has("5_o_Clock_Shadow")
        if not (self.has("No_Beard") or patches):
            part.paint(jaw, dark, opacity=0.85, soft=0.08)
        if self.has("Goatee"):
            part.paint(ellipse(x, y - 0.88, 0.26, 0.2), dark, opacity=0.9, soft=0.06)
        if self.has("Mustache"):
            part.paint(ellipse(x, y - 0.43 - 0.25 * x * x, 0.32, 0.075), dark, opacity=0.95, soft=0.04)
        if self.has("Sideburns"):
            strip = box(np.abs(part.x) - self.half_width + 0.1, y - 0.1, 0.09, 0.42)
            part.paint(np.maximum(strip, face), dark, opacity=0.95)

    def mouth(self) -> None:
        """Lips: coloured, big, smiling, open, each more or less."""
        seen, chance = self.seen, self.chance
        part = self.head.part(-0.6, 0.6, 0.25, 0.95)
        smile, gape = seen["Smiling"], seen["Mouth_Slightly_Open"]
        skew = 0.12 * (1.0 - seen["Attractive"]) * (1 if chance["lips"] > 0.5 else -1)
        x = part.x - self.turn
        y = part.y - 0.58 - skew * x + (1.1 * smile - 0.25) * x * x * 0.8 - 0.03 * smile
        half, thick = 0.26 + 0.1 * smile, 0.045 + 0.07 * seen["Big_Lips"]
        open_by = 0.11 * max(0.0, gape - 0.3) / 0.7
        plain = mix(mix(self.skin, LIPS, 0.45), BLACK, 0.15 * chance["lips"])
        painted = mix(RED, (190.0, 40.0, 120.0), chance["lips"])
        colour = mix(plain, painted, min(1.0, max(0.0, 1.5 * seen["Wearing_Lipstick"] - 0.35)))
        part.paint(ellipse(x, y, half, thick + open_by), colour)
        if open_by > 0.01:
            inside = ellipse(x, y, half - 0.05, open_by)
            part.paint(inside, (60.0, 16.0, 20.0))
            part.paint(np.maximum(inside, y + 0.1 * open_by), WHITE)
        else:
            part.paint(np.maximum(np.abs(y) - 0.014, np.abs(x) - half), mix(colour, BLACK, 0.55))
        if smile > 0.4:
            dimple = ring(ellipse(np.abs(x) - half - 0.01, y, 0.06, 0.1), 0.03)
            part.paint(np.maximum(dimple, half + 0.01 - np.abs(x)), self.shade, opacity=0.8 * smile)

    def nose(self) -> None:
        """A nose: broad if big, a narrow ridge with a sharp tip if pointed."""
        seen = self.seen
        part = self.head.part(-0.5, 0.5, -0.2, 0.5)
        x, y = part.x - 1.25 * self.turn, part.y
        big, pointed = seen["Big_Nose"], seen["Pointy_Nose"]
        wide = 0.11 + 0.13 * big - 0.03 * pointed
        side = x + 0.05 - (0.02 + 0.5 * wide) * (y + 0.1)
        part.paint(np.maximum(np.abs(side + 0.1) - 0.025, np.abs(y - 0.08) - 0.2), self.shade, opacity=0.5)
        part.paint(ellipse(x, y - 0.3, wide, 0.07 + 0.03 * big), mix(self.skin, self.shade, 0.55))
        part.paint(ellipse(x, y - 0.27, wide - 0.03, 0.06), self.skin)
        part.paint(ellipse(np.abs(x) - 0.6 * wide, y - 0.335, 0.035, 0.024), mix(self.shade, BLACK, 0.5))
        if pointed > 0.2:
            ridge = np.maximum(np.abs(x) - 0.03, np.abs(y - 0.08) - 0.22)
            part.paint(ridge, WHITE, opacity=0.7 * pointed)
            tip = np.maximum(np.abs(x) - 0.7 * (0.44 - y), 0.31 - y)
            part.paint(tip, self.shade, opacity=pointed)

    def eyes(self) -> None:
        """Eyes; narrow, made up, attractive ones are larger."""
        seen, chance = self.seen, self.chance
        part = self.head.part(-0.75, 0.75, -0.45, 0.2)
        x, y = part.x - self.turn, part.y + 0.12
        apart = np.abs(x) - 0.31
        half = 0.135 + 0.03 * seen["Attractive"]
        height = (0.055 + 0.035 * seen["Attractive"]) * (1.35 - 0.95 * seen["Narrow_Eyes"])
        if (made_up := max(0.0, 1.5 * seen["Heavy_Makeup"] - 0.4)) > 0:
            lid = np.maximum(ellipse(apart, y + 0.03, half + 0.05, height + 0.1), y)
            part.paint(lid, cloth(0.3 + 0.6 * chance["lips"], 0.6), opacity=min(0.85, 0.7 * made_up), soft=0.06)
        white = ellipse(apart, y, half, height)
        part.paint(white, mix(WHITE, self.shade, 0.15))
        iris = ellipse(np.abs(x - 0.08 * (chance["gaze"] - 0.5)) - 0.31, y, 0.068, 0.078)
        part.paint(np.maximum(iris, white), blend(IRIS, 1.2 * chance["iris"] - 0.2))
        part.paint(np.maximum(iris + 0.038, white), BLACK)
        lashes = 0.025 + 0.03 * (1.0 - self.man) + 0.04 * min(1.0, made_up)
        part.paint(np.maximum(ring(white, lashes), y + 0.3 * height), BLACK, opacity=0.9)

    def brows(self) -> None:
        """Eyebrows: arched or straight, bushy or thin."""
        seen, chance = self.seen, self.chance
        part = self.head.part(-0.8, 0.8, -0.65, -0.1)
        x, y = np.abs(part.x - self.turn) - 0.32, part.y + 0.33 + 0.04 * (chance["brow"] - 0.5)
        arch = 0.4 + 3.4 * seen["Arched_Eyebrows"]
        thick = 0.028 + 0.012 * self.man + 0.062 * seen["Bushy_Eyebrows"]
        lift = 0.09 * seen["Arched_Eyebrows"]
        brow = np.maximum(np.abs(y + lift - arch * x * x) - thick, np.abs(x) - 0.2)
        part.paint(brow, mix(self.hair, BLACK, 0.4), opacity=0.95)

    def hair_above(self) -> None:
        """Hair on the head: its line, bangs, strands and waves."""
        if self.has("Bald"):
            return
        seen, chance = self.seen, self.chance
        part = self.head.part(-1.1, 1.1, -1.5, 0.5)
        x, y = part.x, part.y
        curl, straight = seen["Wavy_Hair"], seen["Straight_Hair"]
        across, down = self.half_width + 0.08 + 0.04 * curl, 1.0 + 0.05 * curl
        cap = ellipse(x + 0.06 * curl * waves(3.2 * y), y + 0.1, across, down)
        high = 0.58 + 0.26 * seen["Receding_Hairline"] - 0.36 * max(0.0, 1.6 * seen["Bangs"] - 0.6)
        side = x - 0.3 * (chance["strands"] - 0.5)
        if self.has("Bangs"):
            line = y + high + 0.04 * waves(7.0 * x)
        elif self.has("Receding_Hairline"):
            line = y + high + 0.5 * seen["Receding_Hairline"] * (np.abs(np.abs(x) - 0.4) - 0.4)
        else:
            line = y + high - 0.95 * side * side
        temples = np.maximum(self.half_width - 0.1 - np.abs(x), y + 0.1 - 0.35 * (1.0 - self.man))
        hair = np.maximum(cap, np.minimum(line, temples))
        part.paint(hair, self.hair)
        if (lines := max(curl, straight)) > 0.3:
            along = 7.0 * x if straight > curl else 3.5 * x + 0.7 * waves(3.0 * y) + 2.2 * y
            strands = np.maximum(hair + 0.02, waves(along) * -0.1 + 0.02)
            part.paint(strands, mix(self.hair, WHITE, 0.3), opacity=0.7 * lines)

    def hat(self) -> None:
        """A hat with a brim."""
        if not self.has("Wearing_Hat"):
            return
        part = self.head.part(-1.6, 1.6, -1.8, -0.2)
        x, y = part.x, part.y
        colour = cloth(self.chance["hat"], self.chance["hat_dark"])
        crown = np.maximum(ellipse(x, y + 0.5, self.half_width + 0.14, 0.75 + 0.2 * self.chance["lens"]), y + 0.5)
        part.paint(crown, colour)
        brim = ellipse(x, y + 0.5, self.half_width + 0.16 + 0.4 * self.chance["frame"], 0.1)
        part.paint(brim, mix(colour, BLACK, 0.35))

    def glasses(self) -> None:
        """Glasses: frames of some width, clear or dark."""
        if not self.has("Eyeglasses"):
            return
        chance = self.chance
        part = self.head.part(-0.95, 0.95, -0.5, 0.3)
        x, y = part.x - self.turn, part.y + 0.1
        round_ = ellipse(np.abs(x) - 0.32, y, 0.24, 0.2)
        lens = round_ if chance["lens"] > 0.5 else box(np.abs(x) - 0.32, y, 0.23, 0.15)
        dark = chance["frame"] < 0.25
        part.paint(lens, BLACK if dark else WHITE, opacity=0.85 if dark else 0.15)
        part.paint(ring(lens, 0.05 + 0.04 * chance["frame"]), mix(BLACK, CLOTH[0], 0.6 * chance["hat"]))
        part.paint(np.maximum(np.abs(y + 0.03) - 0.03, np.abs(x) - 0.1), BLACK)

    def earrings(self) -> None:
        """Earrings below the ears."""
        if not self.has("Wearing_Earrings"):
            return
        part = self.head.part(-1.2, 1.2, 0.1, 0.7)
        size = 0.06 + 0.03 * self.chance["jewel"]
        pearl = ellipse(np.abs(part.x) - self.half_width - 0.04, part.y - 0.3, size, 1.5 * size)
        part.paint(pearl, GOLD if self.chance["jewel"] > 0.4 else SILVER)


def blurred(picture: np.ndarray) -> np.ndarray:
    """Return the mean over squares of 5 by 5 pixels."""
    for axis in (1, 2):
        padded = np.pad(picture, [(2, 2) if a == axis else (0, 0) for a in range(3)], mode="edge")
        one, two, three, four, five = (
            padded.take(range(start, start + picture.shape[axis]), axis=axis) for start in range(5)
        )
        picture = (one + two + three + four + five) * 0.2
    return picture
