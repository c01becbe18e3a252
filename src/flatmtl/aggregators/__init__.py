"""Aggregators: functions from the task gradients, the rows of ``J``, to one direction.

Each takes a matrix ``J`` of shape ``(m, n)`` and returns a direction ``d`` of shape ``(n,)``; an optimizer steps
along ``-d``. They differ in what they do about conflict:

========  ==========================  ==================================================================
name      class                       direction
========  ==========================  ==================================================================
mean      :class:`Mean`               mean of the task gradients
sum       :class:`Sum`                sum of the task gradients
mgda      :class:`MGDA`               shortest convex combination; never conflicts
pcgrad    :class:`PCGrad`             sum of task gradients projected off those they conflict with
cagrad    :class:`CAGrad`             near the mean, best for the task that is served worst
imtl_g    :class:`IMTLG`              equal projections on all task gradients
========  ==========================  ==================================================================

:func:`build` makes one by its name, or a class of your own by ``"package.module:Class"``.
"""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib import import_module
from inspect import signature
from typing import Any, cast

from flatmtl.aggregators.base import Aggregator, AnyAggregator, Context, GramianAggregator
from flatmtl.aggregators.cagrad import CAGrad
from flatmtl.aggregators.imtl_g import IMTLG
from flatmtl.aggregators.mean import Mean
from flatmtl.aggregators.mgda import MGDA
from flatmtl.aggregators.pcgrad import PCGrad
from flatmtl.aggregators.sum import Sum

__all__ = [
    "AGGREGATORS",
    "IMTLG",
    "MGDA",
    "Aggregator",
    "AnyAggregator",
    "CAGrad",
    "Context",
    "GramianAggregator",
    "Mean",
    "PCGrad",
    "Sum",
    "build",
]

AGGREGATORS: dict[str, type[Aggregator]] = {
    "cagrad": CAGrad,
    "imtl_g": IMTLG,
    "mean": Mean,
    "mgda": MGDA,
    "pcgrad": PCGrad,
    "sum": Sum,
}
"""Every aggregator by its name."""


def build(name: str, **options: Any) -> AnyAggregator:
    """Return the aggregator called ``name``, made with ``options``.

    Args:
        name: a key of :data:`AGGREGATORS`, or ``"package.module:Class"`` for a class from elsewhere.
        options: what the class takes.

    Raises:
        ValueError: if there is no such aggregator.
        TypeError: if the class does not take these options.

    Example:
        >>> build("cagrad", c=0.5)
        CAGrad(c=0.5, rescale=None)
    """
    factory = _load(name) if ":" in name else AGGREGATORS.get(name)
    if factory is None:
        raise ValueError(f"unknown aggregator {name!r}.{_hint(name, AGGREGATORS)} Known: {', '.join(AGGREGATORS)}.")
    accepted = signature(factory).parameters
    try:
        signature(factory).bind(**options)
    except TypeError as error:
        unknown = [option for option in options if option not in accepted]
        hint = _hint(unknown[0], accepted) if unknown else ""
        expected = ", ".join(map(str, accepted.values())) or "no options"
        raise TypeError(f"{name}: {error}.{hint} Expected: {expected}.") from None
    return factory(**options)


def _load(path: str) -> Callable[..., AnyAggregator]:
    """Return what ``"package.module:Class"`` names."""
    module_name, _, class_name = path.partition(":")
    try:
        module = import_module(module_name)
    except (ModuleNotFoundError, ValueError) as error:
        missing = getattr(error, "name", None)
        if missing is not None and missing != module_name and not module_name.startswith(f"{missing}."):
            raise  # the module is there, but not what it imports
        raise ValueError(
            f"aggregator {path!r}: there is no module {module_name!r}. Expected 'package.module:Class'."
        ) from None
    found = getattr(module, class_name, None)
    if not callable(found):
        hint = _hint(class_name, vars(module))
        raise ValueError(f"aggregator {path!r}: module {module_name!r} has no class {class_name!r}.{hint}")
    return cast("Callable[..., AnyAggregator]", found)


def _hint(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
