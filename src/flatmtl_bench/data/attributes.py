"""Pictures of faces with attributes: what photographs and drawings have in common."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2.functional import normalize, resize

from flatmtl_bench.choices import one_of
from flatmtl_bench.data.base import TaskDataset, check_split
from flatmtl_bench.data.faces.distribution import DISTRIBUTION
from flatmtl_bench.metrics import Attribute

ATTRIBUTES = tuple(DISTRIBUTION)
"""The names in the order of CelebA's lists."""

MEAN = (73.158, 82.909, 72.392)  # blue, green, red; subtracted by the authors' code
IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of red, green and blue, in [0, 1], over the photographs of ImageNet."""

PLAIN = "resized bilinearly, antialiased, in 8 bits; divided by 255"
_IMAGENET = f"{PLAIN}; less {IMAGENET_MEAN} and divided by {IMAGENET_DEVIATION}, by channel"
_OFFICIAL = (
    "blue, green, red; less 73.158, 82.909, 72.392; stretched so that least and largest value of the picture are 0 and "
    "255, in 8 bits; resized bilinearly, antialiased; divided by 255"
)

Prepare = Callable[[Tensor, tuple[int, int]], Tensor]
"""Picture as it is read, size -> input of a model."""


class AttributeDataset(TaskDataset):
    """Pictures of faces, each with 40 attributes; each attribute is a task: does the face have it?

    Items are ``(picture, {attribute: 0 or 1})`` with a float32 picture of shape ``(3, H, W)``, in [0, 1] but for
    ``imagenet``.

    Args:
        split: ``train``, ``validation`` or ``test``.
        validation_share: 0: there is no validation split.
        size: height and width that pictures are resized to: bilinearly, antialiased, whatever their aspect ratio.
        preprocessing: ``rgb``, ``imagenet`` or ``official``; see the functions of these names.
        logits: outputs of a model for each attribute; see `Attribute`.

    Attributes:
        labels: uint8, ``(N, 40)``: 1 where a face has an attribute.
        objectives: attribute -> yes or no, in the order of CelebA's lists.
        size: height and width of the pictures.
    """

    labels: np.ndarray

    def __init__(
        self, split: str, *, validation_share: float, size: tuple[int, int], preprocessing: str, logits: int
    ) -> None:
        check_split(split, validation_share, made=True)
        one_of("preprocessing", preprocessing, PREPROCESSING)
        self.objectives = dict.fromkeys(ATTRIBUTES, Attribute(logits))
        self.classes = {}
        self.split, self.size = split, size
        self._preprocessing = PREPROCESSING[preprocessing]

    @abstractmethod
    def picture(self, index: int) -> Tensor:
        """Return one picture as it is: uint8 ``(3, h, w)``."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, int]]:
        labels = dict(zip(ATTRIBUTES, self.labels[index].tolist(), strict=True))
        return self._preprocessing.prepare(self.picture(index), self.size), labels

    def to_look_at(self, item: Tensor) -> Tensor:
        """Return the picture in an input, without its preprocessing but for stretching and resizing."""
        return self._preprocessing.undo(item)


def rgb(picture: Tensor, size: tuple[int, int]) -> Tensor:
    """Return a picture, uint8 ``(3, h, w)``, as float32 ``(3, H, W)`` in [0, 1]."""
    return resize(picture, list(size), antialias=True).to(torch.float32) / 255


def imagenet(picture: Tensor, size: tuple[int, int]) -> Tensor:
    """Return a picture, uint8 ``(3, h, w)``, as float32 ``(3, H, W)``, each channel by ImageNet's mean and deviation.

    That centres and scales the inputs, without which a net as small as LeNet learns little of 40 attributes in some
    hundred steps; weights that were trained on ImageNet expect it.

    Example:
        >>> gray = torch.full((3, 8, 8), 128, dtype=torch.uint8)
        >>> [round(float(channel.mean()), 3) for channel in imagenet(gray, (4, 4))]
        [0.074, 0.205, 0.426]
    """
    return normalize(rgb(picture, size), list(IMAGENET_MEAN), list(IMAGENET_DEVIATION))


def official(picture: Tensor, size: tuple[int, int]) -> Tensor:
    """Return a picture, uint8 ``(3, h, w)``, as the code of Phan et al. has it: float32 ``(3, H, W)`` in [0, 1].

    That code goes back to Sener and Koltun: blue, green, red; less the mean of each; stretched so that the least and
    the largest value of the picture become 0 and 255, as ``scipy.misc.imresize`` did, which left SciPy in version 1.3;
    resized.

    Example:
        >>> dark, bright = torch.zeros(3, 8, 8, dtype=torch.uint8), torch.full((3, 8, 8), 9, dtype=torch.uint8)
        >>> bool((official(dark, (8, 8)) == official(bright, (8, 8))).all())
        True
    """
    shifted = picture.flip(0).to(torch.float64) - torch.tensor(MEAN, dtype=torch.float64)[:, None, None]
    low, high = shifted.aminmax()  # never equal: no two of the means differ by a whole number
    return rgb(((shifted - low) * (255 / (high - low)) + 0.5).clamp(0, 255).to(torch.uint8), size)


def _same(item: Tensor) -> Tensor:
    return item


def _reversed(item: Tensor) -> Tensor:
    return item.flip(0)


def _from_imagenet(item: Tensor) -> Tensor:
    """Return an item of `imagenet` as it was before: float32 ``(3, H, W)`` in [0, 1]."""
    mean, deviation = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_DEVIATION))
    return (item * deviation + mean).clamp(0, 1)  # the last digits may go beyond


def _ends(prepare: Prepare) -> tuple[float, float]:
    """Return the least and the largest value that preprocessing comes to: those of a black and a white picture."""
    low, high = prepare(torch.tensor([0, 255], dtype=torch.uint8).expand(3, 1, 2), (1, 2)).aminmax()
    return float(low), float(high)


@dataclass(frozen=True)
class Preprocessing:
    """How the picture of a face becomes the input of a model.

    Attributes:
        prepare: picture as it is read, uint8 ``(3, h, w)``, size -> input, float32 ``(3, H, W)``.
        words: the same for people.
        channels: what the numbers of a pixel are, in this order.
        range: the least and the largest value that an input can have.
        undo: input -> the picture in it, red, green and blue in [0, 1].
    """

    prepare: Prepare
    words: str = PLAIN
    channels: str = "RGB"
    range: tuple[float, float] = (0.0, 1.0)
    undo: Callable[[Tensor], Tensor] = _same


PREPROCESSING: Mapping[str, Preprocessing] = {
    "rgb": Preprocessing(rgb),
    "imagenet": Preprocessing(imagenet, _IMAGENET, range=_ends(imagenet), undo=_from_imagenet),
    "official": Preprocessing(official, _OFFICIAL, "BGR", undo=_reversed),
}
"""By name."""
