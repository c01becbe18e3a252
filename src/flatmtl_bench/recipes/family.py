"""Families of recipes: one setting, with every method, plain and flat."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

from flatmtl_bench.recipes.config import Combine, Config, Method

AGGREGATORS = {
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
}
"""Methods that aggregate task gradients, by the name that recipes have."""
WEIGHTINGS = {
    "ls": Method("ls"),
    "si": Method("si"),
    "gls": Method("gls"),
    "rlw": Method("rlw"),
    "dwa": Method("dwa"),
    "uw": Method("uw"),
    "imtl_l": Method("imtl_l"),
    "famo": Method("famo"),
}
"""Methods that weigh losses: for their one sum all ways to combine are the same."""
METHODS = {"stl": Method("ls"), **AGGREGATORS, **WEIGHTINGS}
"""Every method."""
ABLATIONS: Sequence[Combine] = ("direct", "second", "each")
"""Ways to combine loss and flat gradients other than the paper's own."""


def official(mgda: Method) -> dict[str, Method]:
    """Return the methods of the authors' code but for Multi-MNIST; MGDA differs from data set to data set."""
    cagrad = Method("cagrad", {"c": 0.4, "rescale": "1+c2"})
    return {"mgda": mgda, "pcgrad": METHODS["pcgrad"], "cagrad": cagrad, "imtl_g": METHODS["imtl_g"]}


Perturbation = Literal["sam", "asam"]
RADII = ("0.005", "0.01", "0.05", "0.1", "0.5", "1.0", "2.0", "5.0")
"""Of the perturbation: the paper tunes it from 0.005 to 5 and does not say what came out."""
OPEN = {
    "cagrad": {"method.options.c": ("0.2", "0.4", "0.6", "0.8")},
    "fairgrad": {"method.options.alpha": ("1.0", "2.0", "5.0", "10.0")},
    "nash_mtl": {"method.options.max_norm": ("None", "1.0")},
}
"""Options of methods whose values are not published either."""


@dataclass(frozen=True)
class Recipe:
    """A config with a name.

    Attributes:
        config: of the run.
        text: what it is, in one line.
        grid: dotted names of what its source leaves open, each with values of which validation is to choose; as texts.
    """

    config: Config
    text: str
    grid: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """Recipes that differ in the method only: ``<data set>_<method>``, and ``<data set>_f_<method>`` for its flat form.

    Of methods that aggregate gradients there are also the ablations of the flat form, ``<data set>_f_<method>_direct``.

    Attributes:
        datasets: their titles by name.
        base: returns for the name of a data set what all its recipes have in common.
        origin: whose settings these are.
        rho: radius of the flat ones, until validation has chosen one.
        perturbations: of the flat ones; the first, until validation has chosen one.
        suffix: what the names end in.
        methods: by name.
        ablations: ways to combine that have recipes of their own.
        first_task: what ``stl`` trains unless ``--task`` says otherwise.
        settled: whether the source leaves nothing open.
    """

    datasets: Mapping[str, str]
    base: Callable[[str], Config]
    origin: str
    first_task: str
    rho: float = 0.5
    perturbations: Sequence[Perturbation] = ("asam",)
    suffix: str = ""
    methods: Mapping[str, Method] = field(default_factory=lambda: METHODS)
    ablations: Sequence[Combine] = ABLATIONS
    settled: bool = False

    def names(self, dataset: str) -> str:
        """Return how the recipes of a data set are named."""
        return f"{dataset}_[f_]METHOD{'[_COMBINE]' * bool(self.ablations)}{self.suffix}"

    def recipes(self) -> Iterator[Recipe]:
        """Yield the recipe of each data set and method, plain, flat, and each ablation of the flat form."""
        for dataset, (name, method) in product(self.datasets, self.methods.items()):
            flat = replace(method, perturbation=self.perturbations[0])
            yield self._recipe(dataset, name, name, method)
            yield self._recipe(dataset, name, f"f_{name}", flat)
            for combine in self.ablations if name in AGGREGATORS else ():
                yield self._recipe(dataset, name, f"f_{name}_{combine}", replace(flat, combine=combine))

    def _recipe(self, dataset: str, name: str, form: str, method: Method) -> Recipe:
        """Return the recipe of a method, whose own name is ``name``, in one of its forms."""
        flat, alone = method.perturbation != "none", name == "stl"
        config = replace(
            self.base(dataset),
            recipe=f"{dataset}_{form}{self.suffix}",
            method=method,
            rho=self.rho if flat else 0.0,
            task=self.first_task if alone else None,
        )
        label = config.label if method.combine == "individual" else f"{config.label} {method.combine}"
        origin = f"{self.origin}{'; see --task' * alone}"
        text = f"{label} on {self.datasets[dataset]}, {config.model} ({origin})."
        return Recipe(config, text, self._grid(name, flat=flat))

    def _grid(self, method: str, *, flat: bool) -> dict[str, Sequence[str]]:
        if self.settled:
            return {}
        perturbations = {"method.perturbation": self.perturbations} if len(self.perturbations) > 1 else {}
        return {**OPEN.get(method, {}), **({"rho": RADII, **perturbations} if flat else {})}
