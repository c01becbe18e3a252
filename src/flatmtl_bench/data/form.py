"""What the items of a data set are like, known from the options of a run alone: none of its files is needed."""

from collections.abc import Mapping
from dataclasses import dataclass

from flatmtl_bench.data.attributes import ATTRIBUTES, PLAIN, PREPROCESSING, Prepare, rgb
from flatmtl_bench.data.celeba import SIZE
from flatmtl_bench.data.multimnist import KINDS
from flatmtl_bench.data.scenes import RenderedDataset, Scenes, Streets
from flatmtl_bench.data.sources import CANVAS, CLASSES
from flatmtl_bench.metrics import Attribute, Classification, Objective
from flatmtl_bench.recipes.config import Data


@dataclass(frozen=True)
class Form:
    """What the items of a data set are like.

    Attributes:
        channels: ``gray``, ``RGB`` or ``BGR``: what the numbers of an input's pixel are, in this order.
        size: height and width of inputs; None: those of the files that a run was trained on.
        objectives: of all tasks, in their order.
        prepare: picture as it is read, uint8 ``(1 or 3, h, w)``, size -> input, float32 ``(C, H, W)``.
        preprocessing: the same in words.
        range: the least and the largest value that an input can have.
        depth: what depths are, in words, if there are any.
        depth_scale: what a depth is multiplied by to be a whole number of 16 bits.
    """

    channels: str
    size: tuple[int, int] | None
    objectives: Mapping[str, Objective]
    prepare: Prepare = rgb
    preprocessing: str = PLAIN
    range: tuple[float, float] = (0.0, 1.0)
    depth: str = ""
    depth_scale: float = 1.0

    @property
    def gray(self) -> bool:
        """Whether a pixel has one number."""
        return self.channels == "gray"


def form(data: Data) -> Form:
    """Return what the items of the data set are like that a run was trained on.

    Example:
        >>> digits = form(Data("multimnist"))
        >>> digits.channels, digits.size, list(digits.objectives)
        ('gray', (36, 36), ['left', 'right'])
    """
    if data.name in KINDS:
        kinds = KINDS[data.name]
        return Form("gray", (CANVAS, CANVAS), {task: Classification(CLASSES[kind]) for task, kind in kinds.items()})
    if data.name in ("celeba", "faces40"):
        return _faces(data)
    if data.name in ("nyuv2", "scenes"):
        return _pixels(data, Scenes, "depth in metres", depth_scale=1000.0)
    return _pixels(data, Streets, "inverse depth: the 16 bits of CityScapes' disparity / 65535", depth_scale=65535.0)


def _faces(data: Data) -> Form:
    height, width = SIZE if data.size is None else data.size
    objectives = dict.fromkeys(ATTRIBUTES, Attribute(data.logits or 1))
    how = PREPROCESSING[data.preprocessing or "rgb"]
    return Form(how.channels, (height, width), objectives, how.prepare, how.words, how.range)


def _pixels(data: Data, kind: type[RenderedDataset], depth: str, depth_scale: float) -> Form:
    """Return the form of rendered pictures, or of files with the same tasks, which have a size of their own."""
    height, width = kind.usual_size if data.size is None else data.size
    size = (height, width) if data.name == kind.name or data.size is not None else None
    return Form("RGB", size, kind.objectives, depth=depth, depth_scale=depth_scale)
