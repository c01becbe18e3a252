"""Random streams as values that a checkpoint can hold and `torch.load(weights_only=True)` accepts."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def derived_seed(*numbers: int) -> int:
    """Return a seed for what some numbers tell apart, such as seed and epoch: neighbours have unrelated ones.

    Example:
        >>> derived_seed(0, 1) != derived_seed(1, 0)
        True
    """
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


class RandomStreams:
    """The streams of torch, its accelerators, Python and NumPy, as one part of a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return where the streams stand."""
        numpy: Any = np.random.get_state(legacy=False)
        return {
            "torch": torch.get_rng_state(),
            "cuda": [torch.cuda.get_rng_state(device) for device in range(torch.cuda.device_count())],
            "mps": torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
            "python": random.getstate(),
            "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put every stream that this machine has, too, back to where :meth:`state_dict` found it."""
        numpy = state["numpy"]
        torch.set_rng_state(state["torch"])
        for device, stream in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(stream, device)
        if state["mps"] is not None and torch.backends.mps.is_available():
            torch.mps.set_rng_state(state["mps"])
        random.setstate(state["python"])
        np.random.set_state({**numpy, "state": {**numpy["state"], "key": np.array(numpy["state"]["key"], np.uint32)}})
