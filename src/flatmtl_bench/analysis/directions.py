"""Random directions in the space of a model's weights, and steps along them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

Direction = Sequence[Tensor]
"""For each parameter of a model a tensor of its shape, type and device."""
Measure = Callable[[], Mapping[str, float]]
"""Returns numbers by name, such as the loss of each task, of a model with the weights that it has when called."""


def random_direction(parameters: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Return independent standard normal numbers for all parameters.

    They are drawn in float64 on the CPU, so that models of one architecture get the same ones, whatever their
    precision and device.

    Raises:
        ValueError: there is no parameter, or one that does not consist of real numbers.

    Example:
        >>> (direction,) = random_direction([torch.zeros(2, 3)], torch.Generator().manual_seed(0))
        >>> direction.shape
        torch.Size([2, 3])
    """
    kinds = {parameter.dtype for parameter in parameters}
    if not kinds or not all(kind.is_floating_point for kind in kinds):
        raise ValueError(
            f"a direction needs parameters of real numbers, got {len(parameters)} of {sorted(map(str, kinds))}."
        )
    drawn = (torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters)
    return [numbers.to(p.dtype).to(p.device) for numbers, p in zip(drawn, parameters, strict=True)]


def filter_normalised(direction: Direction, parameters: Direction) -> list[Tensor]:
    """Return a direction whose filters have the norms of the model's filters; biases and norm weights rest.

    A filter is a slice of the first dimension of a tensor with two or more: what makes one channel of a convolution,
    one row of a linear layer. So a step of length 1 changes each filter by its own norm, and two nets that differ in
    the scale of their filters alone, as nets with BatchNorm can, have the same surface. Tensors of one dimension rest.

    References:
        - Li et al. (2018), *Visualizing the loss landscape of neural nets*, NeurIPS.

    Example:
        >>> weight, bias = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.ones(2)
        >>> filter_normalised([torch.ones(2, 2), torch.ones(2)], [weight, bias])[0].norm(dim=1)
        tensor([5.0000, 2.0000])
    """
    return [_filters(d, p) for d, p in zip(direction, parameters, strict=True)]


def _filters(direction: Tensor, parameter: Tensor) -> Tensor:
    if parameter.ndim < 2:
        return torch.zeros_like(direction)
    within = tuple(range(1, parameter.ndim))
    norms = [torch.linalg.vector_norm(x, dim=within, keepdim=True) for x in (parameter.detach(), direction)]
    return direction * torch.where(norms[1] > 0, norms[0] / norms[1], 0.0)


def on_sphere(direction: Direction, radius: float) -> list[Tensor]:
    """Return a direction that as a whole, over all parameters, has the norm ``radius``.

    Example:
        >>> on_sphere([torch.tensor([3.0]), torch.tensor([4.0])], 10.0)
        [tensor([6.]), tensor([8.])]
    """
    return [part * (radius / norm(direction)) for part in direction]


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all entries of some tensors together, summed in float64.

    Example:
        >>> norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
        5.0
    """
    return math.hypot(*(float(torch.linalg.vector_norm(t.detach(), dtype=torch.float64)) for t in tensors))


@torch.no_grad()
def move(parameters: Sequence[Tensor], start: Direction, *steps: tuple[float, Direction]) -> None:
    """Set parameters to ``start`` plus steps, each a length along a direction; steps of length 0 leave it exactly.

    Example:
        >>> weight = torch.zeros(2)
        >>> move([weight], [torch.ones(2)], (2.0, [torch.tensor([1.0, -1.0])]))
        >>> weight
        tensor([ 3., -1.])
    """
    for k, parameter in enumerate(parameters):
        parameter.copy_(start[k])
        for length, direction in steps:
            parameter.add_(direction[k], alpha=length)
