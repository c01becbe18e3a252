"""The parts of a run, each made from its config; a bad value of the config is found here."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from flatmtl import ASAM, SAM, FlatMTL, aggregators
from flatmtl.aggregators import AGGREGATORS
from flatmtl_bench import data
from flatmtl_bench.recipes.config import Config, Split


def dataset(config: Config, split: Split) -> Any:
    """Return one split of the data."""
    options = config.data.options(split)
    return data.build(config.data.name, split, seed=config.seed, root=config.root, source=config.source, **options)


def trained_tasks(config: Config, classes: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the number of classes of each task that is trained.

    Raises:
        ValueError: if the task that is to be trained alone is none of the data's.
    """
    if config.task is not None and config.task not in classes:
        raise ValueError(f"{config.data.name} has no task {config.task!r}. Its tasks: {', '.join(classes)}.")
    return {task: len(names) for task, names in classes.items() if config.task in (None, task)}


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
