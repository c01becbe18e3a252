"""SegNet: what one net for all tasks, and one with attention for each task, have in common; and the former."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from flatmtl_bench.models.multihead import MultiHead

WIDTHS = (64, 128, 256, 512, 512)
"""Channels of the five stages."""
REFINEMENTS = (1, 1, 2, 2, 2)
"""Convolutions of each stage after the one that changes the number of channels, as in VGG-16."""
STRIDE = 2 ** len(WIDTHS)
"""What the sides of a picture must be multiples of: each stage halves them."""


def widths(share: float) -> list[int]:
    """Return the channels of the five stages at a share of their full width: rounded, at least one.

    Example:
        >>> widths(1 / 8)
        [8, 16, 32, 64, 64]
    """
    return [max(1, round(share * width)) for width in WIDTHS]


class ConvBlock(nn.Sequential):
    """A 3x3 convolution, batch norm and ReLU, which keep height and width."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )


class Encoded(NamedTuple):
    """What a stage of the encoder computes: ``first`` and ``last`` are as high and wide as its input.

    Attributes:
        first: after its first convolution.
        last: after its last.
        pooled: the maxima of ``last`` over 2x2 pixels.
        indices: where they were.
    """

    first: Tensor
    last: Tensor
    pooled: Tensor
    indices: Tensor


class Decoded(NamedTuple):
    """What a stage of the decoder computes, twice as high and wide as its input.

    Attributes:
        unpooled: its input where the encoder found its maxima, else zero.
        last: after its last convolution.
    """

    unpooled: Tensor
    last: Tensor


class Features(NamedTuple):
    """What the stages of a :class:`SegNetTrunk` compute, each in the order in which they run."""

    encoder: list[Encoded]
    decoder: list[Decoded]


class EncoderStage(nn.Module):
    """Convolutions, then a 2x2 maximum that keeps where it was found."""

    def __init__(self, in_channels: int, out_channels: int, refinements: int) -> None:
        super().__init__()
        self.first = ConvBlock(in_channels, out_channels)
        self.rest = nn.Sequential(*(ConvBlock(out_channels, out_channels) for _ in range(refinements)))
        self.pool = nn.MaxPool2d(2, return_indices=True)

    def forward(self, x: Tensor) -> Encoded:
        """Return the features of the stage."""
        first = self.first(x)
        last = self.rest(first)
        pooled, indices = self.pool(last)
        return Encoded(first, last, pooled, indices)


class DecoderStage(nn.Module):
    """Each value back to where the encoder found the maximum, then convolutions."""

    def __init__(self, in_channels: int, out_channels: int, refinements: int) -> None:
        super().__init__()
        self.unpool = nn.MaxUnpool2d(2)
        self.convs = nn.Sequential(
            ConvBlock(in_channels, out_channels),
            *(ConvBlock(out_channels, out_channels) for _ in range(refinements)),
        )

    def forward(self, x: Tensor, indices: Tensor) -> Decoded:
        """Return the features of the stage."""
        unpooled = self.unpool(x, indices)
        return Decoded(unpooled, self.convs(unpooled))


class SegNetTrunk(nn.Module):
    """What the tasks share in the SegNets: five stages down to a 32nd of the sides, and five up again.

    With three input channels it has 24,943,296 parameters at full width.

    Args:
        in_channels: of the pictures.
        width: share of the channels of each layer.
    """

    def __init__(self, in_channels: int, width: float = 1.0) -> None:
        super().__init__()
        f = widths(width)
        down, up = [in_channels, *f[:-1]], [f[0], *f[:-1]]  # channels that stage k reads going down, writes going up
        stages = list(zip(down, f, up, REFINEMENTS, strict=True))
        self.encoder = nn.ModuleList(EncoderStage(below, own, n) for below, own, _, n in stages)
        self.decoder = nn.ModuleList(DecoderStage(own, below, n) for _, own, below, n in reversed(stages))

    def forward(self, x: Tensor) -> Features:
        """Return the features of all stages, for pictures ``(B, C, H, W)``.

        Raises:
            ValueError: height or width is no multiple of 32.
        """
        _check_sides(x)
        encoded: list[Encoded] = []
        for stage in self.encoder:
            encoded.append(stage(encoded[-1].pooled if encoded else x))
        decoded: list[Decoded] = []
        for stage, source in zip(self.decoder, reversed(encoded), strict=True):
            decoded.append(stage(decoded[-1].last if decoded else source.pooled, source.indices))
        return Features(encoded, decoded)


class PixelHead(nn.Sequential):
    """A 3x3 and a 1x1 convolution in a row, nothing between them: ``(B, C, H, W) -> (B, outputs, H, W)``."""

    def __init__(self, in_channels: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(in_channels, in_channels, kernel_size=3, padding=1),
            nn.Conv2d(in_channels, outputs, kernel_size=1),
        )


class SegNet(MultiHead):
    """One SegNet for all tasks, with two convolutions for each: ``(B, C, H, W) -> {task: (B, outputs, H, W)}``.

    VGG-16 without its dense layers, and its mirror image, in which each value goes back to where the maximum was
    found. Height and width must be multiples of 32. Outputs are raw: no softmax, no unit length. With three input
    channels it has 25,055,185 parameters for the tasks of NYUv2 (13, 1 and 3 outputs) and 25,017,672 for those of
    CityScapes (7 and 1).

    Args:
        heads: task -> number of outputs per pixel.
        in_channels: of the pictures.
        width: share of the channels of each layer, e.g. 0.125; they are rounded, at least one.

    References:
        - Badrinarayanan et al. (2017), *SegNet: a deep convolutional encoder-decoder architecture for image
          segmentation*, IEEE TPAMI 39.
        - Liu et al. (2019), *End-to-end multi-task learning with attention*, CVPR (this form, "split").

    Example:
        >>> import torch
        >>> model = SegNet({"segmentation": 13, "depth": 1}, width=1 / 16)
        >>> {task: tuple(output.shape) for task, output in model(torch.rand(2, 3, 32, 64)).items()}
        {'segmentation': (2, 13, 32, 64), 'depth': (2, 1, 32, 64)}
    """

    def __init__(self, heads: Mapping[str, int], in_channels: int = 3, width: float = 1.0) -> None:
        channels = widths(width)[0]
        super().__init__(
            SegNetTrunk(in_channels, width), {task: PixelHead(channels, outputs) for task, outputs in heads.items()}
        )
        initialise(self)

    def representation(self, task: str, shared: Features) -> Tensor:
        """Return the last feature of the decoder, whatever the task."""
        del task
        return shared.decoder[-1].last


def initialise(model: nn.Module) -> None:
    """Draw the weights of all convolutions anew (Xavier, normal), zero biases; batch norms begin at one and zero."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.xavier_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _check_sides(x: Tensor) -> None:
    height, width = x.shape[-2:]
    if height % STRIDE or width % STRIDE or not height or not width:
        near = "x".join(str(max(1, round(side / STRIDE)) * STRIDE) for side in (height, width))
        raise ValueError(
            f"segnet and segnet_mtan take pictures with sides that are multiples of {STRIDE}, got {height}x{width}. "
            f"Crop or resize them, e.g. to {near}."
        )
