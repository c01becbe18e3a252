"""NYUv2: rooms, with the class, depth and normal of each pixel."""

from collections.abc import Sequence
from pathlib import Path

from flatmtl_bench.data.base import TaskDataset
from flatmtl_bench.data.dense import DenseDataset, files_or_rendered
from flatmtl_bench.data.folders import Layout
from flatmtl_bench.data.maps import DepthMap, Labels, NormalMap, Picture
from flatmtl_bench.data.scenes import NYUV2_CLASSES, Scenes

LAYOUT = Layout(
    "nyuv2",
    {
        "image": Picture(("image",)),
        "segmentation": Labels(("label",), NYUV2_CLASSES),
        "depth": DepthMap(("depth",)),
        "normals": NormalMap(("normal",)),
    },
    embedded="scenes",
    pictures={"train": 795, "val": 654},
)


class NYUv2(DenseDataset):
    """Rooms seen by a Kinect, 795 for training and 654 for testing, as prepared by Liu et al. (2019).

    Items are ``(picture, {"segmentation": ..., "depth": ..., "normals": ...})``: a float32 picture ``(3, H, W)`` in
    [0, 1]; int64 labels ``(H, W)`` of 13 classes, -1 where void; float32 depth ``(1, H, W)`` in metres, 0 where
    invalid; float32 unit normals ``(3, H, W)``, (0, 0, 0) where invalid. The files have 288x384 pixels; any other size
    is read as well. See `DenseDataset` for the arguments, the splits and the checks.

    References:
        - Silberman et al. (2012), *Indoor segmentation and support inference from RGBD images*, ECCV.
        - Eigen and Fergus (2015), *Predicting depth, surface normals and semantic labels with a common multi-scale
          convolutional architecture*, ICCV (the normals).
        - Liu et al. (2019), *End-to-end multi-task learning with attention*, CVPR (these files).
    """

    layout = LAYOUT


def nyuv2(
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
) -> TaskDataset:
    """Return one split of NYUv2, or of rendered rooms in its place.

    Args:
        split: ``train``, ``validation`` or ``test``.
        seed: of all that is random in the train split.
        root: folder of the data, or the one that has it as ``nyuv2``; by default ``data``.
        source: ``full`` reads the files, ``scenes`` renders rooms; ``auto`` is ``full`` if there are any.
        samples: number of pictures; None: all, or the usual number of rendered ones.
        validation_share: of the pictures in train that are held out.
        check: read every file to find what is wrong with it.
        augment: whether train pictures are enlarged, cropped and mirrored at random; the others never are.
        size: height and width of rendered pictures; None: the usual one.

    Raises:
        FileNotFoundError, ValueError: files are missing or not as they should be, or an option is wrong.
    """
    return files_or_rendered(
        NYUv2,
        Scenes,
        split,
        root=root,
        source=source,
        size=size,
        check=check,
        seed=seed,
        samples=samples,
        validation_share=validation_share,
        augment=augment,
    )
