"""ResNet-18 as a shared encoder."""

from torch import Tensor, nn
from torchvision.models import resnet18


class ResNet18(nn.Module):
    """torchvision's ResNet-18 without its last layer: ``(B, C, H, W) -> (B, 512)``.

    The first convolution is made anew for ``in_channels`` (7x7, stride 2, no bias); nothing is pretrained.
    With one input channel it has 11,170,240 parameters: 11,180,500 with two heads of ten classes.

    References:
        - He et al. (2016), *Deep residual learning for image recognition*, CVPR.
        - Phan et al. (2025), *Beyond losses reweighting: empowering multi-task learning via the
          generalization perspective*, ICCV ("with the last output layer removed", linear heads).
    """

    width = 512  # of the representation

    def __init__(self, in_channels: int = 1) -> None:
        super().__init__()
        self.trunk = resnet18(weights=None)
        self.trunk.conv1 = nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        self.trunk.add_module("fc", nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        """Return the representation of a batch of pictures."""
        return self.trunk(x)


class ResNet18Official(ResNet18):
    """ResNet-18 with a shared layer of 100 units and a ReLU behind it: ``(B, C, H, W) -> (B, 100)``.

    The form of the authors' code and of Lin et al. (2019), *Pareto multi-task learning*, NeurIPS. With one
    input channel it has 11,221,540 parameters: 11,223,560 with two heads of ten classes.
    """

    width = 100

    def __init__(self, in_channels: int = 1) -> None:
        super().__init__(in_channels)
        self.trunk.add_module("fc", nn.Sequential(nn.Linear(512, self.width), nn.ReLU()))
