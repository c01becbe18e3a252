"""SegNet with attention for each task: the multi-task attention network."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from flatmtl_bench.models.multihead import MultiHead
from flatmtl_bench.models.segnet import ConvBlock, Features, PixelHead, SegNetTrunk, initialise, widths


class Attention(nn.Sequential):
    """A mask in (0, 1) for each channel and pixel of a shared feature: two 1x1 convolutions, each with batch norm."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(
            nn.Conv2d(in_channels, out_channels, kernel_size=1),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, kernel_size=1),
            nn.BatchNorm2d(out_channels),
            nn.Sigmoid(),
        )


class TaskAttention(nn.Module):
    """The masks of one task, 2,984,576 parameters at full width, and its path through the stages.

    Attributes:
        encoder: masks of the stages of the encoder, in the order in which they run.
        decoder: masks of those of the decoder.
    """

    def __init__(self, width: float) -> None:
        super().__init__()
        f = widths(width)
        below = [f[0], *f[:-1]]
        self.encoder = nn.ModuleList([Attention(f[0], f[0]), *(Attention(2 * own, own) for own in f[1:])])
        self.decoder = nn.ModuleList(Attention(f[k] + below[k], below[k]) for k in reversed(range(len(f))))

    def forward(self, shared: Features, downs: Iterable[nn.Module], ups: Iterable[nn.Module]) -> Tensor:
        """Return what the task sees at the last stage, led on from each to the next by ``downs`` and ``ups``."""
        first, *later = zip(self.encoder, shared.encoder, downs, strict=True)
        mask, stage, down = first
        seen = down(mask(stage.first) * stage.last)
        for mask, stage, down in later:
            seen = down(mask(torch.cat([stage.first, seen], dim=1)) * stage.last)
        for mask, stage, up in zip(self.decoder, shared.decoder, ups, strict=True):
            seen = mask(torch.cat([stage.unpooled, up(seen)], dim=1)) * stage.last
        return seen


class Down(nn.Sequential):
    """Half as high and wide: a convolution, then the maximum of 2x2 pixels."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(ConvBlock(in_channels, out_channels), nn.MaxPool2d(2))


class Up(nn.Sequential):
    """Twice as high and wide: bilinear between the corners, then a convolution."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), ConvBlock(in_channels, out_channels)
        )


class SegNetMTAN(MultiHead):
    """The multi-task attention network on a SegNet: ``(B, C, H, W) -> {task: (B, outputs, H, W)}``.

    Each task has a path of its own beside the shared SegNet. At each stage it sees the shared feature through a mask,
    which is made from an earlier feature of that stage and from what the task saw at the stage before; a convolution
    that the tasks share leads on to the next stage. The path ends in the task's head. A task's own are its masks and
    its head; ``flatmtl.split_parameters`` finds the rest shared. Nothing is computed for tasks that are not asked for.

    Height and width must be multiples of 32. Outputs are raw: no softmax, no unit length. With three input channels it
    has 44,229,073 parameters for the tasks of NYUv2 (13, 1 and 3 outputs) and 41,206,984 for those of CityScapes
    (7 and 1).

    Args:
        heads: task -> number of outputs per pixel.
        in_channels: of the pictures.
        width: share of the channels of each layer, e.g. 0.125; they are rounded, at least one.

    Attributes:
        attention: task -> its masks, an `nn.ModuleDict`.
        down: what leads on from stage to stage of the encoder, for all tasks.
        up: what leads on to each stage of the decoder, for all tasks.

    References:
        - Liu et al. (2019), *End-to-end multi-task learning with attention*, CVPR.

    Example:
        >>> import torch
        >>> model = SegNetMTAN({"segmentation": 13, "depth": 1}, width=1 / 16)
        >>> {task: tuple(output.shape) for task, output in model(torch.rand(2, 3, 32, 64), ["depth"]).items()}
        {'depth': (2, 1, 32, 64)}
    """

    def __init__(self, heads: Mapping[str, int], in_channels: int = 3, width: float = 1.0) -> None:
        f = widths(width)
        below, above = [f[0], *f[:-1]], [*f[1:], f[-1]]
        super().__init__(
            SegNetTrunk(in_channels, width), {task: PixelHead(f[0], outputs) for task, outputs in heads.items()}
        )
        self.attention = nn.ModuleDict({task: TaskAttention(width) for task in heads})
        self.down = nn.ModuleList(Down(f[k], above[k]) for k in range(len(f)))
        self.up = nn.ModuleList(Up(f[k], below[k]) for k in reversed(range(len(f))))
        initialise(self)

    def representation(self, task: str, shared: Features) -> Tensor:
        """Return what the task sees at the last stage of the decoder."""
        return self.attention[task](shared, self.down, self.up)
