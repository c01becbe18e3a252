"""Analyses leave a model as they found it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flatmtl_bench.randomness import RandomStreams


@contextmanager
def untouched(model: nn.Module, *, training: bool = False) -> Iterator[None]:
    """Within it a model may be run, moved and differentiated; after it everything is as it was, bit for bit.

    That is weights, buffers, ``.grad``, what needs gradients, the mode of every module and all random streams. It
    holds one copy of weights and buffers.

    Args:
        model: all its modules are put into one mode.
        training: that mode; eval mode otherwise.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        >>> with untouched(model):
        ...     model.training, _ = False, model[0].weight.data.zero_()
        >>> bool(model.training), bool(model[0].weight.any())
        (True, True)
    """
    modes = {module: module.training for module in model.modules()}
    places: list[dict[str, Any]] = [
        slots for module in model.modules() for slots in (module._parameters, module._buffers)
    ]
    held = [dict(slots) for slots in places]  # a forward pass may put another tensor into the place of a buffer
    tensors = [*model.parameters(), *model.buffers()]
    copies = [tensor.detach().clone() for tensor in tensors]
    gradients = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    streams = RandomStreams()
    before = streams.state_dict()
    for parameter, _, _ in gradients:
        parameter.grad = None
    model.train(training)
    try:
        yield
    finally:
        streams.load_state_dict(before)
        for slots, those in zip(places, held, strict=True):
            slots.clear()
            slots.update(those)
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
        for parameter, gradient, needed in gradients:
            parameter.requires_grad_(needed)
            parameter.grad = gradient
        for module, mode in modes.items():
            module.training = mode
