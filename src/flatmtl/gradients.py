"""Task gradients: the rows of the Jacobian in one buffer, each head's gradient beside it, and ``.grad``."""

from collections.abc import Sequence
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, autograd
from torch.nn import Parameter

from flatmtl._linalg import inner
from flatmtl.parameters import TaskParameters

Gradient = list[Tensor | None]
"""One entry for each parameter; ``None`` for a parameter that the loss does not reach."""


def gradient(loss: Tensor, parameters: Sequence[Parameter], *, keep_graph: bool) -> Gradient:
    """Return the gradient of a loss on parameters."""
    try:
        found = cast(Gradient, autograd.grad(loss, list(parameters), retain_graph=keep_graph, allow_unused=True))
    except RuntimeError as error:
        if "second time" not in str(error):
            raise
        raise RuntimeError(
            "a loss that the closure returned uses a forward pass from outside this call, whose graph is used up. Run "
            "the whole forward pass inside the closure, and no .backward(): each call must compute everything anew."
        ) from error
    return [None if g is None else g.detach() for g in found]


def add(total: Gradient, more: Gradient) -> Gradient:
    """Return the sum of two gradients."""
    return [b if a is None else a if b is None else a + b for a, b in zip(total, more, strict=True)]


class Rows:
    """The shared parts of the task gradients, one row for each task, in one buffer that every step uses again.

    Args:
        parameters: whose shared parameters, flattened and in their order, are the columns.
        count: number of rows.

    Attributes:
        matrix: ``(count, n)`` in float32 or better; the first ``k`` rows are those of the ``k`` present tasks.
    """

    def __init__(self, parameters: TaskParameters, count: int) -> None:
        shared = parameters.shared
        dtype = torch.float32
        for parameter in shared:
            dtype = torch.promote_types(dtype, parameter.dtype)
        sizes = [p.numel() for p in shared]
        self.matrix = torch.empty(count, sum(sizes), dtype=dtype, device=shared[0].device)
        self._kinds = [(p.shape, p.dtype, p.device) for p in shared]
        self._shapes = [p.shape for p in shared]
        self._sizes = sizes

    def fits(self, parameters: TaskParameters, count: int) -> bool:
        """Return whether the buffer was made for parameters such as these and as many rows."""
        now = [(p.shape, p.dtype, p.device) for p in parameters.shared]
        return len(self.matrix) == count and now == self._kinds

    @cached_property
    def places(self) -> list[Tensor]:
        """Places to keep the shared parameters while they are perturbed; made when they are first needed."""
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in self._kinds]

    def unflatten(self, vector: Tensor) -> list[Tensor]:
        """Return views of a vector of ``n`` entries in the shapes of the shared parameters."""
        parts = torch.split(vector, self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def write(self, i: int, part: Gradient) -> None:
        """Set row ``i``, with zeros for parameters that are not reached."""
        for view, g in zip(self.unflatten(self.matrix[i]), part, strict=True):
            view.zero_() if g is None else view.copy_(_dense(g))

    def add(self, i: int, part: Gradient) -> None:
        """Add to row ``i``."""
        for view, g in zip(self.unflatten(self.matrix[i]), part, strict=True):
            if g is not None:
                view.add_(_dense(g))

    def keep(self, rows: Sequence[int]) -> None:
        """Move the given rows, in increasing order, to the front."""
        for place, i in enumerate(rows):
            if place != i:
                self.matrix[place].copy_(self.matrix[i])

    def inner(self, i: int, part: Gradient) -> Tensor:
        """Return the inner product of row ``i`` and a gradient, a float64 scalar; finite only if both are."""
        product = torch.zeros((), dtype=torch.float64, device=self.matrix.device)
        for view, g in zip(self.unflatten(self.matrix[i]), part, strict=True):
            if g is not None:
                product += inner(view, _dense(g).to(view.device))
        return product

    def subtract_from(self, i: int, part: Gradient) -> None:
        """Set row ``i`` to the gradient minus the row, in place."""
        self.matrix[i].neg_()
        self.add(i, part)


def scaled(part: Gradient, factor: Tensor | None, dtype: torch.dtype) -> Gradient:
    """Return a gradient times a factor, formed in ``dtype``; ``None`` is a factor of one."""
    return part if factor is None else [None if g is None else g.to(dtype) * factor.to(g.device, dtype) for g in part]


def add_to_grad(parameter: Parameter, value: Tensor) -> None:
    """Add to ``.grad``, in the parameter's own dtype and strides; a missing one begins as ``value``."""
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(value)
    elif parameter.grad.layout != torch.strided:
        parameter.grad = parameter.grad.to_dense().add_(value)
    else:
        parameter.grad.add_(value)


def _dense(g: Tensor) -> Tensor:
    return g if g.layout == torch.strided else g.to_dense()
