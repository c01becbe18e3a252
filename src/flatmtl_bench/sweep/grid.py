"""The runs of a sweep: every recipe with every combination of the grid and every seed."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from itertools import chain, product
from typing import Any, get_type_hints

from flatmtl_bench import recipes
from flatmtl_bench.commands.training import Run
from flatmtl_bench.commands.words import parse
from flatmtl_bench.recipes.config import NAMES_AND_VALUES, Config
from flatmtl_bench.runs import run_name

OPTIONS = "method.options."
"""What the names of single options of the aggregator begin with; the other options stay as the recipe has them."""


def axes(grid: Iterable[str]) -> dict[str, list[str]]:
    """Return the values of each name, from texts such as ``rho=0.05,0.1``; commas within brackets do not divide.

    Raises:
        ValueError: a text has no name or an empty value, a name comes twice or is that of no flag with values, or a
            value cannot be read.

    Example:
        >>> axes(["rho=0.05,0.1", "method.options.weights=[1,2],[3,4]"])
        {'rho': ['0.05', '0.1'], 'method.options.weights': ['[1,2]', '[3,4]']}
    """
    found: dict[str, list[str]] = {}
    for text in grid:
        name, _, rest = text.partition("=")
        name, values = name.lstrip("-").replace("-", "_"), re.split(r",(?![^\[]*\])", rest)
        if not name or not all(values):
            raise ValueError(f"--grid {text!r} is no name with values; expected for example --grid rho=0.05,0.1.")
        if re.fullmatch(r"h|help|tyro_.*", name):
            raise ValueError(f"--grid varies what decides the numbers, not {name}; see `flatmtl run --help`.")
        for value in values:
            _check_value(name, value)
        if name in found:
            at_once = ",".join(found[name] + values)
            raise ValueError(f"--grid has {name} twice. Give all its values at once: {name}={at_once}.")
        found[name] = values
    return found


def _check_value(name: str, value: str) -> None:
    """Raise a `ValueError` if a value has quotes that do not match, or words that would be other flags."""
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise ValueError(
            f"--grid {name}: cannot read the value {value} ({error}). Quotes must match, and what is between two "
            "commas is one value, in quotes too; only within brackets commas do not divide."
        ) from error
    if not name.startswith(OPTIONS) and (flags := [word for word in words if re.match(r"--|-[A-Za-z]", word)]):
        raise ValueError(f"--grid {name}: {flags[0]} is a flag, not a value. Give it outside of --grid, for all runs.")


Grid = Mapping[str, Sequence[str]]
"""The values of each flag that is varied, as texts."""


def combinations(grids: Mapping[str, Grid], seeds: int, flags: Sequence[str]) -> list[Run]:
    """Return the run of each recipe, combination and seed, checked as `flatmtl run` checks what is typed.

    Args:
        grids: of each recipe what is varied, by its name.
        seeds: their number; the first one is what ``--seed`` says.
        flags: of `flatmtl run`, for all runs.

    Raises:
        ValueError: a recipe or a value makes no sense, or a flag is varied that is also given for all.
        SystemExit: a flag is unknown or its value cannot be read, which tyro has said.
    """
    given = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in flags if word.startswith("--")}
    runs = chain.from_iterable(_combined(name, grid, given, flags) for name, grid in grids.items())
    return [replace(run, config=replace(run.config, seed=run.config.seed + k)) for run in runs for k in range(seeds)]


def _combined(name: str, grid: Grid, given: set[str], flags: Sequence[str]) -> list[Run]:
    """Return the run of each combination of a grid."""
    varied = {OPTIONS.rstrip(".") if name.startswith(OPTIONS) else name for name in grid}
    if both := sorted(given & varied):
        raise ValueError(
            f"--{both[0]} is given for all runs and varied by --grid, or by --tune. Leave one of them out."
        )
    if common := sorted(set(grid) & {field.name for field in fields(Run)}):
        raise ValueError(
            f"--grid varies what decides the numbers, not {common[0]}. Give --{common[0]} once, for all runs."
        )
    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    return [_run(name, flags, point) for point in points]


def _run(name: str, flags: Sequence[str], point: Mapping[str, str]) -> Run:
    words = [word for key, value in point.items() if not key.startswith(OPTIONS) for word in _flag(key, value)]
    both = ()  # of the flags that put something on and off: a grid also gives what the recipe has
    run: Run = parse(Run, [name, *flags, *words], "sweep", Run(recipes.build(name)), config=both)
    pairs = [word for key, value in point.items() if key.startswith(OPTIONS) for word in (key[len(OPTIONS) :], value)]
    method = run.config.method
    options = {**method.options, **NAMES_AND_VALUES.instance_from_str(pairs)}
    return replace(run, config=replace(run.config, method=replace(method, options=options)))


def _flag(key: str, value: str) -> list[str]:
    """Return the words of a flag; one that is on or off has no value.

    Example:
        >>> _flag("rho", "0.1"), _flag("data.download", "False"), _flag("data.same_label", "False")
        (['--rho', '0.1'], ['--data.no-download'], ['--data.same_label', 'False'])
    """
    if value in ("True", "False") and _type(key) is bool:
        parents, dot, name = key.rpartition(".")
        return [f"--{parents}{dot}{'' if value == 'True' else 'no-'}{name}"]
    return [f"--{key}", *shlex.split(value)]


def _type(key: str) -> Any:
    """Return the type of a value of the config by its dotted name; None if there is none."""
    kind: Any = Config
    for part in key.split("."):
        kind = get_type_hints(kind).get(part) if is_dataclass(kind) else None
    return kind


def by_name(runs: Iterable[Run]) -> dict[str, Run]:
    """Return the runs by the names of their folders; equal ones are one run.

    Raises:
        ValueError: two runs are not equal but would have one folder.
    """
    found: dict[str, Run] = {}
    for run in runs:
        name = run_name(run.config)
        if (other := found.setdefault(name, run)) != run:
            values = [{**asdict(r), **asdict(r.config), "config": None} for r in (other, run)]
            differ = ", ".join(key for key, value in values[0].items() if value != values[1][key])
            raise ValueError(
                f"two runs of the sweep would share the folder {name}: they differ in {differ} only, which does not "
                "count for the name. Vary it in sweeps with different --out."
            )
    return found
