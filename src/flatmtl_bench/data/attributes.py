"""Pictures of faces with attributes: what photographs and drawings have in common."""

from abc import abstractmethod
from typing import get_args

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2.functional import resize

from flatmtl_bench.choices import one_of
from flatmtl_bench.data.base import TaskDataset, check_split
from flatmtl_bench.data.faces.distribution import DISTRIBUTION
from flatmtl_bench.metrics import Attribute
from flatmtl_bench.recipes.config import Preprocessing

ATTRIBUTES = tuple(DISTRIBUTION)
"""The names in the order of CelebA's lists."""

MEAN = (73.158, 82.909, 72.392)  # blue, green, red; subtracted by the authors' code


class AttributeDataset(TaskDataset):
    """Pictures of faces, each with 40 attributes; each attribute is a task: does the face have it?

    Items are ``(picture, {attribute: 0 or 1})`` with a float32 picture of shape ``(3, H, W)`` in [0, 1].

    Args:
        split: ``train``, ``validation`` or ``test``.
        validation_share: 0: there is no validation split.
        size: height and width that pictures are resized to: bilinearly, antialiased, whatever their aspect ratio.
        preprocessing: ``rgb``, or ``official``; see the function `official`.
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
        one_of("preprocessing", preprocessing, get_args(Preprocessing))
        self.objectives = dict.fromkeys(ATTRIBUTES, Attribute(logits))
        self.classes = {}
        self.split, self.size = split, size
        self._prepare = official if preprocessing == "official" else rgb

    @abstractmethod
    def picture(self, index: int) -> Tensor:
        """Return one picture as it is: uint8 ``(3, h, w)``."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, int]]:
        labels = dict(zip(ATTRIBUTES, self.labels[index].tolist(), strict=True))
        return self._prepare(self.picture(index), self.size), labels


def rgb(picture: Tensor, size: tuple[int, int]) -> Tensor:
    """Return a picture, uint8 ``(3, h, w)``, as float32 ``(3, H, W)`` in [0, 1]."""
    return resize(picture, list(size), antialias=True).to(torch.float32) / 255


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
