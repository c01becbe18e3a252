"""Recipes: configs by name, each a data set, a model and a method with the numbers that go with them."""

from itertools import chain

from flatmtl_bench.choices import did_you_mean
from flatmtl_bench.recipes import celeba, multimnist, scenes
from flatmtl_bench.recipes.config import Config
from flatmtl_bench.recipes.family import ABLATIONS, AGGREGATORS, METHODS, Family, Recipe

__all__ = ["ABLATIONS", "AGGREGATORS", "FAMILIES", "METHODS", "RECIPES", "Config", "Family", "Recipe", "build"]

FAMILIES = (*multimnist.FAMILIES, *celeba.FAMILIES, *scenes.FAMILIES)
RECIPES: dict[str, Recipe] = {
    recipe.config.recipe: recipe for recipe in chain.from_iterable(family.recipes() for family in FAMILIES)
}


def find(name: str) -> Recipe:
    """Return the recipe ``name``, a key of ``RECIPES``.

    Raises:
        ValueError: if there is none of that name.
    """
    if name not in RECIPES:
        guess = did_you_mean(name, RECIPES)
        raise ValueError(f"unknown recipe {name!r}.{guess} `flatmtl list` shows all {len(RECIPES)}.")
    return RECIPES[name]


def build(name: str) -> Config:
    """Return the config of the recipe ``name``, a key of ``RECIPES``.

    Raises:
        ValueError: if there is none of that name.

    Example:
        >>> config = build("multimnist_f_cagrad")
        >>> config.method.aggregator, config.method.perturbation, config.rho
        ('cagrad', 'asam', 0.5)
    """
    return find(name).config
