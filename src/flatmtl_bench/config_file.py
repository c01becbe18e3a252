"""The file ``config.json`` of a run, which may come from anybody: read with every value checked."""

import json
import re
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from flatmtl_bench.recipes import Config
from flatmtl_bench.recipes.config import kinds

LARGEST = 1_000_000
"""Bytes of a file that is read."""


def read_config(path: Path) -> Config:
    """Return the config in a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large, no JSON, not of this version, or a value is not of its kind.
    """
    values = config_values(path)
    try:
        _check_kinds(Config, values)
        config = Config.from_dict(values)
        check_name(config.recipe)
    except ValueError as error:
        raise ValueError(f"{path} is no config of a run: {error}") from error
    return config


def config_values(path: Path) -> Any:
    """Return what a file holds, which may be no config.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large, or no JSON.
    """
    if (size := path.stat().st_size) > LARGEST:
        raise ValueError(f"{path} has {size:,} bytes; a config has some thousand.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deep for a config.") from error


def check_name(recipe: str) -> None:
    """Raise a `ValueError` unless a recipe's name can be part of a folder's name, so leads nowhere else."""
    if not re.fullmatch(r"\w[\w.-]{0,99}", recipe, re.ASCII):
        raise ValueError(f"a recipe's name is up to 100 letters, digits, _, - and . in a row, got {recipe!r:.120}.")


def _check_kinds(cls: type, values: Any, within: str = "") -> None:
    """Raise a `ValueError` unless each value is of the kind that its field of a dataclass has."""
    if not isinstance(values, dict):
        raise ValueError(f"{within.rstrip('.') or 'it'} must be an object, got {values!r:.80}.")
    for name, kind in kinds(cls).items():
        if name not in values:
            continue  # `Config.from_dict` lists what is missing
        if isinstance(kind, type) and is_dataclass(kind):
            _check_kinds(kind, values[name], f"{within}{name}.")
        elif not _is_of(kind, values[name]):
            raise ValueError(f"{within}{name} must be {_words(kind)}, got {values[name]!r:.80}.")


def _is_of(kind: Any, value: Any) -> bool:
    """Whether a value from JSON is of a kind: a plain type, a choice, a union, a list or a dictionary."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return any(value == argument and type(value) is type(argument) for argument in arguments)
    if origin in (Union, UnionType):
        return any(_is_of(argument, value) for argument in arguments)
    if origin is list:
        return isinstance(value, list) and all(_is_of(arguments[0], item) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is_of(arguments[1], item) for item in value.values())
    return type(value) in (int, float) if kind is float else type(value) is kind


def _words(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
