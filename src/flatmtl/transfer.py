"""Small numbers on their way from the device to the host, which need not wait for them before it needs them."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Transfer:
    """One transfer of several small tensors, begun now and waited for when they are asked for.

    Args:
        tensors: on any devices.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [t.shape for t in tensors]
        device = tensors[0].device
        self._numbers = torch.cat([t.detach().reshape(-1).to(device, torch.float64) for t in tensors])
        self._arrived: torch.cuda.Event | None = None
        if device.type == "cuda":
            with torch.cuda.device(device):
                there = torch.empty(self._numbers.shape, dtype=torch.float64, device="cpu", pin_memory=True)
                self._numbers = there.copy_(self._numbers, non_blocking=True)
                self._arrived = torch.cuda.Event()
                self._arrived.record()

    @property
    def is_here(self) -> bool:
        """Whether nothing is to be waited for."""
        return self._arrived is None and self._numbers.device.type == "cpu"

    def wait(self) -> list[Tensor]:
        """Return the tensors, float64 on the CPU."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers = torch.split(self._numbers.cpu(), [shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(numbers, self._shapes, strict=True)]
