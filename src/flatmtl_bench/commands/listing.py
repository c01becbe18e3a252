"""`flatmtl list`: what recipes there are."""

from collections.abc import Iterator
from dataclasses import dataclass

from tyro.conf import Positional

from flatmtl_bench.commands.words import parse
from flatmtl_bench.output import Stop, answer
from flatmtl_bench.recipes import ABLATIONS, AGGREGATORS, FAMILIES, METHODS, RECIPES


@dataclass(frozen=True)
class List:
    """List the recipes: all families of them, or those whose name contains a text."""

    part: Positional[str] = ""
    """A text, e.g. cagrad. The whole name of a recipe shows its grid too: what its source leaves open."""


def list_recipes(words: list[str]) -> int:
    """Print what recipes there are and what they are."""
    part = parse(List, words, "list").part
    for line in _listed(part) if part else _families():
        answer(line)
    return 0


def _families() -> Iterator[str]:
    for family in FAMILIES:
        for dataset, title in family.datasets.items():
            yield f"{family.names(dataset):<44} {title} ({family.origin}), {len(family.methods)} methods"
    yield f"METHOD: {', '.join(METHODS)}"
    first, *_, last = AGGREGATORS
    yield f"COMBINE: {', '.join(ABLATIONS)} (f_ and {first} to {last} only; without it as in the paper)"
    yield f"f_: the flat form. `flatmtl list PART` shows those of the {len(RECIPES)} recipes whose name contains PART."


def _listed(part: str) -> Iterator[str]:
    wanted = part.lower().replace("-", "_")  # as in the tables, too: F-IMTL
    found = {name: recipe.text for name, recipe in RECIPES.items() if wanted in name}
    if not found:
        raise Stop(f"no recipe contains {part!r}; `flatmtl list` shows how all {len(RECIPES)} are named.")
    width = max(map(len, found))
    for name, text in found.items():
        yield f"{name:<{width}} {text}"
    if part in RECIPES:
        for name, values in RECIPES[part].grid.items():
            yield f"  {part} leaves open: {name}={','.join(values)}"
