"""Pictures from files of the usual kinds."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
"""Pillow's names for pictures whose pixels are numbers up to 255."""
NAMED = 5
"""How many of the files that are left out are named."""


def find_pictures(inputs: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the pictures that are named, or lie in folders that are; and what is left out there, in sentences.

    Raises:
        FileNotFoundError: something that is named is not there, or nothing is a picture.
    """
    pictures: list[Path] = []
    others: list[str] = []
    for given in map(Path, inputs):
        if not given.exists():
            raise FileNotFoundError(f"{given} is not there; expected a picture or a folder of pictures.")
        inside = sorted(given.iterdir()) if given.is_dir() else [given]
        taken = [path for path in inside if path.is_file() and (path == given or path.suffix.lower() in ENDINGS)]
        pictures += taken
        if left := [path.name for path in inside if path not in taken]:
            more = f" and {len(left) - NAMED} more" if len(left) > NAMED else ""
            others.append(f"{given}: left out as no pictures: {', '.join(left[:NAMED])}{more}.")
    if not pictures:
        raise FileNotFoundError(
            f"no picture in {', '.join(inputs)}; expected files that end in {', '.join(ENDINGS)}. " + " ".join(others)
        )
    return list(dict.fromkeys(pictures)), others


def read_picture(path: Path, *, gray: bool) -> Tensor:
    """Return a picture the right way up, uint8 ``(1, h, w)`` or ``(3, h, w)``; of several in a file the first.

    Raises:
        ValueError: it is no whole picture, has more than 8 bits in a channel, or is transparent somewhere.
    """
    try:
        with Image.open(path) as file:
            picture = ImageOps.exif_transpose(file)
            picture.load()
        shown = picture.convert("L" if gray else "RGB") if picture.mode in EIGHT_BITS else None
    except Exception as error:  # a damaged picture can raise nearly anything
        lines = str(error).splitlines() or [type(error).__name__]
        raise ValueError(f"{path} cannot be read: {lines[0].rstrip('.')}.") from None
    if shown is None:
        raise ValueError(f"{path} has more than 8 bits in a channel ({picture.mode}). Convert it to 8 bits.")
    if picture.has_transparency_data and picture.convert("RGBA").getchannel("A").getextrema()[0] != 255:
        raise ValueError(f"{path} is transparent in places. Lay it over a background, as the model knows none.")
    return pil_to_tensor(shown)
