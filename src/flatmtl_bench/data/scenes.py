"""Rooms and streets that are rendered when asked for: data of the kind of NYUv2 and CityScapes without any files."""

import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from flatmtl_bench.choices import one_of, whole_number
from flatmtl_bench.data.augmentation import AugmentedDataset, Zoom, show
from flatmtl_bench.data.base import SPLITS, check_split
from flatmtl_bench.data.rendering import flaws
from flatmtl_bench.data.rendering.caster import Rendering, World, render
from flatmtl_bench.data.rendering.draws import Draws
from flatmtl_bench.data.rendering.rooms import room
from flatmtl_bench.data.rendering.streets import street
from flatmtl_bench.metrics import Depth, Normals, Objective, Segmentation
from flatmtl_bench.metrics.segmentation import VOID

NYUV2_CLASSES = (
    *("bed", "books", "ceiling", "chair", "floor", "furniture", "objects"),
    *("picture", "sofa", "table", "tv", "wall", "window"),
)
CITYSCAPES_CLASSES = ("flat", "construction", "object", "nature", "sky", "human", "vehicle")
LARGEST_DISPARITY, NEAREST_DEPTH = 32257 / 65535, 4.0
"""The largest value in CityScapes, 126 pixels in 16 bits, is a depth of 4 m: 0.22 m between cameras of 2262 pixels."""

FIXED_SEED = 1989  # of everything that is the same for all run seeds
VERSION = 1  # of what the pictures show: goes up when any of them changes
PICTURES = {"train": 300, "validation": 50, "test": 100}
MEMORY = 2**28  # bytes of pictures that a data set keeps
Item = tuple[Tensor, dict[str, Tensor]]


@cache
def _pictures(_name: str, _split: str, _size: tuple[int, int]) -> dict[int, Item]:
    """Return where the pictures of a kind, split and size are kept, by their index."""
    return {}


class RenderedDataset(AugmentedDataset):
    """Pictures of random worlds; the base of `Scenes` and `Streets`.

    What an index shows depends on nothing but the split and the index: it is the same world at any size, and the same
    picture for all seeds, from which only crops and mirror images are drawn. The pictures that were rendered first are
    kept for all data sets of one kind, split and size, up to 256 MiB in each process, so that the runs of a sweep share
    them; whether one is kept makes no difference but in time.
    """

    name: ClassVar[str]
    kind: ClassVar[str]
    usual_size: ClassVar[tuple[int, int]]
    zoom: Zoom = "divide"

    def __init__(
        self,
        split: str,
        *,
        seed: int = 0,
        root: str | Path | None = None,
        source: str = "auto",
        samples: int | None = None,
        validation_share: float = 0.1,
        size: Sequence[int] | None = None,
        augment: bool = True,
    ) -> None:
        one_of(f"source of {self.name}", source, ("auto", self.name))
        check_split(split, validation_share, seed, made=True)
        if root is not None:
            raise ValueError(f"{self.name} are rendered and read no files, got root={str(root)!r}. Omit it.")
        samples = PICTURES[split] if samples is None else samples
        whole_number("samples", samples, 1)
        self.size = _checked(self.usual_size if size is None else size)
        self.split, self.source, self.seed, self.samples = split, self.name, seed, samples
        self.augment = augment and split == "train"
        self._kept = _pictures(self.name, split, self.size)

    @abstractmethod
    def draw(self, draws: Draws) -> Item:
        """Return a picture, uint8, and its targets."""

    @property
    def fingerprint(self) -> str:
        """A short hash of what these pictures are made from."""
        made_from = (self.name, VERSION, self.split, self.samples, self.size)
        return hashlib.sha256(repr(made_from).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Item:
        index = range(self.samples)[index]
        picture, targets = self._rendered(index)
        view = self.view(index, self.size)
        parts = {task: target[(..., *view.window)].clone() for task, target in targets.items()}  # not what is kept
        return show(view, picture[(..., *view.window)].to(torch.float32) / 255, parts, self.objectives, self.zoom)

    def _rendered(self, index: int) -> Item:
        if index in self._kept:
            return self._kept[index]
        picture, targets = self.draw(Draws(FIXED_SEED, SPLITS.index(self.split), index))
        each = sum(part.nbytes for part in (picture, *targets.values()))
        if (len(self._kept) + 1) * each <= MEMORY:
            self._kept[index] = picture, targets
        return picture, targets

    def __str__(self) -> str:
        height, width = self.size
        return f"{self.name} {self.split}: {self.samples:,} {self.kind}, rendered at {height} x {width}"


class Scenes(RenderedDataset):
    """Furnished rooms with the tasks of NYUv2: semantic segmentation, depth and surface normals.

    Rooms, their furniture, colours, patterns and lamps are random, as are the place, the direction and the focal length
    of the camera, which stands at one wall. They are made of boxes, balls, cylinders and planes, so that all targets
    are exact. Items are ``(picture, {"segmentation": ..., "depth": ..., "normals": ...})``:

    - picture: float32 ``(3, H, W)`` in [0, 1]; 8-bit values with noise.
    - segmentation: int64 ``(H, W)``, the 13 classes of NYUv2 in its order; -1, void, at the borders of objects and in
      random patches, together about a sixth of the pixels. As there, doors count to the wall, curtains to the window.
    - depth: float32 ``(1, H, W)``, the distance along the optical axis in metres; 0, invalid, on many windows and
      screens, on what is nearly parallel to the ray or very dark, and in random patches.
    - normals: float32 ``(3, H, W)``, unit vectors that face the camera: x to the right, y up, z towards the camera, so
      a wall straight ahead has (0, 0, 1); (0, 0, 0), invalid, where the depth is, and in further patches.

    Args:
        split: ``train``, ``validation`` or ``test``, each with rooms of its own.
        seed: of the augmentation; the pictures are the same for all seeds.
        root: None, as no files are read.
        source: ``auto`` or ``scenes``, which is the same.
        samples: number of pictures; by default 300, 50 and 100.
        validation_share: 0 says that there is no validation split; else without effect, as nothing is held out.
        size: height and width, multiples of 32.
        augment: whether train pictures are enlarged, cropped and mirrored at random; see `augmentation`. The others
            never are.

    References:
        - Silberman et al. (2012), *Indoor segmentation and support inference from RGBD images*, ECCV: NYUv2.
        - Couprie et al. (2013), *Indoor semantic segmentation using depth information*, ICLR: the 13 classes.

    Example:
        >>> scenes = Scenes("test", samples=2)
        >>> picture, targets = scenes[0]
        >>> {task: tuple(target.shape) for task, target in targets.items()}
        {'segmentation': (64, 64), 'depth': (1, 64, 64), 'normals': (3, 64, 64)}
        >>> print(scenes)
        scenes test: 2 rooms, rendered at 64 x 64
    """

    name, kind, usual_size = "scenes", "rooms", (64, 64)
    classes: Mapping[str, tuple[str, ...]] = {"segmentation": NYUV2_CLASSES}
    objectives: Mapping[str, Objective] = {
        "segmentation": Segmentation(NYUV2_CLASSES),
        "depth": Depth(),
        "normals": Normals(),
    }

    def draw(self, draws: Draws) -> Item:
        """Return a picture of a random room, uint8, and its targets."""
        world, camera = room(draws)
        seen = render(world, camera, *self.size)
        picture = flaws.photograph(draws, seen.picture)
        labels = label_map(world, seen, NYUV2_CLASSES)
        dark = picture.max(axis=0) < 10
        grazed = flaws.grazed(camera, seen.normals, 0.12)
        holes = dark | grazed | flaws.blobs(draws, *self.size, draws.between(0, 0.08))
        for label, probability in (("window", 0.6), ("tv", 0.5)):
            if draws.chance(probability):
                holes |= labels == NYUV2_CLASSES.index(label)
        no_normal = holes | flaws.blobs(draws, *self.size, draws.between(0, 0.05))
        void = _borders(labels, self.size) | flaws.blobs(draws, *self.size, draws.between(0, 0.13))
        return torch.from_numpy(picture), {
            "segmentation": torch.from_numpy(np.where(void, VOID, labels)),
            "depth": torch.from_numpy(np.where(holes, np.float32(0), seen.depth)[None]),
            "normals": torch.from_numpy(np.where(no_normal, np.float32(0), seen.normals)),
        }


class Streets(RenderedDataset):
    """Streets seen from a car, with the tasks of CityScapes: semantic segmentation and inverse depth.

    Houses, trees, posts, people, vehicles, the weather and the camera are random; see `Scenes`. Items are
    ``(picture, {"segmentation": ..., "depth": ...})``:

    - picture: float32 ``(3, H, W)`` in [0, 1]; 8-bit values with noise.
    - segmentation: int64 ``(H, W)``, the 7 categories of CityScapes in its order; -1, void, on the bonnet of the
      camera's car at the lower border, at some borders of objects and in random patches.
    - depth: float32 ``(1, H, W)``, the disparity, 1.97 m divided by the distance along the optical axis, up to 0.4922
      (4 m) as in the pre-processed files of CityScapes; 0, invalid or infinitely far, in the sky, closer than 4 m, on
      the bonnet, at the left border, which the right camera does not see, and in random patches.

    Args:
        split: ``train``, ``validation`` or ``test``, each with streets of its own.
        seed: of the augmentation; the pictures are the same for all seeds.
        root: None, as no files are read.
        source: ``auto`` or ``streets``, which is the same.
        samples: number of pictures; by default 300, 50 and 100.
        validation_share: 0 says that there is no validation split; else without effect, as nothing is held out.
        size: height and width, multiples of 32; the bonnet is where it should be if the width is twice the height.
        augment: whether train pictures are enlarged, cropped and mirrored at random.
        disparity: what enlarging by a scale does to the disparity: ``multiply``, which is right, or ``divide``, as
            public training scripts do.

    References:
        - Cordts et al. (2016), *The Cityscapes dataset for semantic urban scene understanding*, CVPR.

    Example:
        >>> picture, targets = Streets("train")[0]
        >>> {task: tuple(target.shape) for task, target in targets.items()}
        {'segmentation': (64, 128), 'depth': (1, 64, 128)}
    """

    name, kind, usual_size = "streets", "streets", (64, 128)
    classes: Mapping[str, tuple[str, ...]] = {"segmentation": CITYSCAPES_CLASSES}
    objectives: Mapping[str, Objective] = {"segmentation": Segmentation(CITYSCAPES_CLASSES), "depth": Depth()}

    def __init__(
        self,
        split: str,
        *,
        seed: int = 0,
        root: str | Path | None = None,
        source: str = "auto",
        samples: int | None = None,
        validation_share: float = 0.1,
        size: Sequence[int] | None = None,
        augment: bool = True,
        disparity: Zoom = "multiply",
    ) -> None:
        one_of("disparity", disparity, ("multiply", "divide"))
        super().__init__(
            split,
            seed=seed,
            root=root,
            source=source,
            samples=samples,
            validation_share=validation_share,
            size=size,
            augment=augment,
        )
        self.zoom = disparity

    def draw(self, draws: Draws) -> Item:
        """Return a picture of a random street, uint8, and its targets."""
        world, camera = street(draws)
        seen = render(world, camera, *self.size)
        picture = flaws.photograph(draws, seen.picture)
        labels = label_map(world, seen, CITYSCAPES_CLASSES, background="sky")
        holes = (labels == VOID) | flaws.blobs(draws, *self.size, draws.between(0, 0.2))
        holes[:, : int(self.size[1] * draws.between(0.02, 0.06))] = True
        disparity = NEAREST_DEPTH * LARGEST_DISPARITY / seen.depth
        disparity[holes | (disparity > LARGEST_DISPARITY)] = 0
        void = flaws.blobs(draws, *self.size, draws.between(0, 0.08))
        if draws.chance(0.5):
            void |= _borders(labels, self.size)
        return torch.from_numpy(picture), {
            "segmentation": torch.from_numpy(np.where(void, VOID, labels)),
            "depth": torch.from_numpy(disparity[None]),
        }


def label_map(world: World, seen: Rendering, classes: tuple[str, ...], background: str | None = None) -> np.ndarray:
    """Return the class at each pixel, int64 ``(H, W)``; void where a part has none."""
    numbers = {None: VOID, **{name: number for number, name in enumerate(classes)}}
    table = np.array([*(numbers[part.label] for part in world.parts), numbers[background]], np.int64)
    return table[seen.part]  # the last one is that of -1, no part


def _borders(labels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return borders of a width that grows with the picture: what an annotator leaves out."""
    return flaws.borders(labels, max(1, min(size) // 96))


def _checked(size: Sequence[int]) -> tuple[int, int]:
    """Return height and width, which are multiples of 32."""
    if len(size) != 2:
        raise ValueError(f"size must be height and width, got {size!r}.")
    for side in size:
        whole_number("each side of size", side, 32)
        if side % 32:
            raise ValueError(
                f"each side of size must be a multiple of 32, got {size!r}: SegNet halves them five times."
            )
    return size[0], size[1]
