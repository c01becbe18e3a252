"""ResNets as shared encoders of pictures."""

from torch import Tensor, nn
from torchvision.models import ResNet, resnet18, resnet50


class _WithoutLastLayer(nn.Module):
    """A ResNet of torchvision whose last layer is put aside, with its first convolution made anew."""

    def __init__(self, trunk: ResNet, in_channels: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.trunk.conv1 = nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        self.trunk.add_module("fc", nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        """Return the representation of a batch of pictures."""
        return self.trunk(x)


class ResNet18(_WithoutLastLayer):
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
        super().__init__(resnet18(weights=None), in_channels)


class ResNet18Official(ResNet18):
    """ResNet-18 with a shared layer of 100 units and a ReLU behind it: ``(B, C, H, W) -> (B, 100)``.

    The form of the authors' code and of Lin et al. (2019), *Pareto multi-task learning*, NeurIPS. With one
    input channel it has 11,221,540 parameters: 11,223,560 with two heads of ten classes.
    """

    width = 100

    def __init__(self, in_channels: int = 1) -> None:
        super().__init__(in_channels)
        self.trunk.add_module("fc", nn.Sequential(nn.Linear(512, self.width), nn.ReLU()))


class ResNet50(_WithoutLastLayer):
    """torchvision's ResNet-50 without its last layer: ``(B, C, H, W) -> (B, 2048)``.

    The encoder that the paper names for CelebA; nothing is pretrained. With three input channels it has
    23,508,032 parameters: 23,589,992 with a head of one output for each of the 40 attributes, 23,671,952 with
    heads of two.

    References:
        - He et al. (2016), *Deep residual learning for image recognition*, CVPR.
    """

    width = 2048

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__(resnet50(weights=None), in_channels)


class ResNet18CelebA(nn.Module):
    """The ResNet-18 for small pictures: ``(B, C, 64, 64) -> (B, 2048)``.

    The encoder of the authors' code for CelebA. It differs from :class:`ResNet18` where the picture comes in
    and where it goes out: the first convolution is 3x3 with stride 1, no maximum is taken behind it, and the
    last feature of 512 x 8 x 8 is averaged over 4x4 pixels and flattened. With three input channels it has
    11,168,832 parameters: 11,332,752 with a head of two outputs for each of the 40 attributes.

    References:
        - He et al. (2016), *Deep residual learning for image recognition*, CVPR (its nets for 32x32 pictures).
        - Sener and Koltun (2018), *Multi-task learning as multi-objective optimization*, NeurIPS (CelebA at 64x64).
    """

    width = 2048
    side = 64  # of the pictures, in pixels

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__()
        self.trunk = resnet18(weights=None)
        self.trunk.conv1 = nn.Conv2d(in_channels, 64, kernel_size=3, padding=1, bias=False)
        self.trunk.add_module("maxpool", nn.Identity())
        self.trunk.add_module("avgpool", nn.AvgPool2d(4))
        self.trunk.add_module("fc", nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        """Return the representation of a batch of 64x64 pictures."""
        if x.shape[-2:] != (self.side, self.side):
            size = "x".join(map(str, x.shape[-2:]))
            raise ValueError(
                f"resnet18_celeba takes 64x64 pictures, got {size}. Resize them, or use resnet50, which takes any."
            )
        return self.trunk(x)
