"""Families of recipes: one setting, with every method, plain and flat."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

from flatmtl_bench.recipes.config import Config, Method

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
"""Every method, by the name that recipes have."""


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

    Attributes:
        datasets: their titles by name.
        base: returns for the name of a data set what all its recipes have in common.
        origin: whose settings these are.
        rho: radius of the flat ones, until validation has chosen one.
        perturbations: of the flat ones; the first, until validation has chosen one.
        suffix: what the names end in.
        methods: by name.
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
    settled: bool = False

    def names(self, dataset: str) -> str:
        """Return how the recipes of a data set are named."""
        return f"{dataset}_[f_]METHOD{self.suffix}"

    def recipes(self) -> Iterator[Recipe]:
        """Yield the recipe of each data set and method, plain and flat."""
        for dataset, method, flat in product(self.datasets, self.methods, (False, True)):
            config = self._config(dataset, method, flat=flat)
            alone = "; see --task" if method == "stl" else ""
            text = f"{config.label} on {self.datasets[dataset]}, {config.model} ({self.origin}{alone})."
            yield Recipe(config, text, self._grid(method, flat=flat))

    def _config(self, dataset: str, method: str, *, flat: bool) -> Config:
        base = self.base(dataset)
        form = self.methods[method]
        if flat:
            form = replace(form, perturbation=self.perturbations[0])
        return replace(
            base,
            recipe=f"{dataset}_{'f_' if flat else ''}{method}{self.suffix}",
            method=form,
            rho=self.rho if flat else 0.0,
            task=self.first_task if method == "stl" else None,
        )

    def _grid(self, method: str, *, flat: bool) -> dict[str, Sequence[str]]:
        if self.settled:
            return {}
        perturbations = {"method.perturbation": self.perturbations} if len(self.perturbations) > 1 else {}
        return {**OPEN.get(method, {}), **({"rho": RADII, **perturbations} if flat else {})}
