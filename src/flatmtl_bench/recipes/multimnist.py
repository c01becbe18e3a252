"""Multi-MNIST, MultiFashion and MultiFashion+MNIST: the paper's table 1."""

from dataclasses import replace

from flatmtl_bench.recipes.config import Config, Data, Method
from flatmtl_bench.recipes.family import Family

DATASETS = {
    "multimnist": "Multi-MNIST",
    "multifashion": "MultiFashion",
    "multifashionmnist": "MultiFashion+MNIST",
}
OFFICIAL = {
    "mgda": Method("mgda", norm="joint"),
    "pcgrad": Method("pcgrad", norm="joint"),
    "cagrad": Method("cagrad", {"c": 0.4, "rescale": "1+c2"}, norm="joint"),
    "imtl_g": Method("imtl_g", norm="joint"),
}
"""The methods of the authors' code: one norm for trunk and head, CAGrad over 1 + c^2."""


def multimnist(dataset: str) -> Config:
    """The paper's text: ResNet-18 without its last layer, Adam 1e-3, batch 256, 200 epochs, adaptive SAM.

    The radius is that at which the paper's figure 8 becomes stable.
    """
    return Config(data=Data(dataset))


def multimnist_paper(dataset: str) -> Config:
    """The same on all training pairs, with the mean of the last ten epochs, as the paper has it for its other data."""
    config = multimnist(dataset)
    return replace(config, protocol="paper", data=replace(config.data, validation_share=0.0))


def multimnist_official(dataset: str) -> Config:
    """The authors' code: a last layer of 100 units, rho 2.

    The pictures are those of Lin et al. (2019), whose files the code reads: each moved by up to 4 pixels, of
    different labels where both are of one kind. Nothing is held out for validation, and the epoch that is best
    on the test part counts.
    """
    same_label = None if dataset == "multifashionmnist" else False  # two kinds have no label in common
    data = Data(dataset, placement="jitter", same_label=same_label, validation_share=0.0)
    return Config(data=data, model="resnet18_official", protocol="official")


FAMILIES = (
    Family(DATASETS, multimnist, "paper's text", "left"),
    Family(DATASETS, multimnist_paper, "paper's protocol", "left", suffix="_paper"),
    Family(
        DATASETS,
        multimnist_official,
        "authors' code",
        "left",
        rho=2.0,
        suffix="_official",
        methods=OFFICIAL,
        ablations=(),
        settled=True,
    ),
)
