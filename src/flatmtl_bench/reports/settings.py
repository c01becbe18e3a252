"""In what runs differ: the values of their configs by dotted names, and as flags of `flatmtl run`."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from flatmtl_bench.recipes.config import NAMES_AND_VALUES, Config

Settings = Mapping[str, Any]
"""Values of a config by dotted names; of the method's options each has its own."""

OPTIONS = "method.options"


def differing(many: Sequence[Settings]) -> list[str]:
    """Return the names of settings that are not the same for all.

    Example:
        >>> differing([{"rho": 0.5, "epochs": 9}, {"rho": 0.1, "epochs": 9}, {"epochs": 9, "rho": 0.5, "task": None}])
        ['rho', 'task']
    """
    names = dict.fromkeys(name for one in many for name in one)
    return [name for name in names if len({repr(one[name]) if name in one else "" for one in many}) > 1]


def text(chosen: Settings) -> str:
    """Return settings as words of a table.

    Example:
        >>> text({"rho": 0.5, "method.options.c": 0.4, "optimizer.lr": 0.001, "data.size": [64, 64]})
        'rho=0.5 c=0.4 optimizer.lr=0.001 data.size=64,64'
    """
    return " ".join(
        f"{name.removeprefix('method.').removeprefix('options.')}={_value(v)}" for name, v in chosen.items()
    )


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def flags(config: Config, names: Sequence[str]) -> str:
    """Return what to type after a recipe so that these settings are those of a config.

    The flag of the method's options replaces those of the recipe, so all are there if one is named.

    Example:
        >>> from flatmtl_bench import recipes
        >>> flags(recipes.build("multimnist_cagrad_official"), ["optimizer.lr", "method.options.c"])
        '--optimizer.lr 0.001 --method.options c 0.4 rescale 1+c2'
    """
    values = config.flat()
    words: list[str] = []
    for name in names:
        if not name.startswith(OPTIONS):
            value = values[name]
            words += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    if any(name.startswith(OPTIONS) for name in names):
        words += [f"--{OPTIONS}", *NAMES_AND_VALUES.str_from_instance(config.method.options)]
    return shlex.join(words)
