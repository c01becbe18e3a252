"""How much memory a step needs: what a model and its optimizer hold, and how far a step rises above it."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile


def held(model: nn.Module, optimizer: Any) -> int:
    """Return the bytes of a model's parameters and buffers, and of an optimizer's state; tensors count once each."""
    states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return _bytes([*model.parameters(), *model.buffers(), *states])


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def rise(work: Callable[[], Any], device: torch.device) -> int:
    """Return by how many bytes of tensors memory rises at most while something is done.

    On CUDA its allocator tells; elsewhere PyTorch's profiler does, which sees every allocation on the CPU.

    Example:
        >>> rise(lambda: torch.ones(1000) + torch.ones(1000), torch.device("cpu"))
        12000
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    return max(accumulate(size for _, size in allocations(recorded(work))), default=0)


def recorded(work: Callable[[], Any], *, with_stack: bool = False) -> list[Any]:
    """Return the profiler's events while something is done on the CPU; with the functions they are of, if asked for."""
    activities = [ProfilerActivity.CPU]
    with _quiet(), profile(activities=activities, profile_memory=True, with_stack=with_stack) as profiler:
        work()
    results: Any = profiler.profiler
    return list(results.kineto_results.events())


def allocations(events: Iterable[Any]) -> list[tuple[int, int]]:
    """Return the time of each allocation, also of those within an operator, and its bytes.

    Where memory is given back they are negative.
    """
    found = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    return sorted(found, key=lambda pair: pair[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """Within it nothing is written to standard error: the profiler's own library tells there when it starts and stops.

    It writes to the file descriptor, which Python's redirection does not reach, whatever its level of logging is.
    """
    sys.stderr.flush()
    with open(os.devnull, "wb") as nothing:
        kept = os.dup(2)
        try:
            os.dup2(nothing.fileno(), 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
