"""What a user's closure returns: one scalar loss for each task, checked before anything is done with it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

Closure = Callable[[Sequence[str]], Mapping[str, Tensor | None]]
"""Returns a scalar loss, or ``None`` where there are no labels, for at least the tasks it is asked for."""


def evaluate(closure: Closure, tasks: Sequence[str]) -> dict[str, Tensor]:
    """Return the losses of those ``tasks`` that have one, in the order of ``tasks``.

    Raises:
        TypeError: if the closure returns no mapping, or something other than tensors in it.
        KeyError: if a task asked for is missing.
        ValueError: if a loss is not a real scalar, or has no graph.
        RuntimeError: if a loss was computed within :func:`torch.inference_mode`.
    """
    call = f"closure({list(tasks)})"
    with torch.enable_grad():
        returned = _call(closure, tasks)
    if not isinstance(returned, Mapping):
        raise TypeError(
            f"{call} returned a {type(returned).__name__}; expected a mapping from task name to scalar loss, "
            f"e.g. {{{tasks[0]!r}: loss}}."
        )
    losses: dict[str, Tensor] = {}
    for task in tasks:
        if task not in returned:
            got = ", ".join(map(repr, cast("Mapping[Any, Any]", returned))) or "nothing"
            raise KeyError(
                f"{call} returned no loss for task {task!r} (got: {got}). Return at least the tasks it is asked "
                "for, with None for a task that has no labels in this batch."
            )
        loss = cast(Any, returned[task])
        if loss is not None:
            _check_loss(task, loss)
            losses[task] = loss
    return losses


def _call(closure: Closure, tasks: Sequence[str]) -> Any:
    try:
        return closure(list(tasks))
    except TypeError as error:
        here = error.__traceback__
        if here is None or here.tb_next is not None or "argument" not in str(error):
            raise  # it comes from within
        raise TypeError(
            f"{error}; expected a function of one argument, the names of the tasks whose losses to return: "
            "def closure(tasks): ..."
        ) from error


def listed(closure: object) -> list[Closure]:
    """Return one closure, or several, as a list.

    Raises:
        TypeError: if something in it is no function.
        ValueError: if the list is empty.
    """
    single = callable(closure) or isinstance(closure, (Mapping, str, Tensor)) or not isinstance(closure, Iterable)
    closures: list[Any] = [closure] if single else list(cast("Iterable[Any]", closure))
    if not closures:
        raise ValueError("the list of closures is empty; expected one closure for each micro-batch.")
    for item in closures:
        if not callable(item):
            raise TypeError(
                f"closure is a {type(item).__name__}; expected a function from a list of tasks to their losses, or a "
                "list of such functions. Pass the function itself, not what it returns."
            )
    return closures


def _check_loss(task: str, loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"the loss of task {task!r} is a {type(loss).__name__}; expected a scalar tensor with a graph. "
            "Return the tensor itself, not .item() or float()."
        )
    if loss.ndim != 0:
        raise ValueError(
            f"the loss of task {task!r} has shape {tuple(loss.shape)}; a loss must be a scalar. Did you forget .mean()?"
        )
    if not loss.is_floating_point():
        raise ValueError(
            f"the loss of task {task!r} has dtype {loss.dtype}; expected a real floating-point scalar. "
            "Take the real part, or the absolute value."
        )
    if loss.is_inference():
        raise RuntimeError(
            f"the loss of task {task!r} was computed within torch.inference_mode(), where nothing has a graph; "
            "expected a loss with one. Leave inference mode before the call, and keep it out of the closure."
        )
    if not loss.requires_grad:
        raise ValueError(
            f"the loss of task {task!r} has no graph, so no parameter can learn from it; expected a loss computed "
            "from the model's output, not a constant, detached or computed within torch.no_grad(). For a task without "
            "labels in this batch return None."
        )
