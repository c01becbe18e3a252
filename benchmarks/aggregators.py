"""Time and exactness of aggregators on the Gramian: flatmtl's, TorchJD's, and SciPy where it does the job.

All in one process with one thread, taking turns on the same random matrices in float64, from the Gramian to the
weights (TorchJD's Nash-MTL starts from the matrix). ``python benchmarks/aggregators.py`` writes
``results/aggregators.json`` beside this file (about 4 minutes); ``--tasks 2 3 --seconds 0.02`` is a glance.
"""

import os

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # before NumPy comes in, whose threads are not PyTorch's

import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torchjd.aggregation as torchjd
import tyro
from scipy import optimize
from torch import Tensor

from flatmtl.aggregators import AGGREGATORS
from flatmtl_bench.environment import environment
from flatmtl_bench.files import write_whole

C, ALPHA = 0.4, 2.0
PACKAGES = ("torchjd", "scipy", "cvxpy", "clarabel", "ecos", "qpsolvers", "quadprog")
"""The peers and the solvers they call."""

Solver = Callable[[Tensor, Tensor], Tensor]
"""From a matrix ``(m, n)`` and its Gramian ``(m, m)`` to weights ``(m,)``."""


@dataclass(frozen=True)
class Options:
    """Time aggregators against TorchJD and SciPy, and write the result as JSON."""

    tasks: tuple[int, ...] = (2, 3, 10, 40, 100)
    """Numbers of tasks."""
    seeds: int = 5
    """Number of random matrices for each number of tasks."""
    seconds: float = 0.3
    """Each solver is called for at least this long on each number of tasks, and at least once on each matrix."""
    most_seconds: float = 3.0
    """And for not much longer than this, even if it is slow."""
    out: Path = Path(__file__).parent / "results" / "aggregators.json"
    """The file to write."""


@dataclass(frozen=True)
class Method:
    """One method with what is compared.

    Attributes:
        name: of our class.
        key: its name in ``AGGREGATORS``.
        options: what our class is given.
        torchjd: TorchJD's solver for a number of tasks.
        scipy: SciPy's solver of the Gramian, if there is a natural one.
        measures: what is measured of the weights, by a short name, with what it means.
        measure: from the Gramian and everybody's weights to these measures for each.
    """

    name: str
    key: str
    torchjd: Callable[[int], Solver]
    options: Mapping[str, Any] = field(default_factory=dict)
    scipy: Callable[[np.ndarray], np.ndarray] | None = None
    measures: Mapping[str, str] = field(default_factory=dict)
    measure: Callable[[Tensor, Tensor], Mapping[str, Tensor]] = lambda G, W: {}

    def solvers(self, m: int) -> dict[str, Solver]:
        """Return everybody's solver for ``m`` tasks, new ones."""
        ours = AGGREGATORS[self.key](**self.options)
        found: dict[str, Solver] = {"flatmtl": lambda J, G: ours.weights(G), "TorchJD": self.torchjd(m)}
        if self.scipy is not None:
            solve = self.scipy
            found["SciPy"] = lambda J, G: torch.from_numpy(solve(G.numpy()))
        return found


def from_gramian(weighting: Callable[[Tensor], Tensor], m: int) -> Solver:
    """Return one of TorchJD's weightings as a solver."""
    del m
    return lambda J, G: weighting(G)


def nash_of_torchjd(m: int) -> Solver:
    """Return TorchJD's Nash-MTL without its limit on the norm; it starts from the weights of the call before."""
    weighting = torchjd.NashMTL(n_tasks=m, max_norm=0.0).weighting
    return lambda J, G: weighting(J)


def min_norm_by_scipy(G: np.ndarray) -> np.ndarray:
    """Return the weights of the smallest convex combination."""
    G = G / G.diagonal().max()
    return on_simplex(lambda w: (0.5 * w @ G @ w, G @ w), len(G))


def cagrad_by_scipy(G: np.ndarray) -> np.ndarray:
    """Return the weights of CAGrad from its dual, a problem on the simplex."""
    m = len(G)
    mean = G.mean(axis=1)  # <g_i, g_0>
    radius = C * np.sqrt(mean.mean())
    unit = mean.mean()

    def dual(w: np.ndarray) -> tuple[float, np.ndarray]:
        length = max(np.sqrt(max(w @ G @ w, 0.0)), np.finfo(float).tiny)
        return (mean @ w + radius * length) / unit, (mean + radius * (G @ w) / length) / unit

    w = on_simplex(dual, m)
    return 1.0 / m + radius / np.sqrt(w @ G @ w) * w


def on_simplex(function: Callable[[np.ndarray], tuple[float, np.ndarray]], m: int) -> np.ndarray:
    """Return the minimum on the simplex of a function that returns its gradient too."""
    total = {"type": "eq", "fun": lambda w: w.sum() - 1.0, "jac": lambda w: np.ones(m)}
    start = np.full(m, 1.0 / m)
    options = {"maxiter": 1000, "ftol": 1e-14}
    found = optimize.minimize(
        function, start, jac=True, method="SLSQP", bounds=[(0.0, 1.0)] * m, constraints=[total], options=options
    )
    w = found.x.clip(min=0.0)
    return w / w.sum()


def fair_by_scipy(alpha: float, G: np.ndarray) -> np.ndarray:
    """Return the weights with G w = w^(-1 / alpha), from the equations for their logarithms."""

    def equations(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        w, gains = np.exp(x), np.exp(-x / alpha)
        return G @ w - gains, G * w + np.diag(gains / alpha)

    start = -np.log(G.diagonal()) / (1.0 + 1.0 / alpha)
    return np.exp(optimize.root(equations, start, jac=True, method="hybr", tol=1e-13).x)


def min_norm_gaps(G: Tensor, W: Tensor) -> dict[str, Tensor]:
    """Return how far each row of ``W`` is from the smallest convex combination."""
    squares, least = (W @ G * W).sum(dim=1), (W @ G).amin(dim=1)
    return {"gap": (squares - least) / G.diagonal().max(), "excess": squares / squares.min() - 1.0}


def cagrad_shortfall(G: Tensor, W: Tensor) -> dict[str, Tensor]:
    """Return by how much each row of ``W`` serves the worst-served task less than the best row does.

    Weights of a direction outside the ball around the mean are infinitely short.
    """
    served, mean = (W @ G).amin(dim=1), G.mean().sqrt()
    away = W - 1.0 / len(G)
    allowed = (away @ G * away).sum(dim=1).sqrt() <= C * mean * (1.0 + 1e-6)
    served = torch.where(allowed, served, -torch.inf)
    return {"shortfall": (served.max() - served) / (G.diagonal().max().sqrt() * mean)}


def fair_residual(alpha: float, G: Tensor, W: Tensor) -> dict[str, Tensor]:
    """Return how far each row of ``W`` is from solving the equations."""
    return {"residual": ((W @ G) * W.clamp(min=0.0) ** (1.0 / alpha) - 1.0).abs().amax(dim=1)}


def worst_conflict(G: Tensor, W: Tensor) -> dict[str, Tensor]:
    """Return the most negative cosine between each direction and a task gradient, 0 if none is negative."""
    lengths = (W @ G * W).sum(dim=1, keepdim=True).sqrt() * G.diagonal().sqrt()
    return {"conflict": (-(W @ G) / lengths).amax(dim=1).clamp(min=0.0)}


RESIDUAL = {"residual": "`max |(G w)_i w_i^(1/alpha) - 1|`, which the solution makes 0"}
METHODS = (
    Method(
        "MGDA",
        "mgda",
        partial(from_gramian, torchjd.MGDAWeighting()),
        scipy=min_norm_by_scipy,
        measures={
            "gap": "`(|d|^2 - min <d, g_i>) / max |g_i|^2`, 0 for the smallest combination",
            "excess": "`|d|^2` over the smallest that anyone found, minus 1",
        },
        measure=min_norm_gaps,
    ),
    Method(
        "CAGrad",
        "cagrad",
        partial(from_gramian, torchjd.CAGradWeighting(c=C)),
        options={"c": C},
        scipy=cagrad_by_scipy,
        measures={"shortfall": "`min <g_i, d>` short of the best that anyone found, over `max |g_i| |g_0|`"},
        measure=cagrad_shortfall,
    ),
    Method("PCGrad", "pcgrad", partial(from_gramian, torchjd.PCGradWeighting())),
    Method(
        "NashMTL",
        "nash_mtl",
        nash_of_torchjd,
        scipy=partial(fair_by_scipy, 1.0),
        measures=RESIDUAL,
        measure=partial(fair_residual, 1.0),
    ),
    Method(
        "FairGrad",
        "fairgrad",
        partial(from_gramian, torchjd.FairGradWeighting(alpha=ALPHA)),
        options={"alpha": ALPHA},
        scipy=partial(fair_by_scipy, ALPHA),
        measures=RESIDUAL,
        measure=partial(fair_residual, ALPHA),
    ),
    Method(
        "UPGrad",
        "upgrad",
        partial(from_gramian, torchjd.UPGradWeighting()),
        measures={"conflict": "size of the most negative cosine of `d` and a task gradient; none should be negative"},
        measure=worst_conflict,
    ),
    Method("AlignedMTL", "aligned_mtl", partial(from_gramian, torchjd.AlignedMTLWeighting())),
    Method("IMTLG", "imtl_g", partial(from_gramian, torchjd.IMTLGWeighting())),
)


def main(options: Options) -> None:
    """Run everything, write the result and print a small table."""
    torch.set_num_threads(1)
    result = run(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.out, json.dumps(result, indent=1) + "\n")
    print("\n".join(lines(result["records"])))


def run(options: Options) -> dict[str, Any]:
    """Return the result: a record for each method, number of tasks and solver."""
    methods = [method for method in METHODS if method.key in AGGREGATORS]
    for name in sorted({method.key for method in METHODS} - AGGREGATORS.keys()):
        print(f"flatmtl has no {name!r}: left out.", file=sys.stderr)
    records = []
    for method in methods:
        for m in options.tasks:
            print(f"{method.name}, {m} tasks", file=sys.stderr)
            records += compare(method, m, options)
    made_with = environment()
    packages = {**made_with["packages"], **{name: version(name) for name in PACKAGES}}
    return {
        "options": {"seeds": options.seeds, "seconds": options.seconds, "columns": "2 m + 10", "dtype": "float64"},
        "measures": {method.name: dict(method.measures) for method in methods},
        "records": records,
        "environment": {**made_with, "packages": packages},
    }


def compare(method: Method, m: int, options: Options) -> list[dict[str, Any]]:
    """Return a record of each solver of one method for ``m`` tasks: its time, and what its weights are worth."""
    problems = [problem(m, seed) for seed in range(options.seeds)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the peers' solvers say of themselves
        times, weights = take_turns(method.solvers(m), problems, options)
    worth: dict[str, dict[str, list[float]]] = {by: {name: [] for name in method.measures} for by in times}
    for (_, G), found in zip(problems, weights, strict=True):
        for name, values in method.measure(G, torch.stack(list(found.values()))).items():
            for by, value in zip(found, values.tolist(), strict=True):
                worth[by][name].append(value)
    return [
        {"method": method.name, "by": by, "tasks": m, "seconds": median(t), "calls": len(t), "worth": worth[by]}
        for by, t in times.items()
    ]


def problem(m: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return a matrix with rows of different lengths, about half of whose pairs conflict, and its Gramian."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, dtype=torch.float64, generator=generator)
    n = 2 * m + 10
    J = (draw(m, n) + draw(m, 2) @ draw(2, n)) * (0.5 * draw(m, 1)).exp()
    return J, J @ J.T


def take_turns(
    solvers: Mapping[str, Solver], problems: Sequence[tuple[Tensor, Tensor]], options: Options
) -> tuple[dict[str, list[float]], list[dict[str, Tensor]]]:
    """Return the times of the calls of every solver, and for each problem the weights that each found first.

    A turn is one call for each problem. A solver's very first call sets things up and does not count, unless it is
    slow enough to be the only one.
    """
    times: dict[str, list[float]] = {by: [] for by in solvers}
    weights: list[dict[str, Tensor]] = [{} for _ in problems]

    def call(by: str, i: int) -> None:
        start = time.perf_counter()
        w = solvers[by](*problems[i])
        times[by].append(time.perf_counter() - start)
        weights[i].setdefault(by, w)

    for by in solvers:
        call(by, 0)
        if sum(times[by]) < options.most_seconds:
            times[by].clear()
            del weights[0][by]
    going = [by for by in solvers if not times[by]]
    while going:
        for by in going:
            for i in range(len(problems)):
                if sum(times[by]) < options.most_seconds:
                    call(by, i)
        going = [by for by in going if sum(times[by]) < options.seconds]
    return times, weights


def lines(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a small table of the records."""
    head = f"{'method':<12}{'tasks':>6}  {'by':<8}{'ms':>10}  worst of all matrices"
    return [
        head,
        *(
            f"{r['method']:<12}{r['tasks']:>6}  {r['by']:<8}{1000 * r['seconds']:>10.3f}  "
            + ", ".join(f"{name} {max(values):.1e}" for name, values in r["worth"].items())
            for r in records
        ),
    ]


if __name__ == "__main__":
    main(tyro.cli(Options))
