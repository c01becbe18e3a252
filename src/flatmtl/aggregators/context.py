"""What an aggregator may need to know beside the task gradients."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Context:
    """What an aggregator may need to know beside the task gradients.

    Attributes:
        rows: positions of the present tasks among all tasks, one for each row of ``J``, increasing.
        losses: clean losses of the present tasks, shape ``(m,)``, float64 on the CPU.
    """

    rows: tuple[int, ...]
    losses: Tensor


def present(context: Context | None, m: int) -> tuple[int, ...]:
    """Return the positions of ``m`` rows among all tasks; without a context these are all the tasks there are."""
    return tuple(range(m)) if context is None else context.rows


def losses_of(aggregator: object, context: Context | None, m: int) -> Tensor:
    """Return the losses that an aggregator needs, shape ``(m,)``, float64 on the CPU.

    Raises:
        ValueError: if there are none, or not one for each row.
    """
    if context is None:
        raise ValueError(
            f"{aggregator!r} got no losses; expected them as the second argument, Context(rows, losses). "
            "flatmtl.FlatMTL passes it."
        )
    losses = context.losses.detach().to("cpu", torch.float64)
    if losses.shape != (m,):
        raise ValueError(f"losses have shape {tuple(losses.shape)}; expected one for each of {m} rows.")
    return losses
