"""The autograd graph of a loss: which leaves it reaches, and where it does not tell."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

_OPAQUE = {
    "CompiledFunctionBackward": "an ahead-of-time compiled function",
    "DifferentiableGraphBackward": "a scripted function (torch.jit)",
    "GraphedBackward": "a CUDA graph",
    "BroadcastBackward": "DataParallel",
}
"""Names of nodes each of whose outputs seems to depend on all of their inputs, and what makes them."""


class Graph(NamedTuple):
    """What a loss depends on.

    Attributes:
        leaves: the leaf tensors, by identity.
        entries: for each node that hides its inside, the numbers of its outputs that the loss depends on.
    """

    leaves: dict[int, Tensor]
    entries: dict[Any, set[int]]


def edges(loss: Tensor) -> Iterator[tuple[Any, int]]:
    """Iterate over the graph of a loss: each node, with the number of its output, once for each way into it."""
    seen: set[Any] = set()
    stack: list[tuple[Any, int]] = [(loss.grad_fn, 0)]
    while stack:
        node, output = stack.pop()
        if node is not None:
            yield node, output
            if node not in seen:
                seen.add(node)
                stack += node.next_functions


def walk(task: str, loss: Tensor) -> Graph:
    """Return what the loss of a task depends on.

    Raises:
        ValueError: if it passes through reentrant checkpointing, whose inside is not in the graph.
    """
    graph = Graph({}, {})
    if loss.grad_fn is None:
        graph.leaves[id(loss)] = loss
        return graph
    for node, output in edges(loss):
        kind = _kind(node)
        if kind in _OPAQUE:
            graph.entries.setdefault(node, set()).add(output)
        if kind == "CheckpointFunctionBackward":
            raise ValueError(
                f"the loss of task {task!r} passes through activation checkpointing with use_reentrant=True, which "
                "hides the parameters inside. Pass use_reentrant=False (in transformers: "
                "gradient_checkpointing_kwargs={'use_reentrant': False})."
            )
        leaf = getattr(node, "variable", None)
        if kind == "AccumulateGrad" and isinstance(leaf, Tensor):
            graph.leaves[id(leaf)] = leaf
    return graph


def check_told_apart(graphs: Mapping[str, Graph]) -> None:
    """Raise if tasks come out of different outputs of a node that hides which of them depends on what.

    Where they all come out of the same outputs, such as those of a compiled trunk, they share what is inside.
    """
    entered: dict[Any, tuple[str, set[int]]] = {}
    for task, graph in graphs.items():
        for node, outputs in graph.entries.items():
            other, others = entered.setdefault(node, (task, outputs))
            if outputs != others:
                raise ValueError(
                    f"the losses of tasks {other!r} and {task!r} come out of {_OPAQUE[_kind(node)]}, whose graph "
                    "shows every parameter to every task. Split the model as it was before that, or name the "
                    "parameters yourself: TaskParameters(shared, heads, model)."
                )


def _kind(node: Any) -> str:
    """Return the name of a node without its namespace."""
    return node.name().rpartition("::")[2]
