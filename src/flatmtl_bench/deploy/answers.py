"""What the outputs of a model say about one picture: as plain values, in words, and as files."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flatmtl_bench.data.form import Form
from flatmtl_bench.data.painting import answer, class_colour
from flatmtl_bench.files import write_whole
from flatmtl_bench.metrics import Attribute, Classification, Depth, Objective, Segmentation

LARGEST = 65535
"""Of a whole number of 16 bits."""
Answer = dict[str, Any]


def is_map(objective: Objective) -> bool:
    """Return whether an output says something of each pixel, which is written to files."""
    return not isinstance(objective, Classification | Attribute)


def endings(objective: Objective) -> list[str]:
    """Return the endings of the files of a map."""
    return [".png", *[".npy"] * isinstance(objective, Depth)]


def label(objective: Objective, output: Tensor) -> Answer:
    """Return what the output for one picture says, with the probability of it; of classes and attributes.

    Example:
        >>> label(Attribute(), torch.tensor([0.0]))
        {'present': False, 'probability': 0.5}
    """
    output, said = output.double(), answer(objective, output)
    if isinstance(objective, Attribute):
        yes = output.softmax(0)[1] if objective.logits == 2 else output[0].sigmoid()
        return {"present": bool(said), "probability": float(yes)}
    if not isinstance(objective, Classification):
        raise TypeError(f"a {type(objective).__name__} has no label; expected a Classification or an Attribute.")
    shares = dict(zip(objective.classes, output.softmax(0).tolist(), strict=True))
    name = objective.classes[said]
    return {"label": name, "probability": shares[name], "probabilities": shares}


def write_map(objective: Objective, output: Tensor, form: Form, path: Path) -> Answer:
    """Write the map that an output for one picture says; return what is in the files, each with its path.

    Args:
        objective: of the task.
        output: without the dimension of the batch.
        form: of the data, which know the scale of depths.
        path: of the files, without their ending.

    Raises:
        WriteError: they cannot be written.
    """
    said = answer(objective, output)
    png = path.with_name(f"{path.name}.png")
    found: Answer = {"file": str(png)}
    match objective:
        case Segmentation():
            picture = _palette(said, objective.outputs)
            counts = torch.bincount(said.flatten(), minlength=objective.outputs) / said.numel()
            found["shares"] = dict(zip(objective.classes, counts.tolist(), strict=True))
        case Depth():
            picture = _sixteen_bits(said[0], form.depth_scale)
            values = path.with_name(f"{path.name}.npy")
            write_whole(values, _npy(said[0]))
            found |= {"values": str(values), "least": float(said.min()), "largest": float(said.max())}
        case _:
            picture = Image.fromarray(((said.movedim(0, -1) + 1) * 127.5).round().to(torch.uint8).numpy())
    content = io.BytesIO()
    picture.save(content, format="png")
    write_whole(png, content.getbuffer())
    return found


def _palette(labels: Tensor, classes: int) -> Image.Image:
    """Return a picture whose numbers are the classes, shown in their colours."""
    picture = Image.fromarray(labels.to(torch.uint8).numpy())
    picture.putpalette([round(255 * part) for number in range(classes) for part in class_colour(number)])
    return picture


def _sixteen_bits(depth: Tensor, scale: float) -> Image.Image:
    return Image.fromarray((depth.double() * scale).round().clamp(0, LARGEST).numpy().astype(np.uint16))


def _npy(depth: Tensor) -> memoryview:
    content = io.BytesIO()
    np.save(content, depth.numpy(), allow_pickle=False)
    return content.getbuffer()


def explained(objective: Objective, form: Form) -> str:
    """Return what the files of a map hold."""
    match objective:
        case Segmentation():
            return ".png: the number of a pixel is its class, from 0 on, its colour that of the class"
        case Depth():
            return (
                f".png: the value times {form.depth_scale:g}, from 0 to {LARGEST}, in 16 bits; .npy: the value itself"
            )
    return ".png: red, green and blue are (n + 1) * 127.5 for the unit vector n"


def in_words(answers: Mapping[str, Answer]) -> str:
    """Return a line: labels with their probabilities, the attributes that are there, the files of maps.

    Example:
        >>> in_words({"hat": {"present": True, "probability": 0.75}, "tie": {"present": False, "probability": 0.25}})
        'hat (75%)'
        >>> in_words({"tie": {"present": False, "probability": 0.25}})
        'none of 1 attributes'
    """
    words: list[str] = []
    for task, said in answers.items():
        if "label" in said:
            words.append(f"{task} {said['label']} ({said['probability']:.0%})")
        elif "file" in said:
            words.append(f"{task} {said['file']}")
        elif said["present"]:
            words.append(f"{task.replace('_', ' ')} ({said['probability']:.0%})")
    return ", ".join(words) or f"none of {len(answers)} attributes"
