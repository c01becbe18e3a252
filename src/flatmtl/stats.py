"""What a step tells: losses, conflict, sharpness and weights, from what the step has computed anyway."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
        inter: inner products of the direction of the loss gradients, before the flat gradients come to it, and each
            task's flat gradient, ``(m,)``, where both are aggregated apart; negative where a step down the losses
            makes the task sharper.
        sample: some entries of each task's loss gradient, ``(m, k)``, as they came from autograd.
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
    inter: Tensor | None = None
    sample: Tensor | None = None
    dropped: tuple[str, ...] = ()
    skipped: bool = False

    @property
    def empty(self) -> bool:
        """Whether no task had labels: there is no gradient then that a scaler could unscale."""
        return self.skipped and not self.dropped and bool(self.losses.isnan().all())

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
    def cosines_flat(self) -> Tensor | None:
        """Cosines between the flat gradients, ``(m, m)``; NaN for a zero gradient."""
        return None if self.gramian_flat is None else as_cosines(self.gramian_flat)

    @property
    def conflict(self) -> Tensor | None:
        """Share of the pairs of present tasks whose loss gradients have a negative inner product; NaN for no pair."""
        return None if self.gramian_loss is None else conflict_share(self.gramian_loss)

    @property
    def conflict_flat(self) -> Tensor | None:
        """Share of the pairs of present tasks whose flat gradients have a negative inner product; NaN for no pair."""
        return None if self.gramian_flat is None else conflict_share(self.gramian_flat)

    @property
    def cosine(self) -> Tensor | None:
        """Mean cosine over the pairs of loss gradients; NaN if there is none."""
        return None if self.gramian_loss is None else _mean_of_pairs(as_cosines(self.gramian_loss))

    @property
    def cosine_flat(self) -> Tensor | None:
        """Mean cosine over the pairs of flat gradients; NaN if there is none."""
        return None if self.gramian_flat is None else _mean_of_pairs(as_cosines(self.gramian_flat))

    @property
    def flat_to_loss(self) -> Tensor | None:
        """Norm of each flat gradient over that of the loss gradient, ``(m,)``."""
        if self.norms is None or self.norms_flat is None:
            return None
        return self.norms_flat / self.norms

    @property
    def intra_conflict(self) -> Tensor | None:
        """1 for each task whose loss gradient and flat gradient have a negative inner product, else 0, ``(m,)``."""
        return None if self.intra is None else _negative(self.intra)

    @property
    def inter_conflict(self) -> Tensor | None:
        """1 for each task whose flat gradient points against the direction of the loss gradients, else 0, ``(m,)``."""
        return None if self.inter is None else _negative(self.inter)

    @property
    def roundoff(self) -> Tensor | None:
        """Relative rounding error of the entries of each task's loss gradient, ``(m,)``.

        As seen in a sample of them: 6e-8 for float32, 5e-4 where they were computed in float16, as under autocast, 4e-3
        for bfloat16; 1e-16 for float64.
        """
        return None if self.sample is None else _roundoff(self.sample)

    @property
    def signal_to_noise(self) -> Tensor | None:
        r"""Length of each flat gradient over the length of the rounding error in it, ``(m,)``.

        The flat gradient is a difference of two gradients whose entries are rounded: with their :attr:`roundoff`
        :math:`u` a single rounding errs by about :math:`u \sqrt{|g_i|^2 + |g^{SAM}_i|^2}`, and a deep network rounds
        many times. So the number compares radii and precisions of one model: with some tens in bfloat16 little may be
        left of the flat gradient. Take a larger radius or more precision then.
        """
        if self.gramian_loss is None or self.gramian_flat is None or self.intra is None or self.sample is None:
            return None
        squares = self.gramian_loss.diagonal()
        flat = self.gramian_flat.diagonal()
        error = _roundoff(self.sample).to(flat) * (2.0 * squares + 2.0 * self.intra + flat).clamp(min=0.0).sqrt()
        return flat.sqrt() / error

    def statistics(self) -> dict[str, Tensor]:
        """Return every statistic that the step has: vectors ``(m,)`` with an entry for each task, and scalars."""
        return dict(self._statistics)

    @cached_property
    def _statistics(self) -> dict[str, Tensor]:
        """They are derived once, however many monitors ask."""
        found = {
            "loss": self.losses,
            "perturbed_loss": self.perturbed_losses,
            "sharpness": self.sharpness,
            "norm": self.norms,
            "norm_flat": self.norms_flat,
            "flat_to_loss": self.flat_to_loss,
            "intra": self.intra,
            "intra_conflict": self.intra_conflict,
            "inter": self.inter,
            "inter_conflict": self.inter_conflict,
            "signal_to_noise": self.signal_to_noise,
            "weight_loss": self.weights_loss,
            "weight_flat": self.weights_flat,
            "conflict": self.conflict,
            "conflict_flat": self.conflict_flat,
            "cosine": self.cosine,
            "cosine_flat": self.cosine_flat,
        }
        return {name: value for name, value in found.items() if value is not None}

    def scalars(self) -> dict[str, Tensor]:
        """Return every statistic as a scalar tensor under a name such as ``"loss/left"``, ready for a logger."""
        return _named(self.statistics(), self.tasks)

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
        >>> monitor.log(print, prefix="train/")
        {'train/loss/a': 2.0, 'train/loss/b': 5.0, 'train/steps': 2.0, 'train/skipped': 0.0, 'train/dropped': 0.0}
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        self._sums: dict[tuple[str, tuple[str, ...]], Tensor] = {}
        self._counts: dict[tuple[str, tuple[str, ...]], Tensor] = {}
        self._events = {"steps": 0, "skipped": 0, "dropped": 0}

    def update(self, result: StepResult) -> None:
        """Take in one step."""
        self._events["steps"] += 1
        self._events["skipped"] += result.skipped
        self._events["dropped"] += len(result.dropped)
        for name, value in result.statistics().items():
            self._add((name, result.tasks if value.ndim else ()), value)

    def compute(self) -> dict[str, float]:
        """Return the means so far, and the numbers of steps, of skipped steps and of tasks dropped."""
        sums, counts = self._by_name(self._sums), self._by_name(self._counts)
        means = {name: float(total / counts[name]) for name, total in sums.items()}
        return {**means, **{name: float(count) for name, count in self._events.items()}}

    def log(self, log_dict: Callable[[dict[str, float]], Any], *, prefix: str = "") -> None:
        """Give what :meth:`compute` returns to a logger, with a prefix before each name.

        Args:
            log_dict: the method of a logger that takes a dictionary, such as ``LightningModule.log_dict``,
                ``Fabric.log_dict`` or ``Accelerator.log``.
            prefix: such as ``"train/"``.
        """
        log_dict({f"{prefix}{name}": value for name, value in self.compute().items()})

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the sums so far, to go on with in the middle of an epoch."""
        sums, counts = ({key: value.clone() for key, value in some.items()} for some in (self._sums, self._counts))
        return {"sums": sums, "counts": counts, "events": dict(self._events)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned.

        Raises:
            ValueError: if it is the state of something else.
        """
        if set(state) != {"sums", "counts", "events"}:
            raise ValueError(f"the state has {sorted(state)}; expected what Monitor.state_dict() returns.")
        sums, counts = ({key: value.clone() for key, value in state[name].items()} for name in ("sums", "counts"))
        self._sums, self._counts, self._events = sums, counts, dict(state["events"])

    def _by_name(self, values: Mapping[tuple[str, tuple[str, ...]], Tensor]) -> dict[str, Tensor]:
        """Return values under names such as ``"loss/left"``, summed over steps with other tasks beside these."""
        found: dict[str, Tensor] = {}
        for (name, tasks), value in values.items():
            for key, entry in _named({name: value}, tasks).items():
                found[key] = found[key] + entry if key in found else entry
        return found

    def _add(self, key: tuple[str, tuple[str, ...]], value: Tensor) -> None:
        known = torch.isfinite(value)
        value = torch.where(known, value.double(), 0.0)
        if key in self._sums:
            self._sums[key] += value
            self._counts[key] += known
        else:
            self._sums[key] = value
            self._counts[key] = known.double()


def _named(statistics: Mapping[str, Tensor], tasks: tuple[str, ...]) -> dict[str, Tensor]:
    """Return vectors entry by entry under names such as ``"loss/left"``, and scalars as they are."""
    found: dict[str, Tensor] = {}
    for name, value in statistics.items():
        found |= {f"{name}/{t}": value[i] for i, t in enumerate(tasks)} if value.ndim else {name: value}
    return found


def _mean_of_pairs(matrix: Tensor) -> Tensor:
    """Return the mean over the pairs of a symmetric matrix that are known; NaN if there is none."""
    upper = torch.ones_like(matrix, dtype=torch.bool).triu(1)
    return matrix[upper].nanmean()


def _negative(values: Tensor) -> Tensor:
    """Return 1 for negative values, 0 for others, NaN for NaN."""
    return torch.where(values.isnan(), values, (values < 0.0).to(values))


def _roundoff(sample: Tensor) -> Tensor:
    """Return the unit roundoff of the precision that most entries of each row have; NaN for a row of NaN."""
    if sample.dtype == torch.float64:
        return torch.where(sample[:, 0].isnan(), torch.nan, 2.0**-53)
    bits, nonzero = sample.view(torch.int32), sample != 0.0
    half = nonzero.sum(dim=1) / 2.0

    def mostly_end_in(zeros: int) -> Tensor:
        return ((bits & ((1 << zeros) - 1) == 0) & nonzero).sum(dim=1) > half

    u = torch.where(mostly_end_in(13), 2.0**-11, 2.0**-24)
    u = torch.where(mostly_end_in(16), 2.0**-8, u)
    return torch.where(sample[:, 0].isnan(), torch.nan, u)
