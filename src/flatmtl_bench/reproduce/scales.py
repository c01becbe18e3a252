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


DIGITS = ("--model", "lenet", "--batch-size", "64", "--epochs", "12", "--data.train-samples", "4000")
GARMENTS = ("--model", "lenet", "--batch-size", "16", "--epochs", "20", "--data.train-samples", "1000")
FACES = (
    *("--data.train-samples", "500", "--data.validation-samples", "250", "--data.test-samples", "500"),
    *("--batch-size", "16", "--epochs", "8", "--optimizer.lr", "0.003"),
)
RENDERED = (
    *("--model", "segnet", "--data.size", "32", "64", "--data.augment", "False"),
    *("--batch-size", "8", "--optimizer.lr", "0.003"),
)
"""SegNet without the attention of MTAN, which takes most of its time."""
STREETS = ("--data.train-samples", "400", "--epochs", "20")
ROOMS = ("--data.train-samples", "1000", "--epochs", "10")
"""So many that nets tell more of streets and rooms than one that does not look, in runs of minutes. With a fourth of
the streets or a tenth of the rooms they hardly do; rooms look less like each other."""
UNMEASURED = ("--sharpness.samples", "0")

FULL = {
    name: Size(name, ("--source", "full"), smaller=False)
    for name in ("multifashion", "multimnist", "multifashionmnist", "celeba", "nyuv2", "cityscapes")
}
SMALL = {
    "multifashion": Size("multifashion", ("--source", "npz", *GARMENTS, *UNMEASURED), radii=("0.5",)),
    "multimnist": Size("multimnist", ("--source", "mnist5k", *DIGITS), seeds=5, radii=("0.5", "1.0")),
    "multifashionmnist": Size("multifashionmnist", ("--source", "npz", *GARMENTS, *UNMEASURED), radii=("0.5",)),
    "celeba": Size("faces40", ("--source", "faces40", *FACES, *UNMEASURED), radii=("0.05", "0.5")),
    "nyuv2": Size("scenes", ("--source", "scenes", *RENDERED, *ROOMS, *UNMEASURED), radii=("0.005",)),
    "cityscapes": Size("streets", ("--source", "streets", *RENDERED, *STREETS, *UNMEASURED), radii=("0.005",)),
}
SCALES: Mapping[str, Mapping[str, Size]] = {"full": FULL, "small": SMALL}
"""By name, and for each data set of the paper."""
