"""Models from elsewhere, by ``package.module:factory``."""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import nn

from flatmtl_bench.choices import did_you_mean


def build_imported(path: str, heads: Mapping[str, int], in_channels: int) -> nn.Module:
    """Return the model that the factory at ``path`` makes, called as ``factory(heads, in_channels)``.

    Args:
        path: ``package.module:factory``, a function or a class.
        heads: task -> number of outputs.
        in_channels: of the inputs.

    Raises:
        ValueError: there is no such module, or nothing of that name in it; the factory cannot be called so; or what it
            makes is no module with ``forward(x, tasks=None)``.
    """
    factory = _load(path)
    _check_call(factory, (heads, in_channels), f"{path} cannot be called as factory(heads, in_channels)")
    try:
        model = factory(heads, in_channels)
    except ValueError as error:  # else it would seem to be of ours
        raise RuntimeError(f"the factory of model {path} raised {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{path} made a {type(model).__name__}; expected a torch.nn.Module whose forward(x, tasks=None) returns "
            "{task: output}."
        )
    for arguments in ((None,), (None, list(heads))):
        _check_call(
            model.forward,
            arguments,
            f"{path} made a {type(model).__name__} that cannot be called as model(x) and as model(x, tasks)",
        )
    return model


def _load(path: str) -> Callable[..., Any]:
    """Return the callable that ``package.module:factory`` names."""
    module_name, _, name = path.partition(":")
    try:
        module = import_module(module_name)
    except (ModuleNotFoundError, ValueError, TypeError) as error:
        missing = getattr(error, "name", None)
        if missing is not None and missing != module_name and not module_name.startswith(f"{missing}."):
            raise  # the module is there, but not what it imports
        raise ValueError(
            f"model {path!r}: there is no module {module_name!r}. Expected 'package.module:factory'; the folder of the "
            "package must be on the PYTHONPATH."
        ) from None
    if not hasattr(module, name):
        hint = did_you_mean(name, vars(module))
        raise ValueError(f"model {path!r}: module {module_name!r} has no {name!r}.{hint}")
    factory = getattr(module, name)
    if not callable(factory):
        raise ValueError(f"model {path!r} is {factory!r}; expected a function or a class that makes a model.")
    return factory


def _check_call(function: Callable[..., Any], arguments: tuple[Any, ...], message: str) -> None:
    """Raise a `ValueError` unless ``function`` takes these positional arguments."""
    signature = inspect.signature(function)
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ValueError(f"{message}: {error}. It takes {signature}.") from None
