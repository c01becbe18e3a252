"""Several processes that train one model, the ranks: how they start, agree, and end."""

import atexit
import multiprocessing
import os
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flatmtl_bench.recipes.config import Config

GRACE = 5.0
"""Seconds that the other processes of a machine get to end by themselves when the first one has ended."""


def launch(config: Config) -> Fabric:
    """Return Fabric on the devices of a config, with the processes of all ranks running.

    Under ``torchrun`` and ``fabric run`` these have been started. Otherwise Fabric starts one more process for each
    further device, which runs the command of this one once more.

    Raises:
        ValueError: there are no such devices, ``torchrun`` has started another number of processes, or this process is
            one of a pool, whose command cannot be run once more.
    """
    devices, machines = _processes(config)
    options: Any = {"accelerator": config.device, "strategy": config.strategy, "precision": config.precision}
    try:
        fabric = Fabric(devices=devices, num_nodes=machines, **options)
    except (RuntimeError, MisconfigurationException) as error:
        raise ValueError(
            f"there is no device {config.device!r} on this machine, or not {devices} of them. "
            f"Use --device auto, or fewer --devices. ({error})"
        ) from None
    if "LT_CLI_USED" not in os.environ:  # `fabric run` has launched it
        atexit.register(_end, getattr(fabric.strategy.launcher, "procs", []))
        fabric.launch()
    atexit.register(_leave)
    return fabric


def _processes(config: Config) -> tuple[int, int]:
    """Return the number of processes on each machine, and of machines."""
    if not distributed.is_torchelastic_launched():
        if (config.devices or 1) > 1 and multiprocessing.parent_process() is not None:
            raise ValueError(
                f"--devices {config.devices} was asked for in a process of a pool, as a sweep has them, but several "
                "devices need a command for each run. Use `flatmtl run`, or leave --devices out."
            )
        return config.devices or 1, config.num_nodes
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    machines = int(os.environ["WORLD_SIZE"]) // devices
    if config.devices not in (None, devices) or config.num_nodes not in (1, machines):
        raise ValueError(
            f"--devices {config.devices} on --num-nodes {config.num_nodes} were asked for, but torchrun has started "
            f"{devices} processes on each of {machines} machines. Leave both out: torchrun says how many."
        )
    return devices, machines


def _leave() -> None:
    """Leave the process groups, so that none of their threads lets go of a tensor while Python ends.

    Such a thread aborts its process: with gloo and PyTorch 2.14, 17 of 25 runs of 30 bare all-reduces did.
    """
    if distributed.is_initialized():
        sleep(0.05)  # what has been waited for is let go of a moment later
        distributed.destroy_process_group()


def _end(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """Wait for processes, but not for ever: after an error they may wait for this one."""
    deadline = monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(0.0, deadline - monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


class ToldRankZero(Exception):
    """A mistake on some rank, raised on another one than rank 0, which raises the mistake itself."""


@contextmanager
def together(fabric: Fabric) -> Iterator[None]:
    """Let a mistake that is found on one rank be an error on every rank, so that none waits for another in vain.

    What is done within must not wait for other ranks. A mistake is a ``ValueError`` or an ``OSError``; any other error
    ends its process, and with it all others.

    Raises:
        ToldRankZero: on all ranks but 0.
    """
    if fabric.world_size == 1:
        yield
        return
    mistake = None
    try:
        yield
    except (ValueError, OSError) as error:
        mistake = error
    for found in gather(fabric, mistake):
        if found is not None:
            raise found if fabric.is_global_zero else ToldRankZero(found)


def process_group(fabric: Fabric) -> Any:
    """Return the process group of all ranks; None if there is only one."""
    return distributed.group.WORLD if fabric.world_size > 1 else None


def any_rank(fabric: Fabric, flag: bool) -> bool:
    """Return whether the flag is set on some rank."""
    if fabric.world_size == 1:
        return flag
    flags = torch.tensor(float(flag), device=fabric.device)
    distributed.all_reduce(flags)
    return flags.item() > 0.0


def gather(fabric: Fabric, value: Any) -> list[Any]:
    """Return the values of all ranks, in the order of the ranks."""
    values = [value] * fabric.world_size
    if fabric.world_size > 1:
        distributed.all_gather_object(values, value)
    return values


def from_rank_zero(fabric: Fabric, value: Callable[[], Any]) -> Any:
    """Return on every rank what a function returns on rank 0, and raise the mistake that it finds there."""
    with together(fabric):
        found = value() if fabric.is_global_zero else None
    return fabric.broadcast(found)


class EachRank:
    """A part of a checkpoint that is another one on every rank."""

    def __init__(self, fabric: Fabric, part: Any) -> None:
        self.fabric = fabric
        self.part = part

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks."""
        return {"ranks": gather(self.fabric, self.part.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore that of this rank; one that was not there before stays as it is."""
        if self.fabric.global_rank < len(state["ranks"]):
            self.part.load_state_dict(state["ranks"][self.fabric.global_rank])


def check_same(fabric: Fabric, what: str, value: object) -> None:
    """Raise a `ValueError`, as :func:`together` does, unless all ranks have the same."""
    first = fabric.broadcast(value)
    with together(fabric):
        if value != first:
            raise ValueError(
                f"rank {fabric.global_rank} has other {what} than rank 0: {value} instead of {first}. "
                "Give all machines the same."
            )


def over_all_ranks(fabric: Fabric, model: nn.Module) -> nn.Module:
    """Return the model with batch statistics over all ranks where PyTorch has them, which is on accelerators.

    On the CPU each rank has those of its own part of a batch, as with ``DistributedDataParallel``, and a warning says
    so; :func:`average_buffers` makes the running ones equal.
    """
    if fabric.world_size == 1:
        return model
    if fabric.device.type != "cpu":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if fabric.is_global_zero and any(isinstance(module, _BatchNorm) for module in model.modules()):
        warnings.warn(
            "on the CPU each rank normalises its own part of a batch, so the numbers are not those of one process. "
            "Use a model without batch normalisation, or one process.",
            stacklevel=2,
        )
    return model


def take_from_rank_zero(fabric: Fabric, model: nn.Module) -> None:
    """Give all ranks the weights and buffers of rank 0, in case that other machines draw other ones."""
    if fabric.world_size > 1:
        for tensor in model.state_dict().values():
            distributed.broadcast(tensor, src=0)


def average_buffers(fabric: Fabric, model: nn.Module) -> None:
    """Give the buffers of a model, such as running statistics, their mean over the ranks."""
    if fabric.world_size > 1:
        for buffer in model.buffers():
            if buffer.is_floating_point():
                fabric.all_reduce(buffer)
