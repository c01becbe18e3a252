"""Several processes that train one model together: who they are, what they agree on, and their sums.

Gradients taken by ``autograd.grad`` pass by the reducer of ``DistributedDataParallel``, without a word. So the wrapper
is put aside within a step, and the rows are summed over the ranks here.
"""

import zlib
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from flatmtl._linalg import floats


class Work(Protocol):
    """A sum on its way."""

    def wait(self) -> Any:
        """Wait until the sum is there."""
        ...


class Ranks:
    """The processes that average their task gradients; a process that is alone sends nothing.

    Args:
        group: their process group, ``None`` for a single process.
        model: gives the wrappers to put aside and the buffers to share.
        sharded: whether the backward passes of the model average the gradients.

    Attributes:
        device: on which small things are sent.
    """

    def __init__(self, group: Any, model: nn.Module | None, *, sharded: bool = False) -> None:
        self.group = group
        self.model = model
        self.sharded = sharded
        self.device = torch.device("cpu")
        self.size = 1 if group is None else distributed.get_world_size(group)

    @classmethod
    def of(cls, group: Any, model: nn.Module | None) -> "Ranks":
        """Return the ranks of a process group; without one those of the model's wrapper, else this process alone.

        Raises:
            ValueError: if several processes train and neither names a group, this process is not in the group, or the
                model is sharded or replicated in a way whose gradients cannot be averaged here.
        """
        check_supported(model)
        if group is not None:
            return cls(group, model)
        groups: list[Any] = [wrapper.process_group for wrapper in wrappers(model)]
        if len({tuple(distributed.get_process_group_ranks(found)) for found in groups}) > 1:
            raise ValueError(
                "the model holds several DistributedDataParallel of different process groups; expected one group, over "
                "which to average. Pass FlatMTL(..., process_group=...)."
            )
        if groups:
            return cls(groups[0], model)
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            raise ValueError(
                f"{distributed.get_world_size()} processes train, but the model of the parameters is not wrapped in "
                "DistributedDataParallel and no process_group is given, so each process would go its own way. Pass "
                "FlatMTL(..., process_group=torch.distributed.group.WORLD), or split the parameters of the wrapped "
                "model. For a process that is to train alone pass torch.distributed.new_group([rank])."
            )
        return cls(None, model)

    @property
    def alone(self) -> bool:
        """Whether there is nobody to send anything to."""
        return self.size == 1

    @property
    def send_gradients(self) -> bool:
        """Whether task gradients and losses are those of one rank, to be summed over all."""
        return not self.alone and not self.sharded

    @cached_property
    def in_step(self) -> bool:
        """Whether the ranks talk to each other within a pass of the model, so that all must run the same passes."""
        modules = () if self.model is None else self.model.modules()
        return not self.alone and (self.sharded or any(isinstance(module, nn.SyncBatchNorm) for module in modules))

    def are(self, group: Any) -> bool:
        """Return whether these are the ranks of a group."""
        ranks = distributed.get_process_group_ranks
        return ranks(group) == ranks(self.group)

    def start(self, tensor: Tensor) -> Work:
        """Begin to replace a tensor by its sum over the ranks."""
        return cast(Work, distributed.all_reduce(tensor, group=self.group, async_op=True))

    def sum(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over the ranks, the same bits on each, and return it."""
        if not self.alone:
            self.start(tensor).wait()
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of every rank, which are of one shape."""
        if self.alone:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(found, tensor.contiguous(), group=self.group)
        return found

    def table(self, numbers: Sequence[float], device: torch.device) -> list[list[float]]:
        """Return the numbers of every rank."""
        return [floats(row) for row in self.gather(torch.tensor(numbers, dtype=torch.float64, device=device))]

    def most(self, count: int, device: torch.device) -> int:
        """Return the greatest of the counts of the ranks."""
        return count if self.alone else int(max(row[0] for row in self.table([float(count)], device)))

    def first(self, weights: Tensor) -> Tensor:
        """Return the weights of the first rank, on the CPU: an aggregator may draw, or have learnt there alone."""
        return weights if self.alone else self.take_from_first(weights.to(self.device).contiguous()).cpu()

    def take_from_first(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by that of the first rank, and return it."""
        if not self.alone:
            distributed.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    @cached_property
    def wrappers(self) -> list[Any]:
        """The wrappers in the model."""
        return wrappers(self.model)

    def unwrapped(self) -> AbstractContextManager[None]:
        """Let wrapped modules run without their wrappers; see :func:`unwrapped`."""
        return unwrapped(self.wrappers)

    def share_buffers(self) -> None:
        """Give all ranks the buffers of the first, where the wrapper would do so before each forward pass."""
        if self.alone:
            return
        for wrapper in self.wrappers:
            if wrapper.broadcast_buffers:
                self._share([b for b in wrapper.module.buffers() if b.numel()])

    @torch.no_grad()
    def _share(self, buffers: Sequence[Tensor]) -> None:
        """Send the buffers of the first rank, those of one kind together."""
        for kind in dict.fromkeys((b.dtype, b.device) for b in buffers):
            some = [b for b in buffers if (b.dtype, b.device) == kind]
            sent = self.take_from_first(torch.cat([b.detach().reshape(-1) for b in some]))
            for buffer, content in zip(some, torch.split(sent, [b.numel() for b in some]), strict=True):
                buffer.copy_(content.view_as(buffer))


class Disagreement(RuntimeError):
    """The ranks cannot do this step together. All of them raise it, so that none waits for another."""


def checked_group(group: Any) -> Any:
    """Return a process group, or raise.

    Raises:
        TypeError: if it is something else.
        ValueError: if this process is not in it.
    """
    if distributed.is_available() and group is distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process is not in the process_group given; expected a group that it belongs to.")
    if not (distributed.is_available() and isinstance(group, distributed.ProcessGroup)):
        raise TypeError(
            f"process_group is {group!r}; expected a torch.distributed process group such as "
            "torch.distributed.group.WORLD, or None for that of the wrapped model."
        )
    return group


def fingerprint(*parts: object) -> float:
    """Return a number that ranks with the same parts share."""
    return float(zlib.crc32(repr(parts).encode()))


def wrappers(model: nn.Module | None) -> list[Any]:
    """Return the wrappers in a model, which may itself be compiled or wrapped once more."""
    return [] if model is None else [m for m in model.modules() if isinstance(m, DistributedDataParallel)]


@contextmanager
def unwrapped(wrappers: Sequence[Any]) -> Generator[None]:
    """Within it each wrapped module runs in the place of its ``DistributedDataParallel``.

    The wrapper would prepare its reducer for a backward pass that never comes, and send buffers in each forward pass,
    of which the ranks may run different numbers.
    """
    found = [wrapper for wrapper in wrappers if "forward" not in vars(wrapper)]
    for wrapper in found:
        wrapper.forward = _forward_of(wrapper)
    try:
        yield
    finally:
        for wrapper in found:
            del wrapper.forward


def _forward_of(wrapper: Any) -> Any:
    def forward(*arguments: Any, **options: Any) -> Any:
        if wrapper.device_ids:
            (arguments,), (options,) = wrapper.to_kwargs(arguments, options, wrapper.device_ids[0])
        return wrapper.module(*arguments, **options)

    return forward


def check_supported(model: nn.Module | None) -> None:
    """Raise for a model that is sharded or replicated in a way whose task gradients cannot be averaged here.

    Raises:
        ValueError: naming the wrapper and what to use instead.
    """
    for module in () if model is None else model.modules():
        remedy = _remedy(module)
        if remedy is not None:
            raise ValueError(f"the model is wrapped in {type(module).__name__}, {remedy}")


_INSTEAD = "Wrap the bare model in torch.nn.parallel.DistributedDataParallel, one process for each device."


@cache
def _names_of(kind: type) -> frozenset[str]:
    """Return the names of a class and those it inherits from, each after the package it is from."""
    return frozenset(f"{one.__module__.partition('.')[0]}.{one.__name__}" for one in kind.__mro__)


def _remedy(module: nn.Module) -> str | None:
    """Return why a wrapper is refused, and what to use; ``None`` for what is none or is understood."""
    kinds = _names_of(type(module))
    if isinstance(module, DataParallel) and len(module.device_ids) > 1:
        return f"over {len(module.device_ids)} devices, whose random streams cannot be repeated. {_INSTEAD}"
    if "torch.FullyShardedDataParallel" in kinds:
        return f"whose parameters are freed after the first backward pass. {_INSTEAD}"
    if "deepspeed.DeepSpeedEngine" in kinds:
        return f"whose gradients lie in its own partitions and not in .grad. {_INSTEAD}"
    if isinstance(module, DistributedDataParallel) and getattr(module, "mixed_precision", None) is not None:
        return "with mixed_precision, which casts in hooks that a step puts aside. Use torch.autocast in the closure."
    return None
