"""Architectures: a shared encoder and one head for each task.

==================  ===========================================================  ==================================
name                shared encoder, heads                                        pictures
==================  ===========================================================  ==================================
lenet               two convolutions, a dense layer; linear heads                36 x 36
resnet18            torchvision's ResNet-18; linear heads                        any size
resnet18_official   the same and a dense layer of 100; linear heads              any size
resnet50            torchvision's ResNet-50; linear heads                        any size
resnet18_celeba     ResNet-18 that begins with 3x3 at stride 1; linear heads     64 x 64
segnet              SegNet; two convolutions per task, an output per pixel       sides that are multiples of 32
segnet_mtan         SegNet with attention for each task; likewise                sides that are multiples of 32
deeplab_resnet50    dilated ResNet-50; an atrous pyramid per task, likewise      any size
==================  ===========================================================  ==================================

:func:`build` makes one by its name, or a model of your own by ``"package.module:factory"``.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from flatmtl_bench.choices import one_of, whole_number
from flatmtl_bench.models.deeplab import DeepLab
from flatmtl_bench.models.imported import build_imported
from flatmtl_bench.models.lenet import LeNet
from flatmtl_bench.models.mtan import SegNetMTAN
from flatmtl_bench.models.multihead import MultiHead
from flatmtl_bench.models.resnet import ResNet18, ResNet18CelebA, ResNet18Official, ResNet50
from flatmtl_bench.models.segnet import SegNet

__all__ = ["MODELS", "MultiHead", "build"]


def with_linear_heads(encoder: Callable[[int], Any], heads: Mapping[str, int], in_channels: int) -> MultiHead:
    """Return an encoder, made for ``in_channels``, whose representation of ``width`` numbers linear heads read."""
    trunk = encoder(in_channels)
    return MultiHead(trunk, {task: nn.Linear(trunk.width, outputs) for task, outputs in heads.items()})


MODELS: dict[str, Callable[..., nn.Module]] = {
    "lenet": partial(with_linear_heads, LeNet),
    "resnet18": partial(with_linear_heads, ResNet18),
    "resnet18_official": partial(with_linear_heads, ResNet18Official),
    "resnet50": partial(with_linear_heads, ResNet50),
    "resnet18_celeba": partial(with_linear_heads, ResNet18CelebA),
    "segnet": SegNet,
    "segnet_mtan": SegNetMTAN,
    "deeplab_resnet50": DeepLab,
}
"""Every model by its name: called with the outputs of each task and the number of input channels, and with the width
where it takes one."""


def build(name: str, heads: Mapping[str, int], in_channels: int = 1, width: float = 1.0) -> nn.Module:
    """Return a model with a head for each task.

    Its ``forward(x, tasks=None)`` returns task -> output for the tasks asked for, or all of them, and computes nothing
    that only the others need.

    Args:
        name: a key of :data:`MODELS`, or ``"package.module:factory"`` for a model from elsewhere: what
            ``factory(heads, in_channels)`` returns must be a module with such a ``forward``.
        heads: task -> number of its outputs; of each pixel, for models that give an output per pixel.
        in_channels: channels of the pictures.
        width: the channels of each layer, as a share of their own; for models that offer it.

    Raises:
        ValueError: there is no such model; a number is out of its range; the model has one width only; torch cannot
            name a module like one of the tasks; a factory from elsewhere cannot be called so, or makes something else.

    Example:
        >>> model = build("lenet", {"left": 10, "right": 10})
        >>> sum(p.numel() for p in model.parameters())
        31910
    """
    _check_numbers(heads, in_channels, width)
    if ":" in name:
        _check_one_width(name, width)
        return build_imported(name, heads, in_channels)
    if name not in MODELS and "." in name:
        raise ValueError(f"model {name!r} is none of ours; one of your own is 'package.module:factory', with a colon.")
    one_of("model", name, MODELS)
    if _takes_width(MODELS[name]):
        return MODELS[name](heads, in_channels, width=width)
    _check_one_width(name, width)
    return MODELS[name](heads, in_channels)


def _check_numbers(heads: Mapping[str, int], in_channels: int, width: float) -> None:
    whole_number("in_channels", in_channels, 1)
    for task, outputs in heads.items():
        if outputs < 1:
            raise ValueError(f"the head of task {task!r} must have at least one output, got {outputs}.")
    if not 0 < width < math.inf:
        raise ValueError(f"width must be a number above 0, got {width}. 1 is the full width, 0.125 an eighth of it.")


def _takes_width(factory: Callable[..., nn.Module]) -> bool:
    return "width" in inspect.signature(factory).parameters


def _check_one_width(name: str, width: float) -> None:
    if width != 1.0:
        scalable = ", ".join(known for known, factory in MODELS.items() if _takes_width(factory))
        raise ValueError(
            f"model {name!r} has one width only, got width {width:g}. Let it be 1 (--width 1), or use {scalable}."
        )
