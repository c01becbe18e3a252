"""State of aggregators from elsewhere that are modules, so that it can be put back and saved.

Their own ``state_dict`` has no entry for a buffer that is ``None`` for now, and cannot be loaded once there is one.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def saved(module: nn.Module) -> dict[str, Tensor | None]:
    """Return copies of all parameters and buffers of a module and its parts, those that are ``None`` included."""
    return {
        f"{name}.{key}": None if value is None else value.detach().clone()
        for name, tensors in _tensors(module)
        for key, value in tensors.items()
    }


@torch.no_grad()
def load(module: nn.Module, state: Mapping[str, Tensor | None]) -> None:
    """Put back what :func:`saved` returned.

    Raises:
        ValueError: if it is the state of another module.
    """
    places = {f"{name}.{key}": (tensors, key) for name, tensors in _tensors(module) for key in tensors}
    if places.keys() != state.keys():
        raise ValueError(
            f"the state of {type(module).__name__} has {sorted(state)}; expected {sorted(places)}. Load the state of "
            "the same aggregator."
        )
    for name, (tensors, key) in places.items():
        there, value = tensors[key], state[name]
        if isinstance(there, nn.Parameter) and value is not None:
            there.copy_(value)
        else:
            tensors[key] = None if value is None else value.clone()


class Snapshot:
    """What a module holds at one moment: tensors, and plain values of its own such as counters and arrays."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tensors = saved(module)
        self._values = [copy.deepcopy(_plain_values(part)) for part in module.modules()]

    def restore(self) -> None:
        """Put everything back."""
        load(self._module, self._tensors)
        for part, values in zip(self._module.modules(), self._values, strict=True):
            for name in _plain_values(part).keys() - values.keys():
                del vars(part)[name]
            vars(part).update(copy.deepcopy(values))


def _tensors(module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, part in cast("Iterator[tuple[str, nn.Module]]", module.named_modules()):
        yield name, cast("dict[str, Any]", vars(part)["_parameters"])
        yield name, cast("dict[str, Any]", vars(part)["_buffers"])


def _plain_values(part: nn.Module) -> dict[str, Any]:
    """Return a module's own values that are data and not machinery, such as a solver that is made once."""
    return {name: value for name, value in vars(part).items() if name not in _OF_EVERY_MODULE and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, cast("Sequence[Any]", value)))
    if isinstance(value, dict):
        return all(map(_is_plain, cast("dict[Any, Any]", value).values()))
    return isinstance(value, (Tensor, int, float, complex, str, bytes, type(None))) or hasattr(value, "__array__")
