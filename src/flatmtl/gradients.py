"""Task gradients: the rows of the Jacobian in one buffer, each head's gradient beside it, and ``.grad``."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

from flatmtl._linalg import SHORT, copy_each, inner, subtract_each, without_autocast
from flatmtl.graph import edges
from flatmtl.parameters import TaskParameters
from flatmtl.shards import Early, Whole, memory_of

SMALL = 1 << 18
"""Up to so many shared parameters one copy of a gradient costs less than to go through it piece by piece on the CPU.

On an accelerator it always does: each operation costs a launch.
"""

SAMPLE = 256
"""About how many entries of a gradient are looked at to see in what precision it was computed."""

Gradient = list[Tensor | None]
"""One entry for each parameter; ``None`` for a parameter that the loss does not reach."""


class GraphNotKept(RuntimeError):
    """The graph of a loss cannot be kept for a second backward pass; for one it still serves."""


def gradient(
    layout: Whole, loss: Tensor, parameters: Sequence[Parameter], *, keep_graph: bool, early: Early | None = None
) -> Gradient:
    """Return what this process holds of the gradient of a loss on parameters, or what ``early`` made of it.

    Raises:
        GraphNotKept: if the graph was to be kept and a compiled function in it refuses.
        RuntimeError: for a graph that is used up, or that holds reentrant checkpointing.
    """
    try:
        with without_autocast(loss.device):  # which backward passes obey, though the graph says what is narrow
            found = layout.gradient(loss, parameters, keep_graph=keep_graph, early=early or {})
    except RuntimeError as error:
        if keep_graph and "donated buffers" in str(error):
            if not _allow_keeping(loss):
                raise GraphNotKept from error
            return gradient(layout, loss, parameters, keep_graph=True, early=early)
        if "second time" in str(error):
            raise RuntimeError(
                "a loss that the closure returned uses a forward pass from outside this call, whose graph is used up. "
                "Run the whole forward pass inside the closure, and no .backward(): each call must compute everything "
                "anew."
            ) from error
        if "use_reentrant=True" in str(error):
            raise RuntimeError(
                "the closure uses activation checkpointing with use_reentrant=True, which allows no gradient on chosen "
                "parameters. Pass use_reentrant=False to torch.utils.checkpoint.checkpoint (in transformers: "
                "gradient_checkpointing_kwargs={'use_reentrant': False})."
            ) from error
        raise
    return [None if g is None else _dense(g) for g in found]


def _allow_keeping(loss: Tensor) -> bool:
    """Allow the graph to be kept if its compiled functions do not donate their buffers; return whether that is so.

    A function that was compiled with donated buffers off keeps no list of them, and PyTorch takes this for a refusal
    when they are on again. To let it pass by switching them off would be wrong for functions that do donate: these
    overwrite what the next backward pass needs. So the list is set to the empty one that PyTorch itself sets for a
    function whose first backward pass keeps the graph.
    """
    allowed = [
        metadata
        for node in {node for node, _ in edges(loss)}
        if (metadata := getattr(getattr(node, "_forward_cls", None), "metadata", None)) is not None
        and getattr(metadata, "bw_donated_idxs", []) != []
    ]
    if not allowed or any(metadata.bw_donated_idxs is not None for metadata in allowed):
        return False
    for metadata in allowed:
        metadata.bw_donated_idxs = []
    return True


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
        shared = [memory_of(p) for p in parameters.shared]
        dtype = torch.float32
        for parameter in shared:
            dtype = torch.promote_types(dtype, parameter.dtype)
        self._kinds = [(p.shape, p.dtype, p.device) for p in shared]
        self._shapes = [p.shape for p in shared]
        self._sizes = [p.numel() for p in shared]
        self.matrix = torch.empty(count, sum(self._sizes), dtype=dtype, device=shared[0].device)
        self._views = [self.unflatten(row) for row in self.matrix]
        self._products: dict[int, Tensor] = {}  # of what was subtracted early, by the number of the parameter

    def fits(self, parameters: TaskParameters, count: int) -> bool:
        """Return whether the buffer was made for parameters such as these and as many rows."""
        now = [(p.shape, p.dtype, p.device) for p in map(memory_of, parameters.shared)]
        return len(self.matrix) == count and now == self._kinds

    @cached_property
    def direction(self) -> Tensor:
        """A place of ``n`` entries for the direction of a step; made when it is first needed."""
        return torch.empty_like(self.matrix[0])

    @cached_property
    def spare(self) -> Tensor:
        """Another one; it may be the memory of :attr:`places`."""
        return torch.empty_like(self.matrix[0])

    @cached_property
    def flight(self) -> Tensor:
        """A place for a gradient on its way to the other ranks."""
        return torch.empty_like(self.matrix[0])

    @cached_property
    def own(self) -> Tensor:
        """Another matrix of rows, for this rank's own gradients; row ``i`` is that of task ``i``, present or not."""
        return torch.empty_like(self.matrix)

    @cached_property
    def places(self) -> list[Tensor]:
        """Places to keep the shared parameters while they are perturbed; made when they are first needed."""
        if all(kind[1:] == (self.matrix.dtype, self.matrix.device) for kind in self._kinds):
            return self.unflatten(self.spare)
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in self._kinds]

    def unflatten(self, vector: Tensor) -> list[Tensor]:
        """Return views of a vector of ``n`` entries in the shapes of the shared parameters."""
        parts = torch.split(vector, self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def views(self, i: int) -> list[Tensor]:
        """Return row ``i`` in the shapes of the shared parameters."""
        return self._views[i]

    @cached_property
    def _large(self) -> list[int]:
        """Numbers of the parameters whose gradients are worth taking one by one, as a backward pass finds them."""
        if self.matrix.device.type != "cpu" or self.matrix.shape[1] <= SMALL:
            return []
        return [j for j, (shape, _, device) in enumerate(self._kinds) if device.type == "cpu" and shape.numel() > SHORT]

    def writing(self, i: int) -> Early:
        """Return what does a part of :meth:`write` early."""
        return {j: self._views[i][j].copy_ for j in self._large}

    def write(self, i: int, part: Gradient) -> None:
        """Set row ``i``, with zeros for parameters that are not reached."""
        _write(part, self._views[i])

    def write_into(self, vector: Tensor, part: Gradient) -> None:
        """Set a vector of ``n`` entries to a gradient, with zeros for parameters that are not reached."""
        _write(part, self.unflatten(vector))

    def sample(self, i: int) -> Tensor:
        """Return a copy of some entries of row ``i``, evenly spread."""
        return self.matrix[i, :: -(-self.matrix.shape[1] // SAMPLE) or 1].clone()

    def add(self, i: int, part: Gradient) -> None:
        """Add to row ``i``."""
        for view, g in zip(self._views[i], part, strict=True):
            if g is not None:
                view.add_(g.to(view.device))

    def keep(self, rows: Sequence[int]) -> None:
        """Move the given rows, in increasing order, to the front."""
        for place, i in enumerate(rows):
            if place != i:
                self.matrix[place].copy_(self.matrix[i])

    def inner(self, i: int, part: Gradient) -> Tensor:
        """Return the inner product of row ``i`` and a gradient, a float64 scalar; finite only if both are."""
        return inner(*self._reached(i, part))

    def subtracting(self, i: int) -> Early:
        """Return what does a part of :meth:`subtract_from` early."""
        self._products = {}

        def subtract(j: int, g: Tensor) -> Tensor:
            view = self._views[i][j]
            if j not in self._products:  # a pass may be run again from the start
                self._products[j] = subtract_each([view], [g])
            return view

        return {j: partial(subtract, j) for j in self._large}

    def subtract_from(self, i: int, part: Gradient) -> Tensor:
        """Set row ``i`` to the gradient minus the row, in place; return its inner product with the gradient."""
        pieces = list(zip(self._views[i], part, strict=True))
        for view, g in pieces:
            if g is None:
                view.neg_()
        views, gradients = self._reached(i, part)
        if len(views) == len(part) and (len(self.matrix[i]) <= SMALL or self.matrix.device.type != "cpu"):
            views, gradients = [self.matrix[i]], [torch.cat([g.reshape(-1) for g in gradients])]
        early = [self._products.pop(j) for j, (view, g) in enumerate(pieces) if g is view]
        return torch.stack([subtract_each(views, gradients), *early]).sum()

    def _reached(self, i: int, part: Gradient) -> tuple[list[Tensor], list[Tensor]]:
        """Return the pieces of row ``i`` that a gradient reaches, and those of the gradient outside, on one device."""
        pairs = _outside(part, self._views[i])
        return [view for view, _ in pairs], [g.to(view.device) for view, g in pairs]


def _outside(part: Gradient, views: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the views of a row that a gradient reaches, with its pieces, but for those that were taken early."""
    return [(view, g) for view, g in zip(views, part, strict=True) if g is not None and g is not view]


def _write(part: Gradient, views: Sequence[Tensor]) -> None:
    """Set the views of a row to a gradient, with zeros for parameters that are not reached."""
    for view, g in zip(views, part, strict=True):
        if g is None:
            view.zero_()
    pairs = _outside(part, views)
    copy_each([g for _, g in pairs], to=[view for view, _ in pairs])


def reached_by(part: Gradient) -> set[int]:
    """Return the numbers of the parameters that a loss reaches."""
    return {j for j, g in enumerate(part) if g is not None}


def scaled(part: Gradient, factor: Tensor | None, dtype: torch.dtype) -> Gradient:
    """Return a gradient times a factor, formed in ``dtype``; ``None`` is a factor of one."""
    if factor is None:
        return part
    wide = [None if g is None else g.to(torch.promote_types(g.dtype, dtype)) for g in part]
    return [None if g is None else g * factor.to(g) for g in wide]


def add_to_grad(parameter: Parameter, value: Tensor) -> None:
    """Add to what this process holds of ``.grad``, in its dtype and strides; a missing one begins as ``value``.

    Hooks that were registered to run after the accumulation run.
    """
    if parameter.grad is None:
        grad = torch.empty_like(parameter, requires_grad=False)
        memory_of(grad).copy_(value)
        parameter.grad = grad
    elif parameter.grad.layout != torch.strided:
        parameter.grad = parameter.grad.to_dense().add_(value.to(parameter.device))
    else:
        memory_of(parameter.grad).add_(value.to(parameter.device))
    hooks = cast("Mapping[int, Callable[[Parameter], None]] | None", parameter._post_accumulate_grad_hooks)  # pyright: ignore[reportPrivateUsage]
    for hook in list((hooks or {}).values()):
        hook(parameter)


def _dense(g: Tensor) -> Tensor:
    return g if g.layout == torch.strided else g.to_dense()
