"""NYUv2 and CityScapes, the paper's tables 3 to 7, and scenes that are rendered on the spot."""

from dataclasses import replace

from flatmtl_bench.recipes.config import Config, Data, Method, Optimizer, Schedule, Sharpness
from flatmtl_bench.recipes.family import METHODS, Family, official

NYUV2, CITYSCAPES, SCENES, STREETS = (
    {"nyuv2": "NYUv2"},
    {"cityscapes": "CityScapes"},
    {"scenes": "rendered rooms"},
    {"streets": "rendered streets"},
)
FIRST = "segmentation"
EITHER = ("sam", "asam")
"""The paper says for pictures of one label that it takes ASAM, and does not say it for scenes."""


def nyuv2(dataset: str) -> Config:
    """The paper's text: SegNet with MTAN, Adam 1e-4, halved after 100 of 200 epochs, batch 2."""
    return Config(
        data=Data(dataset),
        model="segnet_mtan",
        epochs=200,
        batch_size=2,
        optimizer=Optimizer("adam", lr=1e-4),
        schedule=Schedule("step", every=100, factor=0.5),
        sharpness=Sharpness(samples=32),
    )


def cityscapes(dataset: str) -> Config:
    """The same with batch 8."""
    return replace(nyuv2(dataset), batch_size=8)


def with_papers_protocol(config: Config) -> Config:
    """Return the config for all training data, batch means of depth and normals, and the last ten epochs' mean."""
    return replace(config, protocol="paper", averaging="batches", data=replace(config.data, validation_share=0.0))


def nyuv2_paper(dataset: str) -> Config:
    """The paper's protocol."""
    return with_papers_protocol(nyuv2(dataset))


def cityscapes_paper(dataset: str) -> Config:
    """The paper's protocol."""
    return with_papers_protocol(cityscapes(dataset))


def nyuv2_official(dataset: str) -> Config:
    """The authors' code: the paper's protocol, and all parameters but the last layers aggregated."""
    return replace(nyuv2_paper(dataset), shared="all")


def cityscapes_official(dataset: str) -> Config:
    """The authors' code: as for NYUv2, and a zoom divides disparities as if they were depths."""
    config = cityscapes_paper(dataset)
    return replace(config, shared="all", data=replace(config.data, disparity="divide"))


def scenes(dataset: str) -> Config:
    """Rendered rooms at a size for two cores: an eighth of SegNet's and MTAN's widths, 64x64, 10 epochs."""
    return Config(
        data=Data(dataset, size=[64, 64]),
        model="segnet_mtan",
        width=0.125,
        epochs=10,
        batch_size=8,
        optimizer=Optimizer("adam", lr=1e-3),
        sharpness=Sharpness(samples=64),
    )


def streets(dataset: str) -> Config:
    """Rendered streets, twice as wide."""
    return replace(scenes(dataset), data=Data(dataset, size=[64, 128]))


FAMILIES = (
    Family(NYUV2, nyuv2, "paper's text", FIRST, rho=0.05, perturbations=EITHER),
    Family(NYUV2, nyuv2_paper, "paper's protocol", FIRST, 0.05, EITHER, "_paper"),
    Family(
        NYUV2,
        nyuv2_official,
        "authors' code",
        FIRST,
        0.05,
        ("sam",),
        "_official",
        official(Method("mgda", {"normalise": "l2"})),
        ablations=(),
        settled=True,
    ),
    Family(CITYSCAPES, cityscapes, "paper's text", FIRST, rho=0.05, perturbations=EITHER),
    Family(CITYSCAPES, cityscapes_paper, "paper's protocol", FIRST, 0.05, EITHER, "_paper"),
    Family(
        CITYSCAPES,
        cityscapes_official,
        "authors' code",
        FIRST,
        0.0025,
        ("sam",),
        "_official",
        official(METHODS["mgda"]),
        ablations=(),
        settled=True,
    ),
    Family(SCENES, scenes, "small scale", FIRST, rho=0.05, perturbations=EITHER),
    Family(STREETS, streets, "small scale", FIRST, rho=0.05, perturbations=EITHER),
)
