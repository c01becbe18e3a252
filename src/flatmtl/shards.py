"""Where the entries of the parameters are: all in this process, or in shards, of which each rank holds one.

``fully_shard`` keeps a shard of each parameter, a ``DTensor``, and gathers the whole one for a pass. A step keeps the
same shards of its vectors, so that what is a sum over all entries is summed over the ranks too. Gradients come from
``.backward()``, which leaves shards of means over the ranks in ``.grad``: the graph holds the gathered parameters, and
``autograd.grad`` on the sharded ones finds nothing.
"""

import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, autograd, nn
from torch.nn import Parameter

from flatmtl._linalg import Gramian, gramian, norm
from flatmtl.graph import edges
from flatmtl.ranks import Ranks

Early = Mapping[int, Callable[[Tensor], Tensor]]
"""By the number of a parameter, what makes something of its gradient as soon as a backward pass has found it."""


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this process may hold a part of a tensor only."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def memory_of(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor: itself, or a view of its shard's memory."""
    return cast(Any, tensor.detach()).to_local() if is_sharded(tensor) else tensor


class Whole:
    """All entries are in this process."""

    def ranks(self, group: Any, model: nn.Module | None) -> Ranks:
        """Return the processes that train together; see :meth:`Ranks.of`."""
        return Ranks.of(group, model)

    def gradient(
        self, loss: Tensor, parameters: Sequence[Parameter], *, keep_graph: bool, early: Early
    ) -> Sequence[Tensor | None]:
        """Return the gradient of a loss on parameters, ``None`` for one that is not reached.

        What ``early`` makes of some of them, if it is given these, is returned in their stead.
        """
        with _given_away(parameters, early) as made:
            found = autograd.grad(loss, list(parameters), retain_graph=keep_graph, allow_unused=True)
        found = cast("Sequence[Tensor | None]", found)  # as `allow_unused` has it
        return [made.get(j, None if g is None else g.detach()) for j, g in enumerate(found)]

    def mean(self, number: Tensor) -> Tensor:
        """Return a number of a pass as its :meth:`gradient` comes: of this rank, or the mean over the ranks."""
        return number

    def total(self, number: Tensor) -> Tensor:
        """Return a sum over all entries from that over the entries in this process."""
        return number

    def norm(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return the Euclidean norm over all entries, a float64 scalar."""
        return norm(tensors)

    def gramian(self, jacobian: Tensor) -> Gramian:
        """Return the Gramian of rows."""
        return gramian(jacobian)

    def assembled(self, jacobian: Tensor) -> Tensor:
        """Return rows over the shared parameters with all their entries, in the order of one process."""
        return jacobian

    def own_part(self, vector: Tensor) -> Tensor:
        """Return what this process keeps of a vector over the shared parameters that has all its entries."""
        return vector

    def drop_copies(self) -> None:
        """Drop gathered copies of parameters: the weights may have moved, and the model lists its own again."""

    def recover(self) -> None:
        """Be ready for another pass after one that failed."""


class Shards(Whole):
    """Each rank holds a shard of every parameter of a model under ``fully_shard``.

    Args:
        model: the model.
        shared: the shared parameters, sharded over one mesh of one axis.
    """

    def __init__(self, model: nn.Module, shared: Sequence[Parameter]) -> None:
        mesh = cast(Any, shared[0]).device_mesh
        self._model = model
        self._modules = fsdp_modules(model)
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        self._ranks = Ranks(mesh.get_group(), model, sharded=True)
        self._rank: int = mesh.get_local_rank()
        self._device = torch.device(mesh.device_type)
        self._shapes = [p.shape for p in shared]
        self._dims: list[int] = [cast(Any, p).placements[0].dim for p in shared]
        self._failed = False

    def ranks(self, group: Any, model: nn.Module | None) -> Ranks:
        """Return the ranks that hold the shards.

        Raises:
            ValueError: if the group is another, or ``fully_shard`` was told not to average gradients in each pass.
            RuntimeError: if the model is of no use since a backward pass failed.
        """
        if group is not None and not self._ranks.are(group):
            raise ValueError(
                "process_group is not that of the mesh over which the model is sharded; expected the same ranks. Pass "
                "process_group=None, and for another group fully_shard(..., mesh=...)."
            )
        if self._failed:
            raise RuntimeError(
                "an earlier backward pass of the sharded model failed, and this version of PyTorch cannot begin anew "
                "then: what came next would be wrong. Make the model again from a checkpoint; later versions have "
                "FSDPModule.reset_iter_state."
            )
        for module in self._modules:
            _check_options(module)
        return self._ranks

    def gradient(
        self, loss: Tensor, parameters: Sequence[Parameter], *, keep_graph: bool, early: Early
    ) -> Sequence[Tensor | None]:
        """Return the shards of the gradient, a mean over the ranks; every ``.grad`` is as before then.

        One forward pass serves any number of backward passes, as long as the weights do not move.
        """
        del early  # the graph holds no shards
        variables = (getattr(node, "variable", None) for node, _ in edges(loss))
        leaves = [leaf for leaf in variables if isinstance(leaf, Tensor)]
        with _grads_put_back([*self._trainable, *leaves]):
            try:
                loss.backward(retain_graph=keep_graph)  # pyright: ignore[reportUnknownMemberType]
            except BaseException:
                self._failed = not all(hasattr(module, "reset_iter_state") for module in self._modules)
                raise
            return [None if p.grad is None else memory_of(p.grad) for p in parameters]

    def mean(self, number: Tensor) -> Tensor:
        """Return the mean of a number over the ranks."""
        return self.total(number) / self._ranks.size

    def total(self, number: Tensor) -> Tensor:
        """Return the sum of a number over the ranks."""
        return torch.stack(self._gathered(number)).sum(dim=0)

    def norm(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return the Euclidean norm over the entries on all ranks."""
        return norm([torch.stack(self._gathered(norm(tensors)))])

    def gramian(self, jacobian: Tensor) -> Gramian:
        """Return the Gramian of rows of which each rank has its part."""
        own = gramian(jacobian)
        found = self._gathered(torch.cat([own.G.reshape(-1), own.G.new_tensor([own.scale])]))
        parts = [(part[:-1].view_as(own.G), float(part[-1])) for part in found]
        parts = [(G, scale) for G, scale in parts if bool(G.any())]  # the scale of a part that is zero says nothing
        top = max((scale for _, scale in parts), default=1.0)
        total = torch.zeros_like(own.G)
        for G, scale in parts:
            total += G.to(total.device) * (scale / top) ** 2
        return Gramian(total, top)

    def assembled(self, jacobian: Tensor) -> Tensor:
        """Return the whole rows, which takes the memory of all of them on every rank."""
        count = len(jacobian)
        shapes = [self._shapes_on(rank) for rank in range(self._ranks.size)]
        widths = [sum(shape.numel() for shape in some) for some in shapes]
        padded = torch.nn.functional.pad(jacobian, (0, max(widths) - jacobian.shape[1]))
        of_rank = [
            [part.reshape(count, *shape) for part, shape in zip(_split(found, some), some, strict=True)]
            for found, some in zip(self._ranks.gather(padded), shapes, strict=True)
        ]
        wholes = [torch.cat(parts, 1 + dim) for *parts, dim in zip(*of_rank, self._dims, strict=True)]
        return torch.cat([whole.reshape(count, -1) for whole in wholes], 1)

    def own_part(self, vector: Tensor) -> Tensor:
        """Return the shard that this rank holds of a vector."""
        wholes = torch.split(vector, [shape.numel() for shape in self._shapes])
        triples = zip(wholes, self._shapes, self._dims, strict=True)
        shards = [
            torch.split(whole.view(shape), self._lengths(shape[dim]), dim)[self._rank] for whole, shape, dim in triples
        ]
        return torch.cat([shard.reshape(-1) for shard in shards])

    def drop_copies(self) -> None:
        """Give back the gathered parameters; the next pass gathers them anew."""
        drop_copies(self._model)

    def recover(self) -> None:
        """Forget the pass that failed; without that, the next backward pass would leave gradients where they are."""
        for module in self._modules:
            if hasattr(module, "reset_iter_state"):
                with suppress(RuntimeError, AttributeError):  # of those that run within another, or have not run yet
                    module.reset_iter_state()
        self.drop_copies()

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return the numbers of all ranks, in one order: they are summed to the same bits everywhere."""
        return self._ranks.gather(tensor.detach().to(self._device, torch.float64))

    def _lengths(self, length: int) -> list[int]:
        """Return how an axis of a parameter is cut: into equal pieces, of which the last ones may be short or empty."""
        each = -(-length // self._ranks.size)
        return [max(min(each, length - rank * each), 0) for rank in range(self._ranks.size)]

    def _shapes_on(self, rank: int) -> list[torch.Size]:
        """Return the shapes of the shards that a rank has of the shared parameters."""
        pairs = zip(self._shapes, self._dims, strict=True)
        return [torch.Size((*s[:dim], self._lengths(s[dim])[rank], *s[dim + 1 :])) for s, dim in pairs]


def layout_of(model: nn.Module | None, shared: Sequence[Parameter], named: Mapping[str, Parameter]) -> Whole:
    """Return where the entries of parameters are.

    Args:
        model: holds all of them.
        shared: the shared ones.
        named: all of them, by what they are called in messages.

    Raises:
        ValueError: if parameters are sharded in a way that is not understood.
    """
    modules = fsdp_modules(model)
    sharded = [name for name, parameter in named.items() if is_sharded(parameter)]
    if not sharded and not modules:
        return Whole()
    if model is None:
        raise ValueError(
            f"{sharded[0]} is sharded, and no model is given; expected the model, whose modules gather it. "
            "Pass TaskParameters(shared, heads, model)."
        )
    if not modules:
        raise ValueError(f"{sharded[0]} is a DTensor that fully_shard did not make. {_EXPECTED}")
    for name, parameter in named.items():
        if not is_sharded(parameter):
            raise ValueError(
                f"{name} is not sharded, though the model is: fully_shard was not called on a module that holds it, or "
                "it is the copy that a forward pass gathered. Call fully_shard on the whole model too, and list its "
                "parameters before the first pass, or after reshard() of each of its modules."
            )
        _check_placement(name, parameter, cast(Any, shared[0]).device_mesh)
    return Shards(model, shared)


_EXPECTED = "Expected parameters that torch.distributed.fsdp.fully_shard cut along one axis over one mesh of one axis."


def _check_placement(name: str, parameter: Any, mesh: Any) -> None:
    if parameter.device_mesh.ndim != 1:
        raise ValueError(f"{name} is on a mesh of {parameter.device_mesh.ndim} axes. {_EXPECTED}")
    if parameter.device_mesh != mesh:
        raise ValueError(f"{name} is on another mesh than the shared parameters. {_EXPECTED}")
    if not parameter.placements[0].is_shard():
        raise ValueError(f"{name} is placed as {parameter.placements[0]}. {_EXPECTED}")


def fsdp_modules(model: nn.Module | None) -> list[Any]:
    """Return the modules of a model on which ``fully_shard`` was called."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if model is None or kind is None else [module for module in model.modules() if isinstance(module, kind)]


def drop_copies(model: nn.Module | None) -> None:
    """Let every module give back the parameters that it gathered."""
    for module in fsdp_modules(model):
        module.reshard()


def sharded_by_copy(model: nn.Module) -> dict[int, Parameter]:
    """Return for each gathered parameter, by identity, the sharded one that it is a copy of; a collective operation."""
    modules = fsdp_modules(model)
    if not modules:
        return {}
    drop_copies(model)
    sharded = dict(model.named_parameters())
    for module in modules:
        module.unshard()
    found = {id(copy): sharded[name] for name, copy in model.named_parameters()}
    drop_copies(model)
    return found


def _split(rows: Tensor, shapes: Sequence[torch.Size]) -> Sequence[Tensor]:
    """Return the columns of rows in pieces of so many entries, without the padding at the end."""
    sizes = [shape.numel() for shape in shapes]
    return torch.split(rows[:, : sum(sizes)], sizes, dim=1)


@contextmanager
def _given_away(parameters: Sequence[Parameter], early: Early) -> Generator[dict[int, Tensor]]:
    """Let ``early`` have gradients as they are found, and autograd stand-ins without memory; yield what that made.

    A gradient that was just found is in the processor's cache, and its memory serves for the next one.
    """
    made: dict[int, Tensor] = {}

    def give(j: int, g: Tensor | None) -> Tensor | None:
        if g is None or g.layout != torch.strided:
            return g
        made[j] = early[j](g)
        return g.new_zeros(()).expand_as(g)

    handles = [cast(Any, parameters[j]).register_hook(partial(give, j)) for j in early]
    try:
        yield made
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _grads_put_back(leaves: Sequence[Tensor]) -> Generator[None]:
    """Set aside what a backward pass would add to, and the hooks that it would run, and put both back.

    The gathered parameters are among the leaves: a pass that failed may have left something in them.
    """
    tensors = cast("list[Any]", list(dict.fromkeys(leaves)))
    grads = [leaf.grad for leaf in tensors]
    hooks = [(hooks, dict(hooks)) for leaf in tensors if (hooks := leaf._post_accumulate_grad_hooks)]
    for leaf in tensors:
        leaf.grad = None
    for registered, _ in hooks:
        registered.clear()
    try:
        yield
    finally:
        for leaf, grad in zip(tensors, grads, strict=True):
            leaf.grad = grad
        for registered, some in hooks:
            registered.update(some)


def _check_options(module: Any) -> None:
    """Raise if a backward pass does not leave the mean over the ranks in ``.grad``."""
    state = module._get_fsdp_state()  # nothing public tells what was set
    context = getattr(state, "_state_ctx", None)
    for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]:
        factors = [getattr(group, name, None) for name in ("gradient_divide_factor", "reduce_scatter_reduce_op")]
        if any(factor is not None for factor in factors):
            raise ValueError(
                "the model has set_gradient_divide_factor, so that gradients are no means over the ranks; expected "
                "the default. Leave it, and scale the losses."
            )
        if not getattr(group, "reduce_grads", True) or not getattr(context, "is_last_backward", True):
            raise ValueError(
                "the model has set_requires_gradient_sync(False) or set_is_last_backward(False), so that a backward "
                "pass leaves no gradient. Set True; for micro-batches pass a list of closures."
            )
