"""Who owns which parameter: the trunk that tasks share, or one task's head."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from flatmtl._options import warn
from flatmtl.closures import Closure, listed
from flatmtl.graph import check_told_apart, walk
from flatmtl.ranks import check_supported, fingerprint, unwrapped, wrappers
from flatmtl.shards import drop_copies, layout_of, sharded_by_copy
from flatmtl.world import World, uncompiled


class TaskParameters:
    """The shared parameters and each task's own, every parameter with one owner.

    The tasks are the keys of ``heads``, in that order. A parameter that is listed twice in one place counts
    once (tied weights); one that does not require a gradient is left out. Parameters of the model that are in no
    list are left alone: they get neither a perturbation nor a gradient.

    Args:
        shared: parameters on which the task gradients are aggregated.
        heads: for each task its own parameters; an empty list for a task that has none.
        model: gives the parameters their names in messages, and the step its buffers; each step checks that it
            still has these parameters and trains no other. Without it, buffers are found from the modules that run.

    Attributes:
        tasks: names of the tasks.
        layout: where the entries of the parameters are.

    Raises:
        TypeError: if something other than parameters is listed, or for a ``model`` or ``heads`` of another kind.
        ValueError: if a parameter has two owners, two parameters are on one memory, no parameter is shared, there is
            no task, a parameter is complex, or some are sharded otherwise than by ``fully_shard`` over one mesh.

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
        _check_model(model)
        drop_copies(model)
        self.model = model
        self._found: tuple[nn.Module, ...] | None = None
        self._names: dict[Tensor, str] = {} if model is None else {p: name for name, p in _named(model)}
        self._trainable: set[Parameter] = set() if model is None else _trainable(model)
        _check_heads(heads)
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
        self._check_memory()
        self.layout = layout_of(model, self.shared, {self._name(p): p for p in self.everything})

    @property
    def everything(self) -> list[Parameter]:
        """The shared parameters, then those of each head."""
        return [*self.shared, *(p for head in self.heads.values() for p in head)]

    @property
    def devices(self) -> list[torch.device]:
        """The devices that hold a parameter, frozen ones included, each once."""
        return list(dict.fromkeys(p.device for p in self._names))

    @cached_property
    def fingerprint(self) -> float:
        """A number that the parameters of ranks which train together must have in common."""
        return fingerprint(self.tasks, [(self._names[p], tuple(p.shape), p.dtype) for p in self.everything])

    def check_trainable(self) -> None:
        """Raise if what is trained is no longer what was split.

        Raises:
            ValueError: naming a parameter that was frozen, unfrozen, added, replaced or removed since.
        """
        self.layout.drop_copies()
        for parameter in self.everything:
            if not parameter.requires_grad:
                raise ValueError(
                    f"{self._name(parameter)} no longer requires a gradient, but did when the parameters were "
                    f"split. Split them again: {_CALL}."
                )
        if self.model is not None:
            now = _trainable(self.model)
            if now != self._trainable:
                self._check_known(self.model)
                self._check_present(now)

    def _check_known(self, model: nn.Module) -> None:
        for name, parameter in _named(model):
            if not parameter.requires_grad or parameter in self._trainable:
                continue
            if parameter in self._names:
                raise ValueError(
                    f"parameter {name!r} requires a gradient, but did not when the parameters were split, so nobody "
                    f"owns it and it would not be trained. Split them again: {_CALL}; or freeze it."
                )
            raise ValueError(
                f"parameter {name!r} came into the model after the parameters were split, so nobody owns it and it "
                "would not be trained; a module was replaced, or a parameter itself as load_state_dict(assign=True) "
                f"does. Split them again: {_CALL}; and give the optimizer the new one."
            )

    def _check_present(self, now: set[Parameter]) -> None:
        for parameter in self.everything:
            if parameter in self._trainable and parameter not in now:
                raise ValueError(
                    f"{self._name(parameter)} has left the model since the parameters were split. "
                    f"Split them again: {_CALL}."
                )

    def world(self, modules: Iterable[nn.Module] = ()) -> World:
        """Return random streams and buffers as they are now."""
        return World(self.model, self.devices, [*modules, *(self._found or ())])

    def find_modules(self, closures: Iterable[Closure]) -> None:
        """Find the modules that run, if no model holds them and something may be compiled.

        It takes one more pass, before the first step: modules that run for the first time later are not found. Where
        nothing is compiled they are seen in each step as they run.
        """
        if self.model is None and self._found is None and "torch._dynamo" in sys.modules:
            self._found = World(None, self.devices).modules_of(closures, self.tasks)

    def _own(self, owner: str, parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
        given = _as_parameters(owner, parameters)
        for i, parameter in enumerate(given):
            self._names.setdefault(parameter, f"{owner} [{i}]")
            if parameter.is_complex() and parameter.requires_grad:
                raise ValueError(
                    f"{self._name(parameter)} in {owner} is complex; expected real parameters. Keep the real and "
                    "the imaginary part as two real parameters."
                )
        return tuple(dict.fromkeys(p for p in given if p.requires_grad))

    def _check_owners(self) -> None:
        owner: dict[Tensor, str] = dict.fromkeys(self.shared, "shared")
        for task, head in self.heads.items():
            for parameter in head:
                other = owner.setdefault(parameter, f"the head {task!r}")
                if other != f"the head {task!r}":
                    raise ValueError(
                        f"{self._name(parameter)} is in {other} and in the head {task!r}. Each parameter needs one "
                        "owner; see split_parameters."
                    )

    def _check_memory(self) -> None:
        """Raise if two parameters are on one memory: they would overwrite each other's perturbation and step twice."""
        at: dict[Any, Parameter] = {}
        for parameter in self.everything:
            if type(parameter) is Parameter and parameter.data_ptr():
                place = (parameter.device, parameter.data_ptr(), parameter.shape, parameter.stride())
                other = at.setdefault(place, parameter)
                if other is not parameter:
                    raise ValueError(
                        f"{self._name(other)} and {self._name(parameter)} are two parameters on one memory; expected "
                        "tied weights to be one parameter. Assign it itself: decoder.weight = embedding.weight, "
                        "without nn.Parameter(...) or .data."
                    )

    def _name(self, parameter: Tensor) -> str:
        return f"parameter {self._names[parameter]!r}"

    def __repr__(self) -> str:
        sizes = {task: sum(p.numel() for p in head) for task, head in self.heads.items()}
        heads = ", ".join(f"{task}: {size:,}" for task, size in sizes.items())
        return f"TaskParameters({sum(p.numel() for p in self.shared):,} shared; {heads})"


_CALL = "split_parameters(model, closure, tasks)"


def _named(model: nn.Module) -> Iterator[tuple[str, Parameter]]:
    """Yield each parameter once with its name in the uncompiled model."""
    for name, parameter in model.named_parameters():
        yield name.replace("_orig_mod.", ""), parameter


def _trainable(model: nn.Module) -> set[Parameter]:
    """Return the trainable parameters, in half the time that ``model.parameters()`` takes: every step asks."""
    own = (module._parameters.values() for module in model.modules())  # pyright: ignore[reportPrivateUsage]
    return {p for parameters in own for p in parameters if p is not None and p.requires_grad}


def _check_model(model: Any) -> None:
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; expected a module that holds all parameters, e.g. "
            "nn.ModuleList([encoder, decoder])."
        )


def _check_heads(heads: Any) -> None:
    if not isinstance(heads, Mapping):
        raise TypeError(
            f"heads is a {type(heads).__name__}; expected a mapping from task name to the task's own parameters, "
            "e.g. {'seg': model.seg.parameters()}."
        )


def _as_parameters(owner: str, parameters: Any) -> list[Parameter]:
    if isinstance(parameters, (nn.Module, Tensor)) or not isinstance(parameters, Iterable):
        raise TypeError(
            f"{owner} is a {type(parameters).__name__}; expected a list of parameters, e.g. model.encoder.parameters()."
        )
    given: list[Any] = list(cast("Iterable[Any]", parameters))
    for item in given:
        if not isinstance(item, Tensor) or not item.is_leaf:
            what = "a tensor that was computed" if isinstance(item, Tensor) else f"a {type(item).__name__}"
            raise TypeError(
                f"{owner} holds {what}; expected parameters. From named_parameters() take the second of each pair."
            )
    return given


def split_parameters(model: nn.Module, closure: Closure | Sequence[Closure], tasks: Sequence[str]) -> TaskParameters:
    """Find from one clean pass which parameters the tasks share and which are a task's own.

    A parameter that one task's loss reaches in the autograd graph is in that task's head; one that two or more
    reach is shared; one that none reaches is left alone, which a warning tells. With a single task everything is
    shared, which makes one task plain SAM. Buffers, random streams and ``.grad`` are left as they were; a compiled
    model runs uncompiled for this one pass, since a compiled graph shows every parameter to every task.

    Args:
        model: holds every parameter to train.
        closure: as for :meth:`flatmtl.FlatMTL.backward`, a list too; every task needs labels in one of them at least.
        tasks: names of the tasks; their order is the order of the task gradients.

    Raises:
        TypeError: if ``model`` is no module, ``tasks`` is a single string, or as
            :func:`flatmtl.closures.evaluate` says.
        ValueError: if the model is wrapped in what :mod:`flatmtl.ranks` refuses, if a task has no loss or shares no
            parameter with another, if a parameter outside ``model`` is reached, or if the graph does not tell which
            task reaches what.

    Warns:
        UserWarning: naming trainable parameters that no loss reaches.

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
    _check_model(model)
    tasks = _checked_tasks(tasks)
    check_supported(model)
    reached = _reached(model, listed(closure), tasks)
    missing = [task for task, leaves in reached.items() if not leaves]
    if missing:
        raise ValueError(
            f"the closure returned None for {missing}; to split the parameters every task needs a loss. "
            "Use a batch in which all tasks have labels, or a list of closures in one of which each has, or name the "
            "parameters yourself: TaskParameters(shared, heads, model)."
        )
    _check_reached(model, reached)
    parameters = _split(model, reached)
    _warn_of_unreached(model, parameters)
    return parameters


def _reached(model: nn.Module, closures: Sequence[Closure], tasks: Sequence[str]) -> dict[str, dict[int, Tensor]]:
    """Return for each task the leaves that its losses reach; no leaf for a task that has no loss."""
    reached: dict[str, dict[int, Tensor]] = {task: {} for task in tasks}
    drop_copies(model)
    world = World(model, {p.device for p in model.parameters()})
    try:
        with uncompiled(), unwrapped(wrappers(model)):
            for closure in closures:
                graphs = {task: walk(task, loss) for task, loss in world.run(closure, tasks).items()}
                check_told_apart(graphs)
                for task, graph in graphs.items():
                    reached[task] |= graph.leaves
        sharded = sharded_by_copy(model)
    finally:
        world.restore()
        drop_copies(model)
    leaves = {task: [sharded.get(key, leaf) for key, leaf in found.items()] for task, found in reached.items()}
    return {task: {id(leaf): leaf for leaf in found} for task, found in leaves.items()}


def independent(task: str) -> ValueError:
    """Return the error about a task whose loss reaches no shared parameter."""
    return ValueError(
        f"no gradient of task {task!r} reaches any shared parameter: the tasks are independent. "
        "Check that the losses come from one forward pass and that nothing is detached (activation "
        "checkpointing detaches with use_reentrant=True: pass False)."
    )


def _checked_tasks(tasks: Sequence[str]) -> tuple[str, ...]:
    if isinstance(tasks, str):
        raise TypeError(f"tasks is the string {tasks!r}; expected a list of names, e.g. [{tasks!r}].")
    if not tasks or len(set(tasks)) != len(tasks):
        raise ValueError(f"tasks is {list(tasks)}; expected at least one name, each once.")
    return tuple(tasks)


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
            raise independent(task)
    return TaskParameters(shared, heads, model=model)


def _warn_of_unreached(model: nn.Module, parameters: TaskParameters) -> None:
    owned = set(parameters.everything)
    names = [name for name, p in _named(model) if p.requires_grad and p not in owned]
    if names:
        shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        warn(
            f"no loss reaches {shown}, so they are left alone. If they should learn, check that their modules run and "
            "that nothing is detached (activation checkpointing detaches with use_reentrant=True: pass False). "
            "If not, freeze them: requires_grad_(False)."
        )
