"""The losses that a weighting gets, checked; state is kept for each task, so they come with the tasks' positions."""

import torch
from torch import Tensor

from flatmtl._linalg import floats
from flatmtl.aggregators.base import Aggregator
from flatmtl.aggregators.context import Context, present


def checked(losses: Tensor, context: Context | None) -> tuple[Tensor, tuple[int, ...]]:
    """Return the losses, shape ``(m,)``, in float64 on the CPU and without a graph, and the tasks' positions.

    Raises:
        ValueError: if they are no vector of finite numbers, or not one for each row of ``context``.
    """
    if losses.ndim != 1 or losses.shape[0] == 0 or not losses.is_floating_point():
        raise ValueError(
            f"losses have shape {tuple(losses.shape)} and dtype {losses.dtype}; expected a floating-point vector (m,) "
            "with one loss for each of at least one task. Stack the scalar losses: torch.stack([...])."
        )
    rows = present(context, len(losses))
    if len(rows) != len(losses):
        raise ValueError(f"losses have shape {tuple(losses.shape)}; expected one for each of the rows {list(rows)}.")
    L = losses.detach().to("cpu", torch.float64)
    bad = [i for i, finite in enumerate(floats(torch.isfinite(L))) if not finite]
    if bad:
        raise ValueError(
            f"losses {floats(L[bad])} of rows {bad} (from 0) are not finite; expected finite losses. "
            "Leave these tasks out, or find what overflows."
        )
    return L, rows


def check_not_negative(aggregator: Aggregator, losses: Tensor, instead: str) -> None:
    """Raise, naming the rows, if a loss is negative."""
    bad = [i for i, negative in enumerate(floats(losses < 0.0)) if negative]
    if bad:
        raise ValueError(
            f"losses {floats(losses[bad])} of rows {bad} (from 0) are negative; {aggregator!r} needs losses of at "
            f"least zero. {instead}"
        )


def check_tasks(tasks: object) -> None:
    """Raise unless ``tasks`` is a number of tasks."""
    if not isinstance(tasks, int) or tasks < 1:
        raise ValueError(f"tasks is {tasks!r}; expected the number of all tasks, a whole number of at least 1.")


def check_known_tasks(aggregator: Aggregator, rows: tuple[int, ...], tasks: int) -> None:
    """Raise if a task is present that the aggregator has no state for."""
    if max(rows) >= tasks:
        raise ValueError(
            f"{aggregator!r} is for {tasks} tasks, but task {max(rows)} (from 0) is present. "
            "Make it with the number of all tasks."
        )


def check_state_of_tasks(aggregator: Aggregator, values: Tensor, tasks: int) -> None:
    """Raise if a state does not hold one value for each task."""
    if values.shape != (tasks,):
        raise ValueError(
            f"the state holds values of shape {tuple(values.shape)}; {aggregator!r} expects one for each of {tasks} "
            "tasks. Load the state of the same aggregator."
        )
