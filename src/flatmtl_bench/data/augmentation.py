"""Random crops, zooms and mirror images of pictures whose targets are maps, changed along with them."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from flatmtl_bench.data.base import TaskDataset
from flatmtl_bench.metrics import Depth, Normals, Objective, Segmentation
from flatmtl_bench.randomness import derived_seed
from flatmtl_bench.recipes.config import Disparity

SCALES = (1.0, 1.2, 1.5)
Zoom = Disparity
"""What becomes of a depth when the picture is enlarged by a scale: it is divided by it, an inverse depth multiplied."""


@dataclass(frozen=True)
class View:
    """A part of a picture, enlarged to the size of the whole one, perhaps mirrored.

    The methods take what the picture or a target shows within ``window`` and return it as it looks in the view. The
    four corners of the part become the four corners of the whole, and both pictures and targets are read at the same
    points: pictures and normals are interpolated there, labels and depths are those of the nearest pixel.

    Attributes:
        size: height and width of the whole picture.
        scale: by which the part is enlarged.
        top, left: of the part, in pixels.
        mirrored: whether left and right are exchanged.
    """

    size: tuple[int, int]
    scale: float = 1.0
    top: int = 0
    left: int = 0
    mirrored: bool = False

    @classmethod
    def draw(cls, size: tuple[int, int], generator: torch.Generator) -> "View":
        """Return a view at random: one of three scales, any place, mirrored or not, each as likely as the others."""
        scale = SCALES[_below(len(SCALES), generator)]
        (height, width), (h, w) = size, _part(size, scale)
        top, left = _below(height - h + 1, generator), _below(width - w + 1, generator)
        return cls(size, scale, top, left, mirrored=bool(_below(2, generator)))

    @property
    def window(self) -> tuple[slice, slice]:
        """The rows and columns of the part."""
        height, width = _part(self.size, self.scale)
        return slice(self.top, self.top + height), slice(self.left, self.left + width)

    def picture(self, part: Tensor) -> Tensor:
        """Return a floating-point map ``(C, h, w)``, interpolated bilinearly, as ``(C, H, W)``."""
        if self.scale != 1.0:
            part = interpolate(part[None], self.size, mode="bilinear", align_corners=True)[0]
        return part.flip(-1) if self.mirrored else part

    def nearest(self, part: Tensor) -> Tensor:
        """Return a map ``(..., h, w)`` of any type as ``(..., H, W)``, each pixel that of the nearest point.

        It is the nearest of the points that `picture` interpolates at. The ``nearest`` of torch's `interpolate` has
        another grid, and shifts labels by up to a pixel against the picture.
        """
        if self.scale != 1.0:
            rows, columns = (_closest(*sides) for sides in zip(part.shape[-2:], self.size, strict=True))
            part = part[..., rows[:, None], columns]
        return part.flip(-1) if self.mirrored else part

    def depth(self, part: Tensor, zoom: Zoom = "divide") -> Tensor:
        """Return a depth map ``(1, h, w)``, in which 0 is invalid, as ``(1, H, W)``."""
        depth = self.nearest(part)
        return depth / self.scale if zoom == "divide" else depth * self.scale

    def normals(self, part: Tensor) -> Tensor:
        """Return unit normals ``(3, h, w)``, or (0, 0, 0) where invalid, as ``(3, H, W)``.

        Normals are interpolated between the valid ones and have unit length again. A pixel is valid if the nearest
        point is (and its neighbours do not cancel), so that holes neither grow nor shrink. Directions stay: a picture
        that is s times as large is that of a scene of 1 / s the size through a lens of s times the focal length.
        """
        if self.scale != 1.0:
            valid = View(self.size, self.scale).nearest(part.any(dim=0, keepdim=True))
            mean = interpolate(part[None], self.size, mode="bilinear", align_corners=True)[0]
            part = unit_length(mean) * valid  # an invalid normal is zero: it changes the length, not the direction
        if not self.mirrored:
            return part
        x, others = part.flip(-1).split([1, 2])
        return torch.cat([-x, others])


def unit_length(vectors: Tensor) -> Tensor:
    """Return vectors ``(3, H, W)`` with length 1, or 0 where they are zero: many times faster than torch's `normalize`.

    Example:
        >>> unit_length(torch.tensor([3.0, 0.0, 4.0]).reshape(3, 1, 1)).flatten()
        tensor([0.6000, 0.0000, 0.8000])
    """
    length = vectors.square().sum(dim=0).sqrt()
    return vectors / length.clamp_min(torch.finfo(length.dtype).tiny)


def _below(bound: int, generator: torch.Generator) -> int:
    """Return one of 0, ..., bound - 1, at random."""
    return int(torch.randint(bound, (), generator=generator))


def _part(size: tuple[int, int], scale: float) -> tuple[int, int]:
    """Return the height and width of what fills the size when it is enlarged by the scale."""
    height, width = (max(1, int(side / scale)) for side in size)
    return height, width


def _closest(small: int, large: int) -> Tensor:
    """Return for each position along the large side the nearest along the small one; the ends fall on the ends."""
    return torch.linspace(0, small - 1, large, dtype=torch.float64).round().long()


TARGETS: dict[type[Objective], Callable[[View, Tensor, Zoom], Tensor]] = {
    Segmentation: lambda view, part, _: view.nearest(part),
    Depth: View.depth,
    Normals: lambda view, part, _: view.normals(part),
}
"""How the target of an objective looks in a view."""


def show(
    view: View,
    picture: Tensor,
    targets: Mapping[str, Tensor],
    objectives: Mapping[str, Objective],
    zoom: Zoom = "divide",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a picture and its targets, of which the part within ``view.window`` is given, as they look in a view.

    Args:
        view: which part, and how it is shown.
        picture: ``(C, h, w)``, floating.
        targets: task -> labels ``(h, w)``, depth ``(1, h, w)`` or normals ``(3, h, w)``.
        objectives: task -> what it is trained by, which tells what kind of target it has.
        zoom: what becomes of the depth.

    Raises:
        TypeError: a target is of a kind that has no view.

    Example:
        >>> from flatmtl_bench.metrics import Segmentation
        >>> view = View((2, 2), mirrored=True)
        >>> targets = {"seg": torch.tensor([[0, 1], [0, 1]])}
        >>> picture, seen = show(view, torch.rand(3, 2, 2), targets, {"seg": Segmentation(("wall", "sky"))})
        >>> seen["seg"].tolist()
        [[1, 0], [1, 0]]
    """
    _check_kinds(targets, objectives)
    seen = {task: TARGETS[type(objectives[task])](view, part, zoom) for task, part in targets.items()}
    return view.picture(picture), seen


def _check_kinds(targets: Iterable[str], objectives: Mapping[str, Objective]) -> None:
    """Raise if a target is of a kind that has no view."""
    for task in targets:
        if type(objectives[task]) not in TARGETS:
            known = ", ".join(kind.__name__ for kind in TARGETS)
            raise TypeError(
                f"the target of task {task!r} is of {type(objectives[task]).__name__}, which cannot be cropped and "
                f"mirrored; expected {known}. Turn the augmentation off (augment=False)."
            )


def augment(
    picture: Tensor,
    targets: Mapping[str, Tensor],
    objectives: Mapping[str, Objective],
    generator: torch.Generator,
    zoom: Zoom = "divide",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a whole picture and its targets, enlarged, cropped and mirrored at random; see `View` and `show`.

    A scale s is drawn from 1, 1.2 and 1.5; a part of ``int(H / s)`` by ``int(W / s)`` pixels at any place is resized
    to the size of the whole; depth is divided by s. With probability 1/2 left and right are exchanged, and the first
    component of the normals changes its sign. All numbers come from the generator. The augmentation of Liu et al.
    (2019), *End-to-end multi-task learning with attention*, CVPR; in contrast to their code normals are of unit
    length after it, invalid pixels have no part in their neighbours, and labels lie where the picture does.

    Raises:
        TypeError: a target is of a kind that has no view.
    """
    _check_kinds(targets, objectives)
    view = View.draw((picture.shape[-2], picture.shape[-1]), generator)
    parts = {task: target[(..., *view.window)] for task, target in targets.items()}
    return show(view, picture[(..., *view.window)], parts, objectives, zoom)


def item_generator(seed: int, epoch: int, index: int) -> torch.Generator:
    """Return the random numbers of one item in one epoch: the same in whichever process it is loaded."""
    return torch.Generator().manual_seed(derived_seed(seed, epoch, 1 + index))  # without the 1: the epoch's order


class AugmentedDataset(TaskDataset):
    """A data set that may show its items differently in each epoch.

    Attributes:
        augment: whether it does.
        seed: of the random numbers.
        epoch: whose items these are.
    """

    augment: bool
    seed: int
    epoch: int = 0

    def start_epoch(self, epoch: int) -> None:
        """Let the items be those of an epoch; loader processes that start later see it."""
        self.epoch = epoch

    @property
    def clean(self) -> "AugmentedDataset":
        """The same items as they are."""
        if not self.augment:
            return self
        plain = copy.copy(self)
        plain.augment = False
        return plain

    def view(self, index: int, size: tuple[int, int]) -> View:
        """Return how an item of a size is shown in this epoch."""
        return View.draw(size, item_generator(self.seed, self.epoch, index)) if self.augment else View(size)
