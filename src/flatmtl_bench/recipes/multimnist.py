"""Recipes of Multi-MNIST, MultiFashion and MultiFashion+MNIST: the paper's table 1."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

from flatmtl_bench.recipes.config import Config, Data, Method

DATASETS = {
    "multimnist": "Multi-MNIST",
    "multifashion": "MultiFashion",
    "multifashionmnist": "MultiFashion+MNIST",
}
METHODS = {
    "stl": Method("ls"),
    "mean": Method("mean"),
    "sum": Method("sum"),
    "random": Method("random"),
    "mgda": Method("mgda"),
    "upgrad": Method("upgrad"),
    "dualproj": Method("dualproj"),
    "nash_mtl": Method("nash_mtl"),
    "fairgrad": Method("fairgrad", {"alpha": 2.0}),
    "cagrad": Method("cagrad", {"c": 0.4}),
    "imtl_g": Method("imtl_g"),
    "config": Method("config"),
    "aligned_mtl": Method("aligned_mtl"),
    "pcgrad": Method("pcgrad"),
    "gradvac": Method("gradvac"),
    "graddrop": Method("graddrop"),
    "ls": Method("ls"),
    "si": Method("si"),
    "gls": Method("gls"),
    "rlw": Method("rlw"),
    "dwa": Method("dwa"),
    "uw": Method("uw"),
    "imtl_l": Method("imtl_l"),
    "famo": Method("famo"),
}
PAPER = ("stl", "mgda", "pcgrad", "cagrad", "imtl_g", "nash_mtl", "fairgrad")
"""The rows of table 1."""
OFFICIAL = {
    "mgda": Method("mgda", norm="joint"),
    "pcgrad": Method("pcgrad", norm="joint"),
    "cagrad": Method("cagrad", {"c": 0.4, "rescale": "1+c2"}, norm="joint"),
    "imtl_g": Method("imtl_g", norm="joint"),
}


def multimnist(dataset: str, method: str, *, flat: bool) -> Config:
    """The paper's text: ResNet-18 without its last layer, Adam 1e-3, batch 256, 200 epochs, adaptive SAM.

    The text tunes the radius of each row between 0.005 and 5 and does not say what came out; 0.5 is where its
    figure 8 becomes stable.
    """
    name = f"{dataset}_f_{method}" if flat else f"{dataset}_{method}"
    config = Config(name, task="left" if method == "stl" else None, data=Data(dataset), method=METHODS[method])
    return _flat(config, rho=0.5) if flat else config


def multimnist_official(dataset: str, method: str, *, flat: bool) -> Config:
    """The authors' code: a last layer of 100 units, one norm for trunk and head, rho 2, CAGrad over 1 + c^2.

    The pictures are those of Lin et al. (2019), whose files the code reads: each moved by up to 4 pixels, of
    different labels where both are of one kind. Nothing is held out for validation, and the epoch that is best
    on the test part counts.
    """
    config = multimnist(dataset, method, flat=flat)
    official = replace(
        config,
        recipe=f"{config.recipe}_official",
        model="resnet18_official",
        protocol="official",
        data=replace(
            config.data,
            placement="jitter",
            same_label=dataset == "multifashionmnist",  # two kinds have no label in common
            validation_share=0.0,
        ),
        method=OFFICIAL[method],
        rho=0.0,
    )
    return _flat(official, rho=2.0) if flat else official


def _flat(config: Config, rho: float) -> Config:
    return replace(config, rho=rho, method=replace(config.method, perturbation="asam"))


def recipes() -> Iterator[Callable[[], Config]]:
    """Yield a function for each data set and method, plain and flat, as in the text and as in the code."""
    for make, methods in ((multimnist, METHODS), (multimnist_official, OFFICIAL)):
        for dataset, method, flat in product(DATASETS, methods, (False, True)):
            recipe = partial(make, dataset, method, flat=flat)
            origin = "paper, table 1" if method in PAPER else "settings of table 1"
            origin = "authors' code, table 1" if methods is OFFICIAL else origin
            alone = "; see --task" if method == "stl" else ""
            recipe.__doc__ = f"{recipe().label} on {DATASETS[dataset]}, ResNet-18 ({origin}{alone})."
            yield recipe
