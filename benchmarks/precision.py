"""How much of the flat gradient is left under autocast: its cosine with that of float64, beside ``signal_to_noise``.

One batch of real digits, a LeNet and a ResNet-18 as they are initialised, SAM of several radii; losses under float16
are scaled by a gradient scaler. ``python benchmarks/precision.py`` writes ``results/precision.json`` beside this file
(some minutes).
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

from flatmtl import SAM, FlatMTL, StepResult, TaskParameters
from flatmtl_bench import data, models
from flatmtl_bench.environment import environment
from flatmtl_bench.files import write_whole
from flatmtl_bench.models import MultiHead

PRECISIONS = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
TOO_SLOW = {("resnet18", "float16")}
"""What takes a CPU too long."""


@dataclass(frozen=True)
class Options:
    """Compare flat gradients under autocast with those of float64, and write the result as JSON."""

    models: tuple[str, ...] = ("lenet", "resnet18")
    """Names of the harness's models."""
    radii: tuple[float, ...] = (0.5, 0.05, 0.005)
    """Radii of SAM."""
    batch: int = 64
    """Batch size."""
    seeds: int = 3
    """Numbers of models and batches."""
    out: Path = Path(__file__).parent / "results" / "precision.json"
    """The file to write."""


def flat_gradients(
    model: MultiHead, x: Tensor, y: dict[str, Tensor], rho: float, dtype: torch.dtype | None
) -> tuple[Tensor, StepResult]:
    """Return the flat gradients of one step under autocast to ``dtype``, one in each row, and the step's result."""
    seen: list[Tensor] = []

    def closure(tasks: Sequence[str]) -> dict[str, Tensor]:
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            outputs = model(x, tasks)
        return {
            task: F.cross_entropy(out.to(torch.promote_types(out.dtype, torch.float32)), y[task])
            for task, out in outputs.items()
        }

    heads = {task: head.parameters() for task, head in model.heads.items()}
    parameters = TaskParameters(model.encoder.parameters(), heads, model=model)
    scaler = GradScaler("cpu", init_scale=2.0**12, enabled=dtype == torch.float16)
    result = FlatMTL(_recorder(seen), SAM(rho)).backward(closure, parameters, scaler=scaler)
    model.zero_grad()
    return seen[-1].double(), result


def _recorder(seen: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return an aggregator that keeps a copy of what it aggregates: the loss gradients, then the flat ones."""

    def aggregate(J: Tensor) -> Tensor:
        seen.append(J.clone())
        return J.mean(dim=0)

    return aggregate


def record(name: str, seed: int, options: Options) -> list[dict[str, Any]]:
    """Return what every precision and radius comes to for one model and batch."""
    torch.manual_seed(seed)
    dataset = data.build("multimnist", "train", seed=seed)
    inputs, targets = zip(*(dataset[i] for i in range(options.batch)), strict=True)
    x, y = torch.stack(inputs), {task: torch.tensor([int(t[task]) for t in targets]) for task in targets[0]}
    model = models.build(name, dict.fromkeys(y, 10))
    found: list[dict[str, Any]] = []
    for rho in options.radii:
        exact, _ = flat_gradients(copy.deepcopy(model).double(), x.double(), y, rho, None)
        for precision, dtype in PRECISIONS.items():
            if (name, precision) in TOO_SLOW:
                continue
            rows, result = flat_gradients(copy.deepcopy(model), x, y, rho, dtype)
            assert result.signal_to_noise is not None
            found.append(
                {
                    "model": name,
                    "seed": seed,
                    "rho": rho,
                    "precision": precision,
                    "cosine": F.cosine_similarity(rows, exact, dim=1).tolist(),
                    "signal_to_noise": result.signal_to_noise.tolist(),
                }
            )
    return found


def main(options: Options) -> None:
    """Measure and write the result."""
    records = [r for name in options.models for seed in range(options.seeds) for r in record(name, seed, options)]
    result = {"batch": options.batch, "records": records, "environment": environment()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options))
