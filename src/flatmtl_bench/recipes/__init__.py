"""Recipes: functions without arguments that return the config of a run, by name in `RECIPES`."""

from collections.abc import Callable

from flatmtl_bench.choices import did_you_mean
from flatmtl_bench.recipes import multimnist
from flatmtl_bench.recipes.config import Config

__all__ = ["RECIPES", "Config", "build"]

RECIPES: dict[str, Callable[[], Config]] = {recipe().recipe: recipe for recipe in multimnist.recipes()}


def build(name: str) -> Config:
    """Return the config of the recipe ``name``, a key of ``RECIPES``.

    Raises:
        ValueError: if there is none of that name.

    Example:
        >>> config = build("multimnist_f_cagrad")
        >>> config.method.aggregator, config.method.perturbation, config.rho
        ('cagrad', 'asam', 0.5)
    """
    if name not in RECIPES:
        guess = did_you_mean(name, RECIPES)
        raise ValueError(f"unknown recipe {name!r}.{guess} `flatmtl list` shows all {len(RECIPES)}.")
    return RECIPES[name]()
