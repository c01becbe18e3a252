"""Data sets: each a `torch.utils.data.Dataset` with items ``(input, {task: target})``."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flatmtl_bench.choices import one_of
from flatmtl_bench.data.base import SPLITS, TaskDataset
from flatmtl_bench.data.celeba import celeba
from flatmtl_bench.data.cityscapes import cityscapes
from flatmtl_bench.data.faces40 import Faces40
from flatmtl_bench.data.multimnist import MultiMNIST
from flatmtl_bench.data.nyuv2 import nyuv2
from flatmtl_bench.data.scenes import Scenes, Streets
from flatmtl_bench.data.sheet import contact_sheet, prediction_sheet

__all__ = ["DATASETS", "SPLITS", "TaskDataset", "build", "contact_sheet", "prediction_sheet"]

DATASETS: dict[str, Callable[..., TaskDataset]] = {
    "multimnist": partial(MultiMNIST, "multimnist"),
    "multifashion": partial(MultiMNIST, "multifashion"),
    "multifashionmnist": partial(MultiMNIST, "multifashionmnist"),
    "celeba": celeba,
    "faces40": Faces40,
    "nyuv2": nyuv2,
    "scenes": Scenes,
    "cityscapes": cityscapes,
    "streets": Streets,
}


def build(name: str, split: str, *, seed: int = 0, root: str | Path | None = None, **options: Any) -> TaskDataset:
    """Return one split of the data set ``name``, a key of ``DATASETS``.

    ``split`` is ``train``, ``validation`` or ``test``. ``seed`` concerns the train split only, so runs of all
    seeds are judged on the same validation and test data. ``root`` is the folder of the data, by default
    ``data``. The ``options`` are those of the class behind the name, e.g. `MultiMNIST`.

    Raises:
        ValueError: an unknown name, split or option, a bad value, or a broken file.
        FileNotFoundError: the data are not there.
        ConnectionError: a download was asked for and failed.

    Example:
        >>> len(build("multimnist", "validation", source="mnist5k"))
        1000
    """
    one_of("dataset", name, DATASETS)
    one_of("split", split, SPLITS)
    known = [key for key in inspect.signature(DATASETS[name]).parameters if key not in ("split", "seed", "root")]
    if "check" not in known:  # what is made on the spot, or read whole anyway, has nothing to leave unchecked
        options.pop("check", None)
    for option in options:
        one_of(f"option of {name}", option, known)
    return DATASETS[name](split, seed=seed, root=root, **options)
