"""DeepLabv3 on a ResNet-50, with a head for each task."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet50
from torchvision.models.segmentation.deeplabv3 import DeepLabHead

from flatmtl_bench.models.multihead import MultiHead


class DeepLab(MultiHead):
    """A dilated ResNet-50 with an atrous pyramid for each task: ``(B, C, H, W) -> {task: (B, outputs, H, W)}``.

    The encoder is torchvision's ResNet-50 without its pooling and last layer, the strides of the last two
    groups of blocks replaced by dilation, so that its feature is an eighth as high and wide as the picture. Each
    head is torchvision's ``DeepLabHead`` (rates 12, 24, 36), its output interpolated bilinearly to the size of the
    picture. Outputs are raw: no softmax, no unit length. With three input channels the encoder has 23,508,032
    parameters, a head of 13 outputs 16,128,781.

    Nothing is pretrained or fetched. Names within the encoder are torchvision's, so that ImageNet weights which you
    have load with ``model.encoder.load_state_dict(weights, strict=False)``, which leaves out those of the last layer.

    Args:
        heads: task -> number of outputs per pixel.
        in_channels: of the pictures.

    References:
        - Chen et al. (2017), *Rethinking atrous convolution for semantic image segmentation*, arXiv:1706.05587.
        - Lin and Zhang (2023), *LibMTL: a Python library for deep multi-task learning*, JMLR 24 (this net for
          NYUv2 and CityScapes).

    Example:
        >>> import torch
        >>> model = DeepLab({"depth": 1}).eval()
        >>> model(torch.zeros(1, 3, 24, 40))["depth"].shape
        torch.Size([1, 1, 24, 40])
    """

    def __init__(self, heads: Mapping[str, int], in_channels: int = 3) -> None:
        super().__init__(
            _dilated_resnet50(in_channels), {t: DeepLabHead(2048, outputs) for t, outputs in heads.items()}
        )

    def forward(self, x: Tensor, tasks: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return task -> output for ``tasks`` (None: all of them), as high and wide as ``x``.

        Raises:
            ValueError: for a batch of one picture in training: a branch of the pyramid averages over each picture,
                and its batch norm has nothing else to take statistics from.
        """
        if self.training and len(x) < 2:
            raise ValueError(
                f"deeplab_resnet50 is trained on at least two pictures at a time, got {len(x)}. Choose another batch "
                "size, one that does not leave a single picture for the last batch."
            )
        outputs = super().forward(x, tasks)
        size = x.shape[-2:]
        return {t: F.interpolate(y, size, mode="bilinear", align_corners=True) for t, y in outputs.items()}


def _dilated_resnet50(in_channels: int) -> nn.Sequential:
    """Return ``(B, C, H, W) -> (B, 2048, H / 8, W / 8)``, rounded up."""
    trunk = resnet50(weights=None, replace_stride_with_dilation=[False, True, True])
    trunk.conv1 = nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return nn.Sequential(OrderedDict(list(trunk.named_children())[:-2]))
