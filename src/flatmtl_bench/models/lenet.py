"""LeNet for 36x36 pictures of two digits."""

from torch import Tensor, nn


class LeNet(nn.Sequential):
    """The two convolutions and one hidden layer of the Multi-MNIST papers: ``(B, C, 36, 36) -> (B, 50)``.

    Convolution to 10 channels (9x9), ReLU, 2x2 maximum, convolution to 20 channels (5x5), ReLU, 2x2
    maximum, linear to 50, ReLU. With one input channel it has 30,890 parameters: 31,910 with two heads of
    ten classes.

    References:
        - LeCun et al. (1998), *Gradient-based learning applied to document recognition*, Proc. IEEE 86.
        - Lin et al. (2019), *Pareto multi-task learning*, NeurIPS (these sizes, for 36x36 pictures).
    """

    width = 50  # of the representation
    side = 36  # of the pictures, in pixels

    def __init__(self, in_channels: int = 1) -> None:
        super().__init__(
            nn.Conv2d(in_channels, 10, kernel_size=9),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(10, 20, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(20 * 5 * 5, self.width),
            nn.ReLU(),
        )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Return the representation of a batch of 36x36 pictures."""
        if input.shape[-2:] != (self.side, self.side):
            size = "x".join(map(str, input.shape[-2:]))
            raise ValueError(f"lenet takes 36x36 pictures, got {size}. Resize them, or use resnet18, which takes any.")
        return super().forward(input)
