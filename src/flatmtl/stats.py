"""What a step tells: losses, conflict, sharpness and weights, from what the step has computed anyway."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flatmtl._linalg import as_cosines, conflict_share


@dataclass(frozen=True, repr=False, eq=False)
class StepResult:
    """By-products of one step: small float64 tensors on the CPU.

    Vectors have one entry for each task and matrices one row and column, in the order of ``tasks``; entries of
    tasks that took no part are NaN. ``None`` stands for what the step or the aggregator does not have.

    Attributes:
        tasks: names of all tasks.
        losses: clean losses, ``(m,)``.
        perturbed_losses: losses at each task's perturbed weights, ``(m,)``; ``None`` after a plain step.
        weights_loss: weights of the loss gradients, ``(m,)``, of an aggregator that has weights. With
            ``combine="direct"`` and ``"each"`` those of the one aggregation over tasks that there is.
        weights_flat: weights of the flat gradients, ``(m,)``, where these are aggregated apart.
        gramian_loss: inner products of the loss gradients, ``(m, m)``.
        gramian_flat: inner products of the flat gradients, ``(m, m)``, where these are aggregated apart.
        intra: inner products of each task's loss gradient and flat gradient, ``(m,)``; negative where making
            a task flatter raises its loss.
        dropped: tasks left out since a loss or gradient was not finite.
        skipped: whether nothing was added to ``.grad`` but what makes a gradient scaler skip the step.
    """

    tasks: tuple[str, ...]
    losses: Tensor
    perturbed_losses: Tensor | None = None
    weights_loss: Tensor | None = None
    weights_flat: Tensor | None = None
    gramian_loss: Tensor | None = None
    gramian_flat: Tensor | None = None
    intra: Tensor | None = None
    dropped: tuple[str, ...] = ()
    skipped: bool = False

    @property
    def sharpness(self) -> Tensor | None:
        """Perturbed loss minus loss, ``(m,)``."""
        return None if self.perturbed_losses is None else self.perturbed_losses - self.losses

    @property
    def norms(self) -> Tensor | None:
        """Norms of the loss gradients on the shared parameters, ``(m,)``."""
        return None if self.gramian_loss is None else self.gramian_loss.diagonal().sqrt()

    @property
    def norms_flat(self) -> Tensor | None:
        """Norms of the flat gradients on the shared parameters, ``(m,)``."""
        return None if self.gramian_flat is None else self.gramian_flat.diagonal().sqrt()

    @property
    def cosines(self) -> Tensor | None:
        """Cosines between the loss gradients, ``(m, m)``; NaN for a zero gradient."""
        return None if self.gramian_loss is None else as_cosines(self.gramian_loss)

    @property
    def conflict(self) -> Tensor | None:
        """Share of the pairs of present tasks whose loss gradients have a negative inner product; NaN for no pair."""
        return None if self.gramian_loss is None else conflict_share(self.gramian_loss)

    def scalars(self) -> dict[str, Tensor]:
        """Return every statistic as a scalar tensor under a name such as ``"loss/left"``, ready for a logger."""
        vectors = {
            "loss": self.losses,
            "perturbed_loss": self.perturbed_losses,
            "sharpness": self.sharpness,
            "norm": self.norms,
            "norm_flat": self.norms_flat,
            "intra": self.intra,
            "weight_loss": self.weights_loss,
            "weight_flat": self.weights_flat,
        }
        found = {f"{k}/{t}": v[i] for k, v in vectors.items() if v is not None for i, t in enumerate(self.tasks)}
        return found if self.conflict is None else {**found, "conflict": self.conflict}

    def __repr__(self) -> str:
        losses = ", ".join(f"{t}={float(self.losses[i]):.4g}" for i, t in enumerate(self.tasks))
        state = f"; dropped: {', '.join(self.dropped)}" if self.dropped else ""
        return f"StepResult({losses}{state}{'; skipped' if self.skipped else ''})"


class Monitor:
    """Means of the statistics of many steps, without a transfer from the device at each of them.

    A statistic of a task is averaged over the steps in which the task took part.

    Example:
        >>> import torch
        >>> monitor = Monitor()
        >>> monitor.update(StepResult(("a", "b"), torch.tensor([1.0, float("nan")])))
        >>> monitor.update(StepResult(("a", "b"), torch.tensor([3.0, 5.0])))
        >>> monitor.compute()
        {'loss/a': 2.0, 'loss/b': 5.0, 'steps': 2.0, 'skipped': 0.0, 'dropped': 0.0}
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._events = {"steps": 0, "skipped": 0, "dropped": 0}

    def update(self, result: StepResult) -> None:
        """Take in one step."""
        self._events["steps"] += 1
        self._events["skipped"] += result.skipped
        self._events["dropped"] += len(result.dropped)
        self._add(result.scalars())

    def compute(self) -> dict[str, float]:
        """Return the means so far, and the numbers of steps, of skipped steps and of tasks dropped."""
        means = {name: float(self._sums[name] / self._counts[name]) for name in self._sums}
        return {**means, **{name: float(count) for name, count in self._events.items()}}

    def _add(self, scalars: Mapping[str, Tensor]) -> None:
        for name, value in scalars.items():
            known = torch.isfinite(value)
            zero = torch.zeros((), dtype=torch.float64, device=value.device)
            self._sums[name] = self._sums.get(name, zero) + torch.where(known, value.double(), 0.0)
            self._counts[name] = self._counts.get(name, zero) + known
