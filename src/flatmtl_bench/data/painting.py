"""How targets and outputs look: maps as pictures, outputs as what they say.

What is drawn depends on the objective of a task alone, so that every data set is drawn alike.
"""

from typing import Any

import numpy as np
from matplotlib import colormaps
from torch import Tensor
from torch.nn.functional import normalize

from flatmtl_bench.metrics import Attribute, Classification, Depth, Normals, Objective, Segmentation

# Far apart in lightness and hue, also for colour-blind eyes: Okabe and Ito (2008), then lighter and darker ones.
PALETTE = (
    *("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"),
    *("#5d3a00", "#b5e3d8", "#7a7a7a", "#2b1a66", "#dcd0c0", "#a8e05f", "#7a0026"),
)
DEPTHS = colormaps["viridis"]  # near is dark


def answer(objective: Objective, output: Tensor) -> Any:
    """Return what the output of a model says, for one item, in the form of a target.

    Raises:
        TypeError: the objective is of a kind that has no sheet.

    Example:
        >>> import torch
        >>> answer(Classification(("cat", "dog")), torch.tensor([0.5, 2.0]))
        1
    """
    output = output.detach().cpu().float()
    match objective:
        case Classification():
            return int(output.argmax())
        case Attribute():
            return int(output.argmax() if objective.logits == 2 else output.item() > 0)
        case Segmentation():
            return output.argmax(dim=0)
        case Depth():
            return output
        case Normals():
            return normalize(output, dim=0)
    raise TypeError(f"no sheet shows a {type(objective).__name__}; expected one of the objectives of flatmtl_bench.")


def paint(objective: Objective, target: Tensor, farthest: float) -> np.ndarray:
    """Return the map of one task as a picture ``(H, W, 3)``; what has no label is hatched.

    Args:
        objective: of the task.
        target: labels ``(H, W)``, depth ``(1, H, W)`` or normals ``(3, H, W)``.
        farthest: the depth at the end of the scale.
    """
    target = target.detach().cpu()
    match objective:
        case Segmentation():
            painted, valid = (
                np.array([class_colour(number) for number in range(objective.outputs)])[target],
                target >= 0,
            )
        case Depth():
            painted, valid = DEPTHS((target[0] / farthest).clamp(0, 1).numpy())[..., :3], target[0] != 0
        case _:
            painted, valid = (target.movedim(0, -1).numpy() + 1) / 2, target.any(dim=0)
    return np.where(valid.numpy()[..., None], painted, hatched(*painted.shape[:2]))


def hatched(height: int, width: int) -> np.ndarray:
    """Return the picture ``(H, W, 3)`` of what has no label: stripes along diagonals, which no map has."""
    row, column = np.indices((height, width))
    return np.where((row + column) % 4 < 2, 1.0, 0.35)[..., None].repeat(3, axis=2)


def class_colour(number: int) -> tuple[float, ...]:
    """Return the colour of a class; after the last one it begins again."""
    code = PALETTE[number % len(PALETTE)]
    return tuple(int(code[place : place + 2], 16) / 255 for place in (1, 3, 5))
