"""How often a step calls its aggregator, counted: the last column of table 6 of Phan et al. (2025)."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from flatmtl import FlatMTL, TaskParameters
from flatmtl.aggregators import Aggregator, Context, LossWeighting
from flatmtl_bench import assembly
from flatmtl_bench.recipes.config import Config, Method


def aggregator_calls(method: Method, tasks: int) -> int:
    """Return how many times one step of a method aggregates, seen in a step on quadratic losses.

    A loss weighting aggregates no gradients: 0.

    Args:
        method: of a recipe.
        tasks: number of tasks, at least 1.

    Raises:
        ValueError: there is no task, or the method does not exist or has options that it does not know.

    Example:
        >>> from flatmtl_bench import recipes
        >>> names = ["cagrad", "f_cagrad", "f_cagrad_direct", "f_cagrad_second", "f_cagrad_each"]
        >>> [aggregator_calls(recipes.build(f"multimnist_{name}").method, tasks=2) for name in names]
        [1, 2, 1, 3, 3]
    """
    if tasks < 1:
        raise ValueError(f"expected at least one task, got {tasks}.")
    rho = 0.0 if method.perturbation == "none" else 0.1
    mtl = assembly.flat_mtl(Config(method=method, rho=rho), tasks)
    if isinstance(mtl.aggregator, LossWeighting):
        return 0
    counted = _Counted(mtl.aggregator, [])
    step: Any = {"combine": mtl.options.combine, "flat_scale": mtl.options.flat_scale}
    theta, names = Parameter(torch.ones(tasks + 1)), [f"task {i}" for i in range(tasks)]

    def closure(wanted: Sequence[str]) -> dict[str, Tensor]:
        squares = theta.square()
        return {task: squares[names.index(task)] + squares[-1] for task in wanted}  # no two gradients are parallel

    parameters = TaskParameters([theta], {task: [] for task in names})
    FlatMTL(counted, mtl.options.perturbation, **step).backward(closure, parameters)
    return len(counted.calls)


class _Counted(Aggregator):
    """An aggregator that notes each call; its copies, one for each branch of a step, note theirs in the same list."""

    def __init__(self, aggregator: Any, calls: list[int]) -> None:
        self.calls = calls
        self._aggregator = aggregator
        self.degree = getattr(aggregator, "degree", 1.0)
        self.uses_context = getattr(aggregator, "uses_context", False)

    def __call__(self, jacobian: Tensor, context: Context | None = None) -> Tensor:
        self.calls.append(len(jacobian))
        return self._aggregator(jacobian, context) if self.uses_context else self._aggregator(jacobian)

    def for_pairs(self) -> Aggregator:
        pairs = getattr(self._aggregator, "for_pairs", lambda: self._aggregator)
        return _Counted(pairs(), self.calls)

    def __deepcopy__(self, memo: dict[int, Any]) -> Aggregator:
        return _Counted(copy.deepcopy(self._aggregator, memo), self.calls)
