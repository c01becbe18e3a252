"""CityScapes: streets, with the class and the disparity of each pixel."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from flatmtl_bench.choices import one_of
from flatmtl_bench.data.augmentation import Zoom
from flatmtl_bench.data.base import TaskDataset
from flatmtl_bench.data.dense import DenseDataset, files_or_rendered
from flatmtl_bench.data.folders import Layout
from flatmtl_bench.data.maps import DepthMap, Labels, Picture
from flatmtl_bench.data.scenes import CITYSCAPES_CLASSES, Streets

LAYOUT = Layout(
    "cityscapes",
    {
        "image": Picture(("image",)),
        "segmentation": Labels(("label_7", "label"), CITYSCAPES_CLASSES),
        "depth": DepthMap(("depth",)),
    },
    embedded="streets",
    pictures={"train": 2_975, "val": 500},
)


class CityScapes(DenseDataset):
    """Streets seen from a car, 2,975 for training and 500 for testing, as prepared by Liu et al. (2019).

    Items are ``(picture, {"segmentation": ..., "depth": ...})``: a float32 picture ``(3, H, W)`` in [0, 1]; int64
    labels ``(H, W)`` of 7 classes, -1 where void; float32 inverse depth (normalised disparity) ``(1, H, W)``, 0 where
    invalid or infinitely far. The files have 128x256 pixels; any other size is read as well. Labels are read from
    ``label_7``, or from ``label`` where there is no such folder. See `DenseDataset` for the other arguments, the
    splits and the checks.

    Args:
        disparity: what a zoom by s does to a disparity: ``multiply`` it by s, as what is s times closer has s times the
            disparity; ``divide`` it, as the authors' code does, which takes it for a depth.

    References:
        - Cordts et al. (2016), *The Cityscapes dataset for semantic urban scene understanding*, CVPR.
        - Liu et al. (2019), *End-to-end multi-task learning with attention*, CVPR (these files).
    """

    layout = LAYOUT

    def __init__(self, split: str, folder: str | Path, *, disparity: Zoom = "multiply", **options: Any) -> None:
        one_of("disparity", disparity, get_args(Zoom))
        super().__init__(split, folder, **options)
        self.zoom = disparity


def cityscapes(
    split: str,
    *,
    seed: int = 0,
    root: str | Path | None = None,
    source: str = "auto",
    samples: int | None = None,
    validation_share: float = 0.1,
    check: bool = True,
    augment: bool = True,
    size: Sequence[int] | None = None,
    disparity: Zoom = "multiply",
) -> TaskDataset:
    """Return one split of CityScapes, or of rendered streets in its place.

    Args:
        split: ``train``, ``validation`` or ``test``.
        seed: of all that is random in the train split.
        root: folder of the data, or the one that has it as ``cityscapes``; by default ``data``.
        source: ``full`` reads the files, ``streets`` renders streets; ``auto`` is ``full`` if there are any.
        samples: number of pictures; None: all, or the usual number of rendered ones.
        validation_share: of the pictures in train that are held out.
        check: read every file to find what is wrong with it.
        augment: whether train pictures are enlarged, cropped and mirrored at random; the others never are.
        size: height and width of rendered pictures; None: the usual one.
        disparity: ``multiply`` or ``divide``, see `CityScapes`.

    Raises:
        FileNotFoundError, ValueError: files are missing or not as they should be, or an option is wrong.
    """
    return files_or_rendered(
        CityScapes,
        Streets,
        split,
        root=root,
        source=source,
        size=size,
        check=check,
        seed=seed,
        samples=samples,
        validation_share=validation_share,
        augment=augment,
        disparity=disparity,
    )
