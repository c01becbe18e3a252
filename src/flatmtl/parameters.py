"""Who owns which parameter: the trunk that tasks share, or one task's head."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from flatmtl.closures import Closure
from flatmtl.world import World


class TaskParameters:
    """The shared parameters and each task's own, every parameter with one owner.

    The tasks are the keys of ``heads``, in that order. A parameter that is listed twice in one place counts
    once (tied weights); one that does not require a gradient is left out.

    Args:
        shared: parameters on which the task gradients are aggregated.
        heads: for each task its own parameters; an empty list for a task that has none.
        model: gives the parameters their names in messages, and the step its buffers. Without it, buffers
            are found from the modules that run.

    Attributes:
        tasks: names of the tasks.

    Raises:
        TypeError: if something other than parameters is listed.
        ValueError: if a parameter has two owners, no parameter is shared, there is no task, or a parameter is
            complex.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> trunk, left, right = nn.Linear(3, 2), nn.Linear(2, 1), nn.Linear(2, 1)
        >>> parameters = TaskParameters(trunk.parameters(), {"left": left.parameters(), "right": right.parameters()})
        >>> parameters
        TaskParameters(8 shared; left: 3, right: 3)
    """

    def __init__(
        self,
        shared: Iterable[Parameter],
        heads: Mapping[str, Iterable[Parameter]],
        model: nn.Module | None = None,
    ) -> None:
        self.model = model
        self._names = {} if model is None else {id(p): name for name, p in model.named_parameters()}
        self.shared = self._own("shared", shared)
        self.heads = {task: self._own(f"the head {task!r}", own) for task, own in heads.items()}
        self.tasks = tuple(self.heads)
        if not self.tasks:
            raise ValueError("heads is empty; expected at least one task, e.g. heads={'seg': [...]}.")
        if not self.shared:
            raise ValueError(
                "no parameter is shared; expected at least one trainable parameter in shared. "
                "Is the trunk frozen? See split_parameters."
            )
        self._check_owners()

    @property
    def everything(self) -> list[Parameter]:
        """The shared parameters, then those of each head."""
        return [*self.shared, *(p for head in self.heads.values() for p in head)]

    @property
    def devices(self) -> list[torch.device]:
        """The devices that hold a parameter, each once."""
        return list(dict.fromkeys(p.device for p in self.everything))

    def check_trainable(self) -> None:
        """Raise if a parameter was frozen since the split was made.

        Raises:
            ValueError: naming the parameter.
        """
        for parameter in self.everything:
            if not parameter.requires_grad:
                raise ValueError(
                    f"{self._name(parameter)} no longer requires a gradient, but did when the parameters were "
                    "split. Split them again: split_parameters(model, closure, tasks)."
                )

    def world(self, modules: Iterable[nn.Module] = ()) -> World:
        """Return random streams and buffers as they are now."""
        return World(self.model, self.devices, modules)

    def _own(self, owner: str, parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
        listed = _listed(owner, parameters)
        for i, parameter in enumerate(listed):
            self._names.setdefault(id(parameter), f"{owner} [{i}]")
            if parameter.is_complex():
                raise ValueError(
                    f"{self._name(parameter)} in {owner} is complex; expected real parameters. Keep the real and "
                    "the imaginary part as two real parameters."
                )
        return tuple({id(p): p for p in listed if p.requires_grad}.values())

    def _check_owners(self) -> None:
        owner: dict[int, str] = {id(p): "shared" for p in self.shared}
        for task, head in self.heads.items():
            for parameter in head:
                other = owner.setdefault(id(parameter), f"the head {task!r}")
                if other != f"the head {task!r}":
                    raise ValueError(
                        f"{self._name(parameter)} is in {other} and in the head {task!r}. Each parameter needs one "
                        "owner; see split_parameters."
                    )

    def _name(self, parameter: Tensor) -> str:
        return f"parameter {self._names[id(parameter)]!r}"

    def __repr__(self) -> str:
        sizes = {task: sum(p.numel() for p in head) for task, head in self.heads.items()}
        heads = ", ".join(f"{task}: {size:,}" for task, size in sizes.items())
        return f"TaskParameters({sum(p.numel() for p in self.shared):,} shared; {heads})"


def _listed(owner: str, parameters: Any) -> list[Parameter]:
    if isinstance(parameters, (nn.Module, Tensor)):
        raise TypeError(
            f"{owner} is a {type(parameters).__name__}; expected a list of parameters, e.g. model.encoder.parameters()."
        )
    listed: list[Any] = list(parameters)
    for item in listed:
        if not isinstance(item, Tensor) or not item.is_leaf:
            what = "a tensor that was computed" if isinstance(item, Tensor) else f"a {type(item).__name__}"
            raise TypeError(
                f"{owner} holds {what}; expected parameters. From named_parameters() take the second of each pair."
            )
    return listed


def split_parameters(model: nn.Module, closure: Closure, tasks: Sequence[str]) -> TaskParameters:
    """Find from one clean pass which parameters the tasks share and which are a task's own.

    A parameter that one task's loss reaches in the autograd graph is in that task's head; one that two or more
    reach is shared; one that none reaches is left alone. With a single task everything is shared, which makes
    one task plain SAM. Buffers, random streams and ``.grad`` are left as they were; a compiled model runs
    uncompiled for this one pass, since a compiled graph shows every parameter to every task.

    Args:
        model: holds every parameter to train.
        closure: as for :meth:`flatmtl.FlatMTL.backward`, on a batch in which every task has labels.
        tasks: names of the tasks; their order is the order of the task gradients.

    Raises:
        TypeError: if ``tasks`` is a single string, or as :func:`flatmtl.closures.evaluate` says.
        ValueError: within several processes, if a task has no loss or shares no parameter with another, or if a
            parameter outside ``model`` is reached.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.ModuleDict({"trunk": nn.Linear(3, 2), "left": nn.Linear(2, 1), "right": nn.Linear(2, 1)})
        >>> x = torch.ones(4, 3)
        >>> def closure(tasks):
        ...     z = model["trunk"](x)
        ...     return {t: model[t](z).square().mean() for t in tasks}
        >>> split_parameters(model, closure, ["left", "right"])
        TaskParameters(8 shared; left: 3, right: 3)
    """
    tasks = _checked_tasks(tasks)
    check_single_process(model)
    world = World(model, {p.device for p in model.parameters()})
    try:
        with _uncompiled():
            losses = world.run(closure, tasks)
    finally:
        world.restore()
    missing = [task for task in tasks if task not in losses]
    if missing:
        raise ValueError(
            f"the closure returned None for {missing}; to split the parameters every task needs a loss. "
            "Use a batch in which all tasks have labels, or name the parameters yourself: "
            "TaskParameters(shared, heads, model)."
        )
    reached = {task: _leaves(loss) for task, loss in losses.items()}
    _check_reached(model, reached)
    return _split(model, reached)


def check_single_process(model: nn.Module | None) -> None:
    """Raise if gradients would have to be averaged over processes, which this version does not do.

    Raises:
        ValueError: if the model is wrapped for several processes, or several processes train together.
    """
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, whose gradients this version does not average. "
            "Train in one process, with the bare model (model.module) in the closure too."
        )
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise ValueError(
            f"{distributed.get_world_size()} processes train together, but this version does not average task "
            "gradients over them: each would go its own way. Train in one process."
        )


def _uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which compiled functions run as they were written, at no cost if nothing was compiled."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _checked_tasks(tasks: Sequence[str]) -> tuple[str, ...]:
    if isinstance(tasks, str):
        raise TypeError(f"tasks is the string {tasks!r}; expected a list of names, e.g. [{tasks!r}].")
    if not tasks or len(set(tasks)) != len(tasks):
        raise ValueError(f"tasks is {list(tasks)}; expected at least one name, each once.")
    return tuple(tasks)


def _leaves(loss: Tensor) -> dict[int, Tensor]:
    """Return the leaf tensors that a loss depends on, by identity."""
    if loss.grad_fn is None:
        return {id(loss): loss}
    leaves: dict[int, Tensor] = {}
    seen: set[Any] = set()
    stack: list[Any] = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and node.name() == "torch::autograd::AccumulateGrad":
            leaves[id(leaf)] = leaf
        stack.extend(parent for parent, _ in node.next_functions if parent is not None)
    return leaves


def _check_reached(model: nn.Module, reached: Mapping[str, Mapping[int, Tensor]]) -> None:
    known = {id(p) for p in model.parameters()}
    for task, leaves in reached.items():
        strangers = [p for key, p in leaves.items() if key not in known and isinstance(p, Parameter)]
        if strangers:
            raise ValueError(
                f"the loss of task {task!r} reaches a parameter of shape {tuple(strangers[0].shape)} that is not in "
                "the model given, so it would not be trained. Pass a module that holds all parameters (e.g. "
                "nn.ModuleList([encoder, heads])), or name them: TaskParameters(shared, heads)."
            )


def _split(model: nn.Module, reached: Mapping[str, Mapping[int, Tensor]]) -> TaskParameters:
    shared: list[Parameter] = []
    heads: dict[str, list[Parameter]] = {task: [] for task in reached}
    for parameter in model.parameters():
        owners = [task for task, leaves in reached.items() if id(parameter) in leaves]
        if len(owners) > 1 or (owners and len(reached) == 1):
            shared.append(parameter)
        elif owners:
            heads[owners[0]].append(parameter)
    for task, leaves in reached.items():
        if not any(id(p) in leaves for p in shared):
            raise ValueError(
                f"no gradient of task {task!r} reaches any shared parameter: the tasks are independent. "
                "Check that the losses come from one forward pass and that nothing is detached."
            )
    return TaskParameters(shared, heads, model=model)
