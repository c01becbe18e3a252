"""What a closure finds and leaves behind besides the weights: random streams and buffers.

A perturbed pass is the clean pass at other weights and nothing else. So it starts from the random streams
and the buffers that the clean pass started from, and what it does to either is undone.
"""

import pickle
import random
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from flatmtl.closures import Closure, evaluate


class RandomStreams:
    """Positions of all random streams a closure may draw from.

    These are PyTorch's on the CPU and on ``devices``, Python's :mod:`random`, and NumPy's if it was imported.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [d for d in dict.fromkeys(devices) if d.type not in ("cpu", "meta")]
        self._torch = torch.get_rng_state()
        self._accelerators = [torch.get_device_module(d).get_rng_state(d) for d in self._devices]
        self._python = random.getstate()
        self._numpy: Any = numpy.random.get_state() if (numpy := _numpy()) is not None else None

    def restore(self) -> None:
        """Set every stream back to where it stood."""
        torch.set_rng_state(self._torch)
        for device, state in zip(self._devices, self._accelerators, strict=True):
            torch.get_device_module(device).set_rng_state(state, device)
        random.setstate(self._python)
        if self._numpy is not None and (numpy := _numpy()) is not None:
            numpy.random.set_state(self._numpy)

    def stand_still(self) -> bool:
        """Return whether every stream still stands where it stood."""
        now = RandomStreams(self._devices)
        same = torch.equal(now._torch, self._torch) and now._python == self._python
        same = same and all(map(torch.equal, now._accelerators, self._accelerators))
        return same and _same_numpy(now._numpy, self._numpy)


def _numpy() -> Any:
    """Return NumPy if somebody imported it: nobody else can have drawn from it."""
    return sys.modules.get("numpy")


def _same_numpy(a: Any, b: Any) -> bool:
    return pickle.dumps(a) == pickle.dumps(b)  # a tuple or, of newer generators, a dictionary, with an array in it


class Buffers:
    """What the buffers of modules held when they were seen."""

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._modules: dict[nn.Module, dict[str, tuple[Tensor | None, Tensor | None]]] = {}
        for module in modules:
            self.see(module)

    @property
    def modules(self) -> Iterable[nn.Module]:
        """The modules whose buffers were seen."""
        return self._modules.keys()

    def see(self, module: nn.Module) -> None:
        """Take a copy of the module's own buffers, unless it was seen before."""
        if module not in self._modules:
            self._modules[module] = {
                name: (buffer, None if buffer is None else buffer.detach().clone())
                for name, buffer in _own_buffers(module).items()
            }

    @contextmanager
    def seeing(self) -> Generator[None]:
        """See each module just before its first forward pass within this context."""

        def before_forward(module: nn.Module, _arguments: Any) -> None:
            if module not in self._modules:
                for part in module.modules():  # a compiled or scripted module runs its parts without their hooks
                    self.see(part)

        handle = register_module_forward_pre_hook(before_forward)
        try:
            yield
        finally:
            handle.remove()

    @torch.no_grad()
    def restore(self) -> None:
        """Put back both the tensors (a module may have replaced one) and what they held."""
        for module, buffers in self._modules.items():
            for name, (buffer, content) in buffers.items():
                own = _own_buffers(module)
                if name not in own or own[name] is not buffer:
                    own[name] = buffer
                if buffer is not None and content is not None and _may_change(buffer):
                    buffer.copy_(content)


def _own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the module's own buffers, those that are ``None`` for now included."""
    return module._buffers  # pyright: ignore[reportPrivateUsage]


def _may_change(buffer: Tensor) -> bool:
    """Return whether the buffer can be written: an expanded one cannot, nor a compressed sparse one."""
    if buffer.layout != torch.strided:
        return buffer.layout == torch.sparse_coo
    return all(stride != 0 or size <= 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))


class World:
    """Random streams and buffers at one moment.

    Args:
        model: all of whose buffers belong to the world, besides those of the modules that run in :meth:`run`.
        devices: the devices whose random streams belong to the world.
        modules: modules whose buffers belong to the world besides.
    """

    def __init__(
        self, model: nn.Module | None, devices: Iterable[torch.device], modules: Iterable[nn.Module] = ()
    ) -> None:
        self._model = model
        self.streams = RandomStreams(devices)
        self.buffers = Buffers([*modules, *(() if model is None else model.modules())])

    def run(self, closure: Closure, tasks: Sequence[str]) -> dict[str, Tensor]:
        """Return the losses of a clean pass that starts from this world; see :func:`evaluate`."""
        if self._model is not None and "torch._dynamo" in sys.modules:
            return evaluate(closure, tasks)  # compiled functions do not take to global hooks
        with self.buffers.seeing():
            return evaluate(closure, tasks)

    def restore(self) -> None:
        """Set streams and buffers back to this moment."""
        self.streams.restore()
        self.buffers.restore()
