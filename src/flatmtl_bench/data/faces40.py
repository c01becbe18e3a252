"""Faces that are drawn when asked for: data of the kind of CelebA without any files."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flatmtl_bench.choices import one_of, whole_number
from flatmtl_bench.data.attributes import ATTRIBUTES, AttributeDataset
from flatmtl_bench.data.base import SPLITS
from flatmtl_bench.data.faces.distribution import DISTRIBUTION, draw_margins
from flatmtl_bench.data.faces.face import CHANCE, Face

FIXED_SEED = 4040
FACES = {"train": 4_000, "validation": 500, "test": 1_000}
SMALLEST = 16  # pixels, below which a face is no more than a spot
WRONG = 0.04  # share of the labels that say nothing about the face
MEMORY = 2**28  # bytes of pictures that a data set keeps


class Faces40(AttributeDataset):
    """Drawn faces with the 40 attributes of CelebA.

    The attributes depend on each other as those of people do, and are about as frequent as in CelebA, from 2% bald to
    83% without a beard. Every one can be seen; most come by degrees, so that some faces are hard to tell. What says
    nothing about them varies: place, size, tilt and turn of the head, skin, eyes, clothes, background, light and noise.
    Of the labels, 4% are drawn from the frequency of the attribute alone, whatever the face looks like.

    What an index shows depends on nothing but the split, the index and the size: it is the same for all seeds, as the
    photographs of CelebA are, and for any number of samples. The same arguments give the same bytes, on any version of
    NumPy; no global random state is read or changed. The first pictures are kept once they are drawn, up to 256 MiB in
    each process.

    Args:
        split: ``train``, ``validation`` or ``test``.
        seed: changes nothing.
        root: None, as no files are read.
        source: ``faces40``, or ``auto``, which is the same.
        samples: number of faces. Default: 4,000 for train, 500 for validation, 1,000 for test.
        validation_share: 0: there is no validation split.
        size: height and width in pixels, each at least 16. A face fills the shorter side.
        preprocessing: see `AttributeDataset`, as for ``logits`` and the attributes.
        logits: outputs of a model for each attribute.

    References:
        - Liu et al. (2015), *Deep learning face attributes in the wild*, ICCV.

    Example:
        >>> data = Faces40("test", samples=10)
        >>> picture, targets = data[0]
        >>> picture.shape, len(targets), targets["Male"] in (0, 1)
        (torch.Size([3, 64, 64]), 40, True)
        >>> print(data)
        faces40 test: 10 drawn faces of 64 x 64 pixels, 40 attributes each
    """

    def __init__(
        self,
        split: str,
        *,
        seed: int = 0,
        root: str | Path | None = None,
        source: str = "auto",
        samples: int | None = None,
        validation_share: float = 0.1,
        size: Sequence[int] = (64, 64),
        preprocessing: str = "rgb",
        logits: int = 1,
    ) -> None:
        one_of("source of faces40", source, ("auto", "faces40"))
        whole_number("seed", seed, 0, 2**32)
        if root is not None:
            raise ValueError(f"faces40 are drawn and read no files, got root={str(root)!r}. Omit it.")
        if len(size) != 2:
            raise ValueError(f"size must be a height and a width, e.g. (64, 64), got {size}.")
        height, width = size
        whole_number("height", height, SMALLEST)
        whole_number("width", width, SMALLEST)
        super().__init__(
            split, validation_share=validation_share, size=(height, width), preprocessing=preprocessing, logits=logits
        )
        count = FACES[split] if samples is None else samples
        whole_number("samples", count, 1)
        margins = draw_margins(count, self._stream(0))
        self._seen = {name: np.clip(0.5 + 0.5 * margin, 0.0, 1.0) for name, margin in margins.items()}
        self._chance = self._stream(1).random_sample((count, len(CHANCE)))
        self.labels = draw_labels(margins, self._stream(2))
        self._kept = np.zeros((min(count, MEMORY // (3 * height * width)), 3, height, width), np.uint8)
        self._drawn = np.zeros(len(self._kept), bool)
        self.source = "faces40"

    def _stream(self, *numbers: int) -> np.random.RandomState:
        return np.random.RandomState([FIXED_SEED, SPLITS.index(self.split), *numbers])

    def picture(self, index: int) -> Tensor:
        """Return one picture as it is drawn: uint8 ``(3, H, W)``."""
        index = range(len(self))[index]
        if index >= len(self._kept):
            return torch.from_numpy(self._draw(index))
        if not self._drawn[index]:
            self._kept[index] = self._draw(index)
            self._drawn[index] = True
        return torch.from_numpy(self._kept[index])

    def _draw(self, index: int) -> np.ndarray:
        seen = {name: float(values[index]) for name, values in self._seen.items()}
        chance = dict(zip(CHANCE, self._chance[index].tolist(), strict=True))
        grain = np.frombuffer(self._stream(3, index).bytes(6 * self.size[0] * self.size[1]), np.uint8)
        one, other = grain.astype(np.float32).reshape(2, 3, *self.size)
        return Face(seen, chance, *self.size).draw((one + other) / 255 - 1)

    @property
    def fingerprint(self) -> str:
        """A short hash of the labels and of the first pictures."""
        digest = hashlib.sha256(self.labels.tobytes())
        for index in range(min(8, len(self))):
            digest.update(self.picture(index).numpy().tobytes())
        return digest.hexdigest()[:16]

    def __str__(self) -> str:
        height, width = self.size
        return f"faces40 {self.split}: {len(self):,} drawn faces of {height} x {width} pixels, 40 attributes each"


def draw_labels(margins: Mapping[str, np.ndarray], rng: np.random.RandomState) -> np.ndarray:
    """Return uint8 ``(N, 40)``: which face has which attribute, but for a few labels that say nothing about it."""
    labels = np.stack([margins[attribute] > 0 for attribute in ATTRIBUTES], axis=1)
    shares = np.array([DISTRIBUTION[attribute][0] for attribute in ATTRIBUTES])
    wrong, by_chance = np.moveaxis(rng.random_sample((len(labels), 2, len(ATTRIBUTES))), 1, 0)
    return np.where(wrong < WRONG, by_chance < shares, labels).astype(np.uint8)
