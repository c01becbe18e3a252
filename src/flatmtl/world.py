"""What a closure finds and leaves behind besides the weights: random streams and buffers.

A perturbed pass is the clean pass at other weights and nothing else. So it starts from the random streams
and the buffers that the clean pass started from, and what it does to either is undone.
"""

import pickle
import random
import sys
import warnings
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from flatmtl._linalg import copy_each
from flatmtl.closures import Closure, evaluate


class RandomStreams:
    """Positions of all random streams a closure may draw from.

    These are PyTorch's on the CPU and on ``devices``, Python's :mod:`random`, and NumPy's if it was imported.
    Generators that a user made are not among them.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [d for d in dict.fromkeys(devices) if d.type not in ("cpu", "meta")]
        self._torch = torch.get_rng_state()
        self._accelerators = self._of_accelerators()
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def restore(self) -> None:
        """Set every stream back to where it stood."""
        torch.set_rng_state(self._torch)
        for device, state in zip(self._devices, self._accelerators, strict=True):
            torch.get_device_module(device).set_rng_state(state, device)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def stand_still(self) -> bool:
        """Return whether every stream still stands where it stood."""
        same = torch.equal(torch.get_rng_state(), self._torch)
        same = same and all(map(torch.equal, self._of_accelerators(), self._accelerators))
        return same and random.getstate() == self._python and _same_numpy(_numpy_state(), self._numpy)

    def _of_accelerators(self) -> list[Tensor]:
        return [torch.get_device_module(d).get_rng_state(d) for d in self._devices]


def _numpy_state() -> Any:
    """Return where NumPy's stream stands, ``None`` if nobody imported NumPy: then nobody can have drawn from it."""
    numpy: Any = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state(legacy=False)


def _same_numpy(a: Any, b: Any) -> bool:
    return pickle.dumps(a) == pickle.dumps(
        b
    )  # dictionaries with an array in them, of kinds that depend on the generator


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
                name: (buffer, buffer.detach().clone() if buffer is not None and _may_change(buffer) else None)
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

    def restore(self) -> None:
        """Put back the tensors (a module may have made or replaced one) and what they held."""
        places: list[Tensor] = []
        contents: list[Tensor] = []
        for module, buffers in self._modules.items():
            own = _own_buffers(module)
            for name in own.keys() - buffers.keys():
                del own[name]
            for name, (buffer, content) in buffers.items():
                if name not in own or own[name] is not buffer:
                    own[name] = buffer
                if buffer is not None and content is not None:
                    places.append(buffer)
                    contents.append(content)
        copy_each(contents, to=places)


def _own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the module's own buffers, those that are ``None`` for now included."""
    return module._buffers  # pyright: ignore[reportPrivateUsage]


def _may_change(buffer: Tensor) -> bool:
    """Return whether the buffer can be written: an expanded one cannot, nor a compressed sparse one."""
    if buffer.is_inference():
        return False
    if buffer.layout != torch.strided:
        return buffer.layout == torch.sparse_coo
    return all(stride != 0 or size <= 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))


class World:
    """Random streams and buffers at one moment.

    Args:
        model: all of whose buffers belong to the world.
        devices: the devices whose random streams belong to the world.
        modules: modules whose buffers belong to the world besides.
    """

    def __init__(
        self, model: nn.Module | None, devices: Iterable[torch.device], modules: Iterable[nn.Module] = ()
    ) -> None:
        self.streams = RandomStreams(devices)
        self.buffers = Buffers([*modules, *(() if model is None else model.modules())])

    def run(self, closure: Closure, tasks: Sequence[str]) -> dict[str, Tensor]:
        """Return the losses of a clean pass that starts from this world; see :func:`evaluate`.

        Buffers of modules that nobody named are seen as the modules run, unless something may be compiled: compiled
        functions do not take to hooks on all modules. See :meth:`modules_of`.
        """
        if "torch._dynamo" in sys.modules:
            with _keeping_graphs():
                return evaluate(closure, tasks)
        with self.buffers.seeing():
            return evaluate(closure, tasks)

    def run_again(self, closure: Closure, tasks: Sequence[str]) -> dict[str, Tensor]:
        """Return the losses of another pass that starts from this world."""
        self.restore()
        with _keeping_graphs():
            return evaluate(closure, tasks)

    def modules_of(self, closures: Iterable[Closure], tasks: Sequence[str]) -> tuple[nn.Module, ...]:
        """Return the modules that run in closures, from one pass that compiles nothing and leaves no trace."""
        try:
            with uncompiled(), warnings.catch_warnings(), self.buffers.seeing():
                warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are", UserWarning)
                for closure in closures:
                    evaluate(closure, tasks)
        finally:
            self.restore()
        return tuple(self.buffers.modules)

    def restore(self) -> None:
        """Set streams and buffers back to this moment."""
        self.streams.restore()
        self.buffers.restore()


def uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which compiled functions run as they were written, at no cost if nothing was compiled."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _keeping_graphs() -> AbstractContextManager[Any]:
    """Return a context in which functions are compiled so that their graphs serve several backward passes."""
    config: Any = sys.modules.get("torch._functorch.config") if "torch._dynamo" in sys.modules else None
    return config.patch(donated_buffer=False) if getattr(config, "donated_buffer", False) else nullcontext()
