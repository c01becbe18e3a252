"""A model of a user's own, small enough to train with every method in a moment."""

from torch import nn


class Tiny(nn.Module):
    """A convolution, and for each task a head: of pixels if there is one depth or normal to tell, else of pictures."""

    def __init__(self, heads, in_channels):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(in_channels, 4, 3, padding=1), nn.ReLU())
        self.dense = "depth" in heads or "normals" in heads or "segmentation" in heads
        self.heads = nn.ModuleDict({task: self.head(outputs) for task, outputs in heads.items()})

    def head(self, outputs):
        if self.dense:
            return nn.Conv2d(4, outputs, 1)
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, outputs))

    def forward(self, x, tasks=None):
        z = self.trunk(x)
        return {task: self.heads[task](z) for task in (self.heads if tasks is None else tasks)}
