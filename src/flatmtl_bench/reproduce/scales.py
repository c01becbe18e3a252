"""How large a table is reproduced: as in the paper, or at a size for two CPU cores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flatmtl_bench.recipes.family import RADII

TUNED_WITH = 2
"""Seeds with which validation chooses among radii."""


@dataclass(frozen=True)
class Size:
    """How a data set of the paper is reproduced.

    Attributes:
        data: the data set that stands for it, in the names of recipes.
        flags: of `flatmtl run`, for all its runs.
        seeds: their number.
        radii: of which validation chooses one for each flat method, as texts.
        smaller: whether the data or nets are smaller than the paper's.
    """

    data: str
    flags: Sequence[str] = field(default_factory=tuple)
    seeds: int = 3
    radii: Sequence[str] = RADII
    smaller: bool = True


def _digits(name: str, seeds: int, *source: str) -> Size:
    """Return LeNet on 4,000 pairs for 12 epochs."""
    size = ("--model", "lenet", "--epochs", "12", "--batch-size", "64", "--data.train-samples", "4000")
    return Size(name, (*source, *size), seeds, ("0.5", "1.0"))


FULL = {
    name: Size(name, ("--source", "full"), smaller=False)
    for name in ("multifashion", "multimnist", "multifashionmnist", "celeba", "nyuv2", "cityscapes")
}
SMALL = {
    "multifashion": _digits("multifashion", 3, "--source", "npz"),
    "multimnist": _digits("multimnist", 5, "--source", "mnist5k"),
    "multifashionmnist": _digits("multifashionmnist", 3, "--source", "npz"),
    "celeba": Size("faces40", ("--source", "faces40", "--data.train-samples", "1000"), radii=("0.05", "0.2")),
    "nyuv2": Size("scenes", ("--source", "scenes"), radii=("0.01", "0.05")),
    "cityscapes": Size("streets", ("--source", "streets"), radii=("0.01", "0.05")),
}
SCALES: Mapping[str, Mapping[str, Size]] = {"full": FULL, "small": SMALL}
"""By name, and for each data set of the paper."""
