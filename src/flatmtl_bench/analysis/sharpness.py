"""Sharpness: how far a task's loss rises in the worst direction within a radius."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from flatmtl import SAM, TaskParameters
from flatmtl_bench.analysis.batches import Closure
from flatmtl_bench.analysis.directions import norm
from flatmtl_bench.analysis.gradients import task_gradients
from flatmtl_bench.analysis.untouched import untouched


def sharpness(
    model: nn.Module,
    closures: Sequence[Closure],
    parameters: TaskParameters,
    rho: float,
    *,
    rho_heads: float | None = None,
    steps: int = 1,
    process_group: Any = None,
) -> dict[str, float]:
    r"""Return :math:`\max_{1 \le j \le k} L_i(\theta + \epsilon_i^j) - L_i(\theta)` of every task, in eval mode.

    The points :math:`\epsilon_i^1, \dots, \epsilon_i^k` are the task's own path of ``k`` steps of projected gradient
    ascent in two balls, one of the shared parameters and one of its head. The first goes along the
    gradient to the rim of both, as in training with :class:`~flatmtl.SAM`: with one step this is the sharpness that
    the paper reports. Each further one goes as far along the gradient where the path stands, in each ball apart, and
    then back into the ball; its length is halved from there on whenever the loss has fallen.

    The most that the loss rises within the balls is never less, and may be more: ascent can end in a lower peak. More
    steps never find less, since the largest rise on the path counts, that of the first step included; it is negative
    where a step overshoots, as one over a narrow peak does. On convex losses no step lowers the loss, and the length
    stays.

    Losses and gradients are means over the closures, each on a part of the data; parts of one size make them means
    over the data. A task of which no closure has labels has NaN. The model is left as it was.

    Cost: ``steps + 1`` passes over the closures for each task, and four copies of the weights; with one step as
    :func:`~flatmtl_bench.analysis.gradients.task_gradients`.

    Args:
        model: whose losses the closures return.
        closures: on parts of the data.
        parameters: who owns which parameter.
        rho: radius in the shared parameters; above 0.
        rho_heads: radius in the heads, not negative; None: the same.
        steps: of ascent; at least 1.
        process_group: the processes over whose closures the means are, with one step; None: this one alone.

    Raises:
        ValueError: for a radius of 0, less than one step, several of several processes, or no loss at all.
        FloatingPointError: naming a task whose loss or gradient is not finite.

    References:
        - Foret, Kleiner, Mobahi and Neyshabur (2021), *Sharpness-aware minimization for efficiently improving
          generalization*, ICLR.
        - Madry, Makelov, Schmidt, Tsipras and Vladu (2018), *Towards deep learning models resistant to adversarial
          attacks*, ICLR: projected gradient ascent, there of inputs.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> curvature = torch.tensor([1.0, 2.0])
        >>> def closure(tasks):
        ...     return {task: (curvature * model.weight**2).sum() / 2 for task in tasks}
        >>> parameters = TaskParameters([model.weight], {"bowl": []})
        >>> [round(sharpness(model, [closure], parameters, 1.0, steps=k)["bowl"], 3) for k in (1, 2, 20)]
        [3.136, 3.152, 3.164]
    """
    perturbation = SAM(rho, rho_heads=rho_heads)
    if perturbation.rho == 0.0 or steps < 1:
        raise ValueError(f"got rho={rho} and steps={steps}; expected a radius above 0 and at least one step of ascent.")
    if steps > 1 and process_group is not None:
        raise ValueError(f"{steps} steps are of one process. Give no process_group, or one step.")
    if steps == 1:
        result = task_gradients(model, closures, parameters, perturbation, process_group=process_group)
        rises = [] if result.sharpness is None else result.sharpness.tolist()
    else:
        with untouched(model), torch.enable_grad():
            rises = [_Ascent(closures, parameters, task, perturbation).rise(steps) for task in parameters.tasks]
    if all(map(math.isnan, rises)):
        raise ValueError(f"no closure has a loss of any task: {', '.join(parameters.tasks)}. Give data with labels.")
    return dict(zip(parameters.tasks, rises, strict=True))


class _Ascent:
    """Projected gradient ascent of one task's loss, on the weights themselves."""

    def __init__(self, closures: Sequence[Closure], parameters: TaskParameters, task: str, radii: SAM) -> None:
        self._closures = closures
        self._task = task
        self._length = 1.0  # in radii
        self._balls = [(list(parameters.shared), radii.rho), (list(parameters.heads[task]), radii.rho_heads)]
        self._centre = {weight: weight.detach().clone() for ball, _ in self._balls for weight in ball}
        self._losses: list[float] = []

    def rise(self, steps: int) -> float:
        """Return the largest rise of the loss after any of the steps, and put the weights back."""
        for _ in range(steps):
            self._step()
        with torch.no_grad():
            self._losses.append(self._loss())
            for weight, value in self._centre.items():
                weight.copy_(value)
        return max(self._losses[1:]) - self._losses[0]

    def _step(self) -> None:
        """Note the loss where the path stands, and go along its gradient, half as far from now on if it has fallen."""
        gradients: dict[Parameter, Tensor] = {}
        loss = self._loss(gradients)
        if self._losses and loss < self._losses[-1]:
            self._length /= 2.0
        self._losses.append(loss)
        for ball, radius in self._balls:
            self._move(ball, radius, gradients)

    def _loss(self, gradients: dict[Parameter, Tensor] | None = None) -> float:
        """Return the mean over the closures that have labels of the task, and add up their gradients.

        Raises:
            FloatingPointError: it is not finite, as it is too where a gradient has not been.
        """
        losses: list[float] = []
        for closure in self._closures:
            loss = closure([self._task])[self._task]
            if loss is not None:
                losses.append(float(loss.detach()))
                self._add_gradients(gradients, loss)
        mean = math.fsum(losses) / len(losses) if losses else math.nan
        if losses and not math.isfinite(mean):
            raise FloatingPointError(
                f"the loss of task {self._task!r} is {mean:g} after {len(self._losses)} steps of ascent with radius "
                f"{self._balls[0][1]:g}; expected a finite number. Choose a smaller radius, or look at the weights."
            )
        return mean

    def _add_gradients(self, gradients: dict[Parameter, Tensor] | None, loss: Tensor) -> None:
        if gradients is None:
            return
        found = torch.autograd.grad(loss, list(self._centre), allow_unused=True)
        for weight, gradient in zip(self._centre, found, strict=True):
            if gradient is not None:
                gradients[weight] = gradients[weight] + gradient if weight in gradients else gradient

    @torch.no_grad()
    def _move(self, ball: Sequence[Parameter], radius: float, gradients: dict[Parameter, Tensor]) -> None:
        """Go along the gradient, then back into the ball around the centre if that was out of it."""
        reached = [weight for weight in ball if weight in gradients]
        size = norm(gradients[weight] for weight in reached)
        if size == 0.0 or radius == 0.0:
            return
        for weight in reached:
            weight.add_(gradients[weight], alpha=self._length * radius / size)
        outside = norm(weight - self._centre[weight] for weight in ball) / radius
        if outside > 1.0:
            for weight in ball:
                weight.copy_(torch.lerp(self._centre[weight], weight, 1.0 / outside))
