"""Small models with a batch, for tests of the step."""

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flatmtl import TaskParameters, split_parameters
from flatmtl.aggregators import AGGREGATORS, Aggregator, build

TASKS = ("left", "right", "third")


class Toy(nn.Module):
    """A trunk with three heads, and a batch; ``closure`` is what a user would write."""

    def __init__(self, trunk: nn.Module | None = None, head: type[nn.Module] = nn.Linear, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.trunk = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh()) if trunk is None else trunk
        self.heads = nn.ModuleDict({task: head(5, 2) for task in TASKS})
        self.double()
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
        self.x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
        self.y = {t: torch.randn(8, 2, generator=generator, dtype=torch.float64) for t in TASKS}
        self.asked: list[list[str]] = []

    def closure(self, tasks: Sequence[str], rows: slice = slice(None)) -> dict[str, Tensor]:
        self.asked.append(list(tasks))
        z = self.trunk(self.x[rows].to(self.dtype))
        return {t: (self.heads[t](z) - self.y[t][rows].to(self.dtype)).square().mean() for t in tasks}

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def split(self, tasks: Sequence[str] = TASKS) -> TaskParameters:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "no loss reaches 'heads")  # those of tasks that are not asked for
            return split_parameters(self, self.closure, tasks)

    def gradients(self) -> dict[str, Tensor | None]:
        return {n: None if p.grad is None else p.grad.clone() for n, p in self.named_parameters()}

    def contents(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.state_dict().items()}


def spoilt(toy: Toy, task: str, value: float, *, calls: tuple[int, ...] = (1,), gradient: bool = False):
    """A closure whose loss (or only its gradient) of one task is not finite in the calls numbered."""
    count = [0]

    def closure(tasks):
        count[0] += 1
        losses = toy.closure(tasks)
        if task in losses and count[0] in calls:
            loss = losses[task]
            losses[task] = loss + (SpoilGradient.apply(loss) if gradient else loss * value)
        return losses

    return closure


class SpoilGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, g):
        return g * math.inf


def two_of(tasks):
    return [t for t in tasks if t != "right"]


def assert_same(actual, expected) -> None:
    """Equal bit for bit."""
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=0.0, equal_nan=True)


def aggregator(name: str, tasks: int = len(TASKS)) -> Aggregator:
    """Make any aggregator of the table for so many tasks."""
    options = {"fixed": {"weights": [1.0 + i / tasks for i in range(tasks)]}}
    options |= {weighting: {"tasks": tasks} for weighting in ("uw", "imtl_l", "famo")}
    made = build(name, **options.get(name, {}))
    made.start_epoch(1)
    return made


EVERY = list(AGGREGATORS)
