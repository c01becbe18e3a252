"""Aggregators: functions from the task gradients, the rows of ``J``, to one direction.

Each takes a matrix ``J`` of shape ``(m, n)`` and returns a direction ``d`` of shape ``(n,)``; an optimizer steps
along ``-d``. They differ in what they do about conflict:

=============  ====================  ==================================================================
name           class                 direction
=============  ====================  ==================================================================
mean           :class:`Mean`         mean of the task gradients
sum            :class:`Sum`          sum of the task gradients
fixed          :class:`Fixed`        sum of the task gradients with given weights
random         :class:`Random`       mean of the task gradients with random weights
mgda           :class:`MGDA`         shortest convex combination; never conflicts
upgrad         :class:`UPGrad`       mean of the task gradients projected to conflict with none
dualproj       :class:`DualProj`     mean, projected to conflict with none
nash_mtl       :class:`NashMTL`      largest product of the tasks' gains; never conflicts
fairgrad       :class:`FairGrad`     alpha-fair gains; never conflicts
cagrad         :class:`CAGrad`       near the mean, best for the task that is served worst
imtl_g         :class:`IMTLG`        equal projections on all task gradients
config         :class:`ConFIG`       equal cosines to all task gradients
aligned_mtl    :class:`AlignedMTL`   mean, after the task gradients were made orthogonal
pcgrad         :class:`PCGrad`       sum of task gradients projected off those they conflict with
gradvac        :class:`GradVac`      sum of task gradients turned to their usual cosines
graddrop       :class:`GradDrop`     for each parameter, the task gradients of one sign
=============  ====================  ==================================================================

Loss weightings scale whole losses, heads included; see :class:`LossWeighting`:

=============  ====================  ==================================================================
name           class                 weights
=============  ====================  ==================================================================
ls             :class:`LS`           1: the sum of the losses
si             :class:`SI`           1 / loss: the sum of the log losses
gls            :class:`GLS`          the geometric mean of the losses
rlw            :class:`RLW`          random
dwa            :class:`DWA`          by how fast each loss fell over the last epochs
uw             :class:`UW`           trained, by uncertainty
imtl_l         :class:`IMTLL`        trained, to equal weighted losses
famo           :class:`FAMO`         to equal rates of decrease
=============  ====================  ==================================================================

:func:`build` makes one by its name, or a class of your own by ``"package.module:Class"``.
"""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib import import_module
from inspect import signature
from typing import Any, cast

from flatmtl.aggregators.aligned_mtl import AlignedMTL
from flatmtl.aggregators.base import Aggregator, AnyAggregator, GramianAggregator, LossWeighting
from flatmtl.aggregators.cagrad import CAGrad
from flatmtl.aggregators.config import ConFIG
from flatmtl.aggregators.context import Context
from flatmtl.aggregators.dualproj import DualProj
from flatmtl.aggregators.fairgrad import FairGrad
from flatmtl.aggregators.fixed import Fixed
from flatmtl.aggregators.graddrop import GradDrop
from flatmtl.aggregators.gradvac import GradVac
from flatmtl.aggregators.imtl_g import IMTLG
from flatmtl.aggregators.mean import Mean
from flatmtl.aggregators.mgda import MGDA
from flatmtl.aggregators.nash_mtl import NashMTL
from flatmtl.aggregators.pcgrad import PCGrad
from flatmtl.aggregators.random_weights import Random
from flatmtl.aggregators.sum import Sum
from flatmtl.aggregators.upgrad import UPGrad
from flatmtl.aggregators.weightings import DWA, FAMO, GLS, IMTLL, LS, RLW, SI, UW

__all__ = [
    "AGGREGATORS",
    "DWA",
    "FAMO",
    "GLS",
    "IMTLG",
    "IMTLL",
    "LS",
    "MGDA",
    "RLW",
    "SI",
    "UW",
    "Aggregator",
    "AlignedMTL",
    "AnyAggregator",
    "CAGrad",
    "ConFIG",
    "Context",
    "DualProj",
    "FairGrad",
    "Fixed",
    "GradDrop",
    "GradVac",
    "GramianAggregator",
    "LossWeighting",
    "Mean",
    "NashMTL",
    "PCGrad",
    "Random",
    "Sum",
    "UPGrad",
    "build",
]

AGGREGATORS: dict[str, type[Aggregator]] = {
    "mean": Mean,
    "sum": Sum,
    "fixed": Fixed,
    "random": Random,
    "mgda": MGDA,
    "upgrad": UPGrad,
    "dualproj": DualProj,
    "nash_mtl": NashMTL,
    "fairgrad": FairGrad,
    "cagrad": CAGrad,
    "imtl_g": IMTLG,
    "config": ConFIG,
    "aligned_mtl": AlignedMTL,
    "pcgrad": PCGrad,
    "gradvac": GradVac,
    "graddrop": GradDrop,
    "ls": LS,
    "si": SI,
    "gls": GLS,
    "rlw": RLW,
    "dwa": DWA,
    "uw": UW,
    "imtl_l": IMTLL,
    "famo": FAMO,
}
"""Every aggregator by its name: gradient aggregators, then loss weightings."""


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
    except (ModuleNotFoundError, ValueError, TypeError) as error:
        missing = getattr(error, "name", None)
        if missing is not None and missing != module_name and not module_name.startswith(f"{missing}."):
            raise  # the module is there, but not what it imports
        raise ValueError(
            f"aggregator {path!r}: there is no module {module_name!r}. Expected 'package.module:Class'."
        ) from None
    found = getattr(module, class_name, None)
    if found is not None and not callable(found):
        raise ValueError(f"aggregator {path!r} is {found!r}; expected a class, or a function that makes an aggregator.")
    if found is None:
        hint = _hint(class_name, vars(module))
        raise ValueError(f"aggregator {path!r}: module {module_name!r} has no class {class_name!r}.{hint}")
    return cast("Callable[..., AnyAggregator]", found)


def _hint(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
