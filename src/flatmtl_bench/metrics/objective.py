"""What the output of one task is trained by and judged by."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torchmetrics import MeanMetric

from flatmtl_bench.recipes.config import Averaging

Better = Literal["higher", "lower"]


class Objective(ABC):
    """What the output of one task is trained by and judged by.

    A task is one kind of answer to a picture: a class, a label for each pixel, a depth. Its objective knows how many
    numbers the head has to give, the loss, and the metrics of the result tables.

    Attributes:
        better: the metrics of a result table, and which direction is good; they count in Delta m.
    """

    better: ClassVar[Mapping[str, Better]]

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Channels of the task's head."""

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor | None:
        """Return the mean loss of a batch, in float32 or better; None if no label of it is valid."""

    @abstractmethod
    def metrics(self, averaging: Averaging) -> Any:
        """Return a torchmetrics metric of the outputs and targets of many batches, which computes a dict of scalars."""

    @abstractmethod
    def score(self, values: Mapping[str, float]) -> float:
        """Return one number for the metrics, higher is better: what epochs and settings are chosen by."""


def full_precision(output: Tensor) -> Tensor:
    """Return the output in float32, or in its own precision if that is better."""
    return output.to(torch.promote_types(output.dtype, torch.float32))


class MeanLoss(MeanMetric):
    """The mean of an objective's loss, in which each item of a batch counts the same.

    Batches without a valid label take no part; the mean over none is NaN, and so is that of losses of which one is.

    Example:
        >>> from flatmtl_bench.metrics import Classification
        >>> loss = MeanLoss(Classification(("no", "yes")))
        >>> loss.update(torch.zeros(4, 2), torch.tensor([0, 1, 1, 0]))
        >>> round(float(loss.compute()), 4)
        0.6931
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__(nan_strategy=math.nan)  # torchmetrics would leave NaN out of the mean
        self._objective = objective

    def update(self, output: Tensor, target: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take in one batch."""
        loss = self._objective.loss(output, target)
        if loss is not None:
            super().update(loss, weight=len(target))


class Meter:
    """What the outputs of one task come to over many batches: mean loss, metrics and score.

    Args:
        objective: of the task.
        averaging: see `Averaging`.

    Example:
        >>> from flatmtl_bench.metrics import Classification
        >>> meter = Meter(Classification(("no", "yes")), "pooled")
        >>> meter.update(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        >>> {name: round(value, 4) for name, value in meter.compute().items()}
        {'loss': 0.41, 'accuracy': 0.5, 'score': 0.5}
    """

    def __init__(self, objective: Objective, averaging: Averaging) -> None:
        self._objective = objective
        self._loss, self._metrics = MeanLoss(objective), objective.metrics(averaging)

    def update(self, output: Tensor, target: Tensor) -> None:
        """Take in one batch of outputs, on their device."""
        for part in (self._loss, self._metrics):
            part.to(output.device).update(output, target)

    def compute(self) -> dict[str, float]:
        """Return the values over all batches so far, of all ranks.

        Where the loss of valid labels is NaN the model has said nothing, which some metrics would take for an answer:
        all of them are NaN then, too.
        """
        loss = float(self._loss.compute())
        values = {name: float(value) for name, value in self._metrics.compute().items()}
        if math.isnan(loss) and values.get("valid") != 0.0:
            values = dict.fromkeys(values, math.nan)
        return {"loss": loss, **values, "score": self._objective.score(values)}


class Meters:
    """What a model comes to over many batches: of each task what its `Meter` says, and the means of what all have.

    Args:
        objectives: of the tasks.
        averaging: see `Averaging`.
    """

    def __init__(self, objectives: Mapping[str, Objective], averaging: Averaging) -> None:
        self._objectives = objectives
        self._meters = {task: Meter(objective, averaging) for task, objective in objectives.items()}

    def update(self, outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        """Take in one batch."""
        for task, meter in self._meters.items():
            meter.update(outputs[task], targets[task])

    def compute(self) -> dict[str, float]:
        """Return values such as ``loss``, ``accuracy`` and ``score``, and of each task ``loss/<task>`` and so on."""
        values = {task: meter.compute() for task, meter in self._meters.items()}
        first = next(iter(self._objectives.values()))
        common = [n for n in ("loss", *first.better, "score") if all(n in v for v in values.values())]
        means = {name: sum(v[name] for v in values.values()) / len(values) for name in common}
        return {**means, **{f"{name}/{task}": value for task, v in values.items() for name, value in v.items()}}
