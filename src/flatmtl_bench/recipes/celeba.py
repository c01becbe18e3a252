"""CelebA, the paper's table 2, and faces that are drawn on the spot."""

from dataclasses import replace

from flatmtl_bench.recipes.config import Config, Data, Optimizer, Schedule, Sharpness
from flatmtl_bench.recipes.family import METHODS, Family, official

FIRST = "5_o_Clock_Shadow"


def celeba(dataset: str) -> Config:
    """The paper's text: ResNet-50, 64x64 pictures, Adam 5e-4, times 0.85 every 10 epochs, batch 256, 50 epochs."""
    return Config(
        data=Data(dataset),
        model="resnet50",
        epochs=50,
        optimizer=Optimizer("adam", lr=5e-4),
        schedule=Schedule("step", every=10, factor=0.85),
    )


def celeba_paper(dataset: str) -> Config:
    """The same with the mean of the last ten epochs, as the paper has it for its other data."""
    return replace(celeba(dataset), protocol="paper")


def celeba_official(dataset: str) -> Config:
    """The authors' code: a ResNet-18 for small pictures, two outputs for each attribute, its own pre-processing.

    The code trains for 100 epochs and reports the validation part at its best epoch, which is
    ``validation`` in the summary of a run.
    """
    data = Data(dataset, logits=2, preprocessing="official")
    return replace(celeba(dataset), data=data, model="resnet18_celeba", epochs=100)


def faces40(dataset: str) -> Config:
    """Forty attributes of drawn faces at a size for two cores: LeNet on 36x36 pictures, 20 epochs of Adam 1e-3.

    The pictures are centred and scaled: as they are, in [0, 1], LeNet says of nearly every attribute what is more
    frequent, even after 20 epochs.
    """
    data = Data(dataset, size=[36, 36], preprocessing="imagenet")
    return Config(data=data, model="lenet", epochs=20, batch_size=128, sharpness=Sharpness(samples=512))


FAMILIES = (
    Family({"celeba": "CelebA"}, celeba, "paper's text", FIRST),
    Family({"celeba": "CelebA"}, celeba_paper, "paper's protocol", FIRST, suffix="_paper"),
    Family(
        {"celeba": "CelebA"},
        celeba_official,
        "authors' code",
        FIRST,
        suffix="_official",
        methods=official(METHODS["mgda"]),
        ablations=(),
    ),
    Family({"faces40": "drawn faces"}, faces40, "small scale", FIRST),
)
