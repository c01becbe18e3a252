"""The parts of a run, each made from its config; a bad value of the config is found here."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from flatmtl import ASAM, SAM, FlatMTL, TaskParameters, aggregators, split_parameters
from flatmtl.aggregators import AGGREGATORS
from flatmtl_bench import data, models
from flatmtl_bench.analysis.batches import Closure
from flatmtl_bench.data.base import TaskDataset
from flatmtl_bench.metrics import Objective
from flatmtl_bench.recipes.config import Config, Split


def dataset(config: Config, split: Split) -> TaskDataset:
    """Return one split of the data."""
    options = config.data.options(split)
    return data.build(config.data.name, split, seed=config.seed, root=config.root, source=config.source, **options)


def trained(config: Config, objectives: Mapping[str, Objective]) -> dict[str, Objective]:
    """Return the tasks that are trained, of those of the data.

    Raises:
        ValueError: if the task that is to be trained alone is none of the data's.
    """
    if config.task is not None and config.task not in objectives:
        raise ValueError(f"{config.data.name} has no task {config.task!r}. Its tasks: {', '.join(objectives)}.")
    return {task: objective for task, objective in objectives.items() if config.task in (None, task)}


def model(config: Config, objectives: Mapping[str, Objective], in_channels: int) -> nn.Module:
    """Return the network, with a head for each task."""
    heads = {task: objective.outputs for task, objective in objectives.items()}
    return models.build(config.model, heads, in_channels=in_channels, width=config.width)


def parameters(config: Config, model: Any, closure: Closure, tasks: Sequence[str]) -> TaskParameters:
    """Return which parameters are shared and which are a task's own.

    Raises:
        ValueError: if all outside the heads are to be shared, but the model does not tell its heads.
    """
    if config.shared == "reached":
        return split_parameters(model, closure, tasks)
    if not isinstance(getattr(model, "heads", None), nn.ModuleDict):
        raise ValueError(
            f"--shared all needs a model with an nn.ModuleDict `heads`, but {config.model} has none. "
            "Use --shared reached."
        )
    heads = {task: list(model.heads[task].parameters()) for task in tasks}
    own = {parameter for head in heads.values() for parameter in head}
    return TaskParameters([p for p in model.parameters() if p not in own], heads, model)


def optimizer(config: Config, parameters: Iterable[Parameter], weighting: Iterable[Parameter]) -> Optimizer:
    """Return the optimizer of a network, and of what a loss weighting trains, which does not decay."""
    chosen = config.optimizer
    groups: list[dict[str, Any]] = [{"params": list(parameters)}, {"params": list(weighting), "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if chosen.name == "sgd":
        return SGD(groups, chosen.lr, momentum=chosen.momentum, weight_decay=chosen.weight_decay)
    make = {"adam": Adam, "adamw": AdamW}[chosen.name]
    return make(groups, chosen.lr, weight_decay=chosen.weight_decay)


def flat_mtl(config: Config, tasks: int, process_group: Any = None) -> FlatMTL:
    """Return the multi-task step for a number of tasks, which a process group does together."""
    options: Any = {"combine": config.method.combine, "flat_scale": config.method.flat_scale}
    return FlatMTL(_aggregator(config, tasks), _perturbation(config), **options, process_group=process_group)


def _aggregator(config: Config, tasks: int) -> Any:
    """Return the aggregator, told the seed of the run and the number of tasks if it wants to know them."""
    name, options = config.method.aggregator, dict(config.method.options)
    known = {"seed": config.seed, "tasks": tasks}
    accepted = inspect.signature(AGGREGATORS[name]).parameters if name in AGGREGATORS else {}
    options = {option: value for option, value in known.items() if option in accepted} | options
    try:
        return aggregators.build(name, **options)
    except (TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(
            f"bad --method.options {options}: {error} Give all options that the aggregator {name} shall have, or "
            "--method.options alone for none."
        ) from None


def _perturbation(config: Config) -> SAM | None:
    method = config.method
    if method.perturbation == "none":
        return None
    make = {"sam": SAM, "asam": ASAM}[method.perturbation]
    return make(config.rho, rho_heads=method.rho_heads, norm=method.norm)
