"""State of aggregators from elsewhere that are modules, so that it can be put back and saved.

Their own ``state_dict`` has no entry for a buffer that is ``None`` for now, cannot be loaded once there is one, and
leaves out what they keep in plain attributes, such as counters.
"""

import copy
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from flatmtl._options import warn

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (Tensor, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Generator)
_COLLECTIONS = (list, tuple, set, frozenset, deque)


def saved(module: nn.Module) -> dict[str, Any]:
    """Return a copy of what a module and its parts hold, for :func:`load`, also after ``torch.save``."""
    return {
        "tensors": _copies(module),
        "values": {name: {k: _stored(v) for k, v in _plain_values(part).items()} for name, part in _parts(module)},
        "names": {name: sorted(_own_names(part)) for name, part in _parts(module)},
    }


def load(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Put back what :func:`saved` returned.

    A part that had made itself more than values, such as a solver, begins anew, which is said by a warning.

    Raises:
        ValueError: if it is the state of another module.
    """
    if set(state) != {"tensors", "values", "names"} or state["names"].keys() != dict(_parts(module)).keys():
        raise ValueError(
            f"the state is not that of this {type(module).__name__}; expected what FlatMTL.state_dict() returns. Load "
            "the state of the same aggregator."
        )
    missing = _copies(module).keys() - state["tensors"].keys()
    if missing:
        raise ValueError(
            f"the state of {type(module).__name__} has no {sorted(missing)}. Load the state of the same aggregator."
        )
    _put_back(module, state["tensors"])
    for name, part in _parts(module):
        values = state["values"][name]
        if set(state["names"][name]) <= _own_names(part) | values.keys():
            vars(part).update({k: _restored(v) for k, v in values.items()})
        else:
            warn(
                f"the state of {type(part).__name__} cannot be put into a new one, which begins anew: it had made "
                "itself more than values. A resumed run will differ from one that was never interrupted."
            )


class Snapshot:
    """What a module holds at one moment: tensors, and plain values of its own such as counters and arrays."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tensors = _copies(module)
        self._values = {name: copy.deepcopy(_plain_values(part)) for name, part in _parts(module)}

    def restore(self) -> None:
        """Put everything back."""
        for name, (table, key) in _places(self._module).items():
            if name not in self._tensors:
                del table[key]
        _put_back(self._module, self._tensors)
        for name, part in _parts(self._module):
            if name in self._values:
                for added in _plain_values(part).keys() - self._values[name].keys():
                    del vars(part)[added]
                vars(part).update(copy.deepcopy(self._values[name]))


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return cast("Iterator[tuple[str, nn.Module]]", module.named_modules())


def _places(module: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Return where each parameter and buffer of a module and its parts is, those that are ``None`` included."""
    tables = [(name, vars(part)[kind]) for name, part in _parts(module) for kind in ("_parameters", "_buffers")]
    return {f"{name}.{key}": (cast("dict[str, Any]", table), key) for name, table in tables for key in table}


def _copies(module: nn.Module) -> dict[str, Tensor | None]:
    places = {name: table[key] for name, (table, key) in _places(module).items()}
    return {name: None if value is None else value.detach().clone() for name, value in places.items()}


@torch.no_grad()
def _put_back(module: nn.Module, tensors: Mapping[str, Tensor | None]) -> None:
    """Put tensors back, and those buffers too that are not there yet."""
    places, parts = _places(module), dict(_parts(module))
    for name, value in tensors.items():
        owner, _, key = name.rpartition(".")
        table, key = places.get(name, (vars(parts[owner])["_buffers"], key))
        there = table.get(key)
        if isinstance(there, nn.Parameter) and value is not None:
            there.copy_(value)
        else:
            table[key] = None if value is None else value.clone()


def _own_names(part: nn.Module) -> set[str]:
    return set(vars(part)) - _OF_EVERY_MODULE


def _plain_values(part: nn.Module) -> dict[str, Any]:
    """Return a module's own values that are data and not machinery, such as a solver that is made once."""
    return {name: vars(part)[name] for name in _own_names(part) if _is_plain(vars(part)[name])}


def _is_plain(value: Any) -> bool:
    if isinstance(value, _COLLECTIONS):
        return all(map(_is_plain, cast("Collection[Any]", value)))
    if isinstance(value, dict):
        return all(map(_is_plain, cast("dict[Any, Any]", value).values()))
    return isinstance(value, _PLAIN) or _is_array(value)


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") and not isinstance(value, _PLAIN)


def _stored(value: Any) -> Any:
    """Return a copy of a value, as what can be loaded where only tensors and the plainest of values may be."""
    if _is_array(value):
        return {"array": torch.as_tensor(value).clone()}
    if isinstance(value, torch.Generator):
        return {"generator": value.get_state()}
    if isinstance(value, deque):
        of_values = cast("deque[Any]", value)
        return {"deque": [*of_values], "maxlen": of_values.maxlen}
    return copy.deepcopy(value)


def _restored(value: Any) -> Any:
    """Return the value that :func:`_stored` was given."""
    stored = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    if stored.keys() == {"array"}:
        return stored["array"].clone().numpy()
    if stored.keys() == {"generator"}:
        return torch.Generator().set_state(stored["generator"].cpu())
    if stored.keys() == {"deque", "maxlen"}:
        return deque(stored["deque"], stored["maxlen"])
    return copy.deepcopy(cast("Any", value))
