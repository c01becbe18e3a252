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


def _digits(name: str, source: str, pairs: int, seeds: int, radii: Sequence[str]) -> Size:
    """Return LeNet for 12 epochs."""
    size = ("--model", "lenet", "--epochs", "12", "--batch-size", "64", "--data.train-samples", str(pairs))
    return Size(name, ("--source", source, *size), seeds, radii)


def _rendered(source: str, epochs: int) -> tuple[str, ...]:
    """Return the flags of SegNet, without the attention that takes most of the time of MTAN."""
    return ("--source", source, "--model", "segnet", "--epochs", str(epochs), "--data.size", "32", "64")


FACES = (
    *("--data.train-samples", "500", "--data.validation-samples", "250", "--data.test-samples", "500"),
    *("--batch-size", "16", "--epochs", "8", "--optimizer.lr", "0.003", "--sharpness.samples", "0"),
)
"""Small batches: the time of a step, with a gradient for each of forty tasks, is about proportional to them."""
FULL = {
    name: Size(name, ("--source", "full"), smaller=False)
    for name in ("multifashion", "multimnist", "multifashionmnist", "celeba", "nyuv2", "cityscapes")
}
SMALL = {
    "multifashion": _digits("multifashion", "npz", pairs=2000, seeds=3, radii=("1.0",)),
    "multimnist": _digits("multimnist", "mnist5k", pairs=4000, seeds=5, radii=("0.5", "1.0")),
    "multifashionmnist": _digits("multifashionmnist", "npz", pairs=2000, seeds=3, radii=("1.0",)),
    "celeba": Size("faces40", ("--source", "faces40", *FACES), radii=("0.5",)),
    "nyuv2": Size("scenes", (*_rendered("scenes", epochs=12), "--data.train-samples", "150"), radii=("0.05",)),
    "cityscapes": Size("streets", _rendered("streets", epochs=15), radii=("0.05",)),
}
SCALES: Mapping[str, Mapping[str, Size]] = {"full": FULL, "small": SMALL}
"""By name, and for each data set of the paper."""
