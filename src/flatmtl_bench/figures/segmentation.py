"""What models say about each pixel, beside the truth: figure 4 of Phan et al. (2025)."""

from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure as Drawing
from matplotlib.image import imread, imsave
from matplotlib.patches import Patch
from torch import Tensor

from flatmtl_bench import assembly
from flatmtl_bench.analysis.trained import Trained, trained
from flatmtl_bench.choices import whole_number
from flatmtl_bench.data.base import TaskDataset
from flatmtl_bench.data.painting import answer, class_colour, paint
from flatmtl_bench.figures.base import Figure, Record
from flatmtl_bench.figures.style import grid, where
from flatmtl_bench.metrics import Segmentation
from flatmtl_bench.metrics.segmentation import VOID
from flatmtl_bench.reports.reading import Run

HEIGHT = 1.3
"""Of a picture, in inches."""
NAME = 1.15
"""Width of a name in the legend, in inches."""
PALE = 0.65
"""Share of white in the colours of predictions where there is no label."""
NO_CLASS = 255
"""What stands for a pixel without a label in a picture of class numbers."""


@dataclass(frozen=True)
class SegmentationFigure(Figure):
    """Pictures, true classes of their pixels, and those that each run predicts; runs with a segmentation task."""

    train_picture: int = 0
    """Training picture that is shown as the net was given it in the first epoch, and as it was before."""
    pictures: tuple[int, ...] = (0, 1)
    """Test pictures."""
    seed: int = 0
    """Of the augmentation, the same for all runs."""

    def measure(self, run: Run) -> Iterator[Record]:
        """Yield the picture, the truth and the prediction of each row.

        Pictures are PNG in base64. In those of true and predicted classes a pixel is the number of its class, 255
        where there is no label.
        """
        test = trained(run, "test", device=self.device)
        objectives = {task: kind for task, kind in test.objectives.items() if isinstance(kind, Segmentation)}
        if not objectives:
            raise ValueError(
                f"{run.path} has no segmentation task; its tasks are {', '.join(test.tasks)}. Name runs on nyuv2, "
                "cityscapes, scenes or streets, which have one."
            )
        for title, model, index in self._rows(run, test):
            picture, truth = model.dataset[index]
            outputs = model.outputs([index])[index]
            for task, objective in objectives.items():
                yield {
                    "epoch": model.epoch,
                    "task": task,
                    "row": title,
                    "classes": list(objective.classes),
                    "picture": _png((picture * 255).round()),
                    "truth": _png(_class_numbers(truth[task])),
                    "prediction": _png(_class_numbers(answer(objective, outputs[task]))),
                }

    def _rows(self, run: Run, test: Trained) -> Iterator[tuple[str, Trained, int]]:
        """Yield the title of each row, the model with the data that it is from, and its number there."""
        augmented = assembly.dataset(replace(run.config, seed=self.seed), "train")
        augmented.start_epoch(1)
        _check("--train-picture", self.train_picture, augmented)
        if augmented.clean is not augmented:
            yield "training,\naugmented", replace(test, dataset=augmented), self.train_picture
        yield "training,\noriginal", replace(test, dataset=augmented.clean), self.train_picture
        for index in self.pictures:
            _check("--pictures", index, test.dataset)
            yield f"unseen\n{index}", test, index

    def draw(self, records: Sequence[Record]) -> Drawing:
        """Return a row for each picture, with a column for each run."""
        rows = list(dict.fromkeys((record["data"], record["task"], record["row"]) for record in records))
        runs = list(dict.fromkeys((record["method"], record["seed"]) for record in records))
        pictures = [_picture(record["picture"]) for record in records]
        aspect = max(picture.shape[1] / picture.shape[0] for picture in pictures)
        names = [f"{method}\nseed {seed}" for method, seed in runs]
        one = len({(data, task) for data, task, _ in rows}) == 1
        labels = [row if one else f"{data}, {task}\n{row}" for data, task, row in rows]
        size = (HEIGHT * aspect + 0.15, HEIGHT + 0.2)
        drawing, axes = grid(labels, ["input", "truth", *names], size=size)
        for axis in axes.flat:
            axis.set(xticks=[], yticks=[])
            axis.grid(visible=False)
        for i, (data, task, row) in enumerate(rows):
            some = where(records, data=data, task=task, row=row)
            _draw_row(axes[i], some, runs)
        _legend(drawing, records)
        return drawing


def _draw_row(axes: Any, records: Sequence[Record], runs: Sequence[tuple[str, int]]) -> None:
    """Draw one picture, its truth, and the prediction of each run that has one."""
    first = records[0]
    truth = _labels(first["truth"])
    axes[0].imshow(_picture(first["picture"]))
    axes[1].imshow(_painted(truth, first["classes"]), interpolation="nearest")
    for axis, (method, seed) in zip(axes[2:], runs, strict=True):
        for record in where(records, method=method, seed=seed):
            predicted = _labels(record["prediction"])
            painted = _painted(predicted, record["classes"])
            painted[truth == VOID] = PALE + (1 - PALE) * painted[truth == VOID]
            axis.imshow(painted, interpolation="nearest")
            axis.set_xlabel(_right(predicted, truth), labelpad=2)


def _painted(labels: Tensor, classes: Sequence[str]) -> np.ndarray:
    """Return classes as a picture ``(H, W, 3)``."""
    return paint(Segmentation(tuple(classes)), labels, farthest=1.0)


def _right(predicted: Tensor, truth: Tensor) -> str:
    """Return in words how many of the labelled pixels are right."""
    labelled = truth != VOID
    if not labelled.any():
        return "no labels"
    return f"{(predicted == truth)[labelled].double().mean().item():.0%} right"


def _legend(drawing: Drawing, records: Sequence[Record]) -> None:
    """Put the colours of the classes below a drawing."""
    classes = dict.fromkeys((k, name) for record in records for k, name in enumerate(record["classes"]))
    colours: Any = {k: class_colour(k) for k, _ in classes}
    keys = [Patch(facecolor=colours[k], edgecolor="black", linewidth=0.3, label=name) for k, name in classes]
    keys.append(Patch(facecolor="white", edgecolor="black", hatch="//////", label="no label"))
    columns = max(1, int(drawing.get_figwidth() / NAME))
    title = "Without a label: hatched in the truth, pale in predictions.\nRight: share of the labelled pixels."
    drawing.legend(handles=keys, loc="outside lower center", ncols=min(len(keys), columns), title=title)


def _check(flag: str, index: int, dataset: TaskDataset) -> None:
    """Raise a `ValueError` unless a data set has such an item."""
    whole_number(f"{flag} ({dataset.split} pictures)", index, 0, len(dataset))


def _class_numbers(labels: Tensor) -> Tensor:
    """Return class numbers as a picture ``(1, H, W)``."""
    if labels.max() >= NO_CLASS:
        raise ValueError(f"a class has the number {int(labels.max())}; expected fewer than {NO_CLASS} classes.")
    return labels.where(labels != VOID, NO_CLASS).unsqueeze(0)


def _labels(png: str) -> Tensor:
    """Return the class numbers ``(H, W)`` that a picture of them has; the inverse."""
    numbers = torch.from_numpy(_picture(png)[..., 0]).long()
    return numbers.where(numbers != NO_CLASS, VOID)


def _png(picture: Tensor) -> str:
    """Return a picture ``(1, H, W)`` or ``(3, H, W)`` of numbers from 0 to 255 as PNG in base64."""
    file = BytesIO()
    imsave(file, picture.to(torch.uint8).expand(3, -1, -1).movedim(0, -1).numpy(), format="png")
    return b64encode(file.getvalue()).decode()


def _picture(png: str) -> np.ndarray:
    """Return the picture, ``(H, W, 3)``, uint8; the inverse."""
    return (imread(BytesIO(b64decode(png)))[..., :3] * 255).round().astype(np.uint8)
