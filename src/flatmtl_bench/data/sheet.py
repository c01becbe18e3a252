"""Contact sheets: a few items of a data set on one page, to see with one's own eyes what a model is given."""

import os
import tempfile
import textwrap
from collections.abc import Sized
from pathlib import Path
from typing import Any, cast

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.data import Dataset

SIDE, CELL, LINE = 1.08, 1.2, 0.18  # of a picture, its place and a line of text, in inches
DPI = 100  # 36x36 pictures become 108x108: whole pixels


def contact_sheet(
    dataset: Dataset[tuple[Tensor, dict[str, Any]]],
    path: str | Path,
    rows: int = 8,
    columns: int = 8,
    *,
    seed: int = 0,
    overwrite: bool = False,
) -> Path:
    """Write a PNG of ``rows * columns`` random items, each with its labels below it, and return its path.

    Items are ``(picture, {task: label})`` with a picture of shape ``(1, H, W)`` or ``(3, H, W)`` in [0, 1].
    The labels are named if the data set has ``classes`` (task -> names). ``seed`` chooses the items: the
    same arguments give the same file. The file appears only when it is complete.

    Raises:
        FileExistsError: ``path`` exists and ``overwrite`` is False.
        ValueError: ``path`` does not end in ``.png``, or the sheet would be empty.
    """
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise ValueError(f"a contact sheet is a PNG, got the path {path}. Let it end in .png.")
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"{path} exists. Pass --overwrite (overwrite=True) to replace it, or choose another path."
        )
    total = len(cast("Sized", dataset))
    count = min(rows * columns, total)
    if min(rows, columns, count) < 1:
        raise ValueError(f"nothing to show: {rows} rows, {columns} columns, {total} items. Each must be at least 1.")
    chosen = np.random.RandomState(seed).permutation(total)[:count]
    _write(_draw(dataset, chosen.tolist(), -(-count // columns), min(columns, count)), path)
    return path


def _draw(dataset: Dataset, chosen: list[int], rows: int, columns: int) -> Figure:
    width = max(columns, 3) * CELL
    tasks = list(dataset[chosen[0]][1])
    title = [*textwrap.wrap(str(dataset), int(14 * width)), f"below each picture: {' | '.join(tasks)}"]
    height = rows * (CELL + LINE) + (len(title) + 1) * LINE
    figure = Figure(figsize=(width, height), dpi=DPI)
    figure.text(0.5, 1 - LINE / 2 / height, "\n".join(title), fontsize=9, ha="center", va="top")
    for place, index in enumerate(chosen):
        row, column = divmod(place, columns)
        left, bottom = column * CELL + (CELL - SIDE) / 2, (rows - row - 1) * (CELL + LINE) + LINE
        axes = figure.add_axes((left / width, bottom / height, SIDE / width, SIDE / height))
        axes.set_axis_off()
        picture, targets = dataset[index]
        axes.imshow(picture.permute(1, 2, 0).numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        caption = " | ".join(_name(dataset, task, targets[task]) for task in tasks)
        axes.text(0.5, -0.03, caption, fontsize=7, ha="center", va="top", transform=axes.transAxes)
    return figure


def _name(dataset: Dataset, task: str, label: Any) -> str:
    classes = getattr(dataset, "classes", {})
    return classes[task][int(label)] if task in classes else str(label)


def _write(figure: Figure, path: Path) -> None:
    """Write beside ``path`` first and rename, so that no half file is ever seen."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            FigureCanvasAgg(figure).print_png(file, metadata={"Software": None})
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
