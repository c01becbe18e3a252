"""Random streams as values that a checkpoint can hold and `torch.load(weights_only=True)` accepts."""

import random
from typing import Any

import numpy as np
import torch


def derived_seed(seed: int, epoch: int) -> int:
    """Return the seed of one epoch's shuffling, unrelated for neighbouring seeds and epochs.

    Example:
        >>> derived_seed(0, 1) != derived_seed(1, 0)
        True
    """
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def random_state() -> dict[str, Any]:
    """Return where the streams of torch, its accelerators, Python and NumPy stand."""
    numpy: Any = np.random.get_state(legacy=False)
    return {
        "torch": torch.get_rng_state(),
        "accelerators": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put every stream back to where :func:`random_state` found it."""
    numpy = state["numpy"]
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["accelerators"])
    random.setstate(state["python"])
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": np.array(numpy["state"]["key"], np.uint32)}})
