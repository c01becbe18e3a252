"""Robustness: what is left of a model's accuracy when its weights are perturbed at random."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from flatmtl_bench.analysis.directions import Measure, filter_normalised, move, norm, on_sphere, random_direction
from flatmtl_bench.analysis.untouched import untouched
from flatmtl_bench.choices import one_of, whole_number

Scale = Literal["absolute", "relative", "filter"]


def robustness(
    model: nn.Module,
    measure: Measure,
    radii: Sequence[float],
    *,
    draws: int = 10,
    scale: Scale = "absolute",
    seed: int = 0,
) -> dict[float, list[dict[str, float]]]:
    r"""Return a model's numbers at :math:`\theta + \epsilon`, with random :math:`\epsilon` of each radius.

    The directions are Gaussian over all parameters. Draw k goes along one ray, the same for all radii and for all
    models of one architecture. The model is in eval mode, its buffers are fixed, and it is left as it was.

    Args:
        model: whose weights are perturbed.
        measure: returns numbers by name of the model as it stands, e.g. the accuracy of each task.
        radii: none negative; at 0 is the model itself.
        draws: directions.
        scale: what a radius r is.

            - ``absolute``: the norm of the perturbation, uniform on that sphere, as in Phan et al. (2025). The same r
              is more for a net with small weights than for one with large ones.
            - ``relative``: its norm as a share of the norm of all weights.
            - ``filter``: each filter is changed by r times its norm, biases and norm weights rest, see
              :func:`~.directions.filter_normalised`.
        seed: of the directions.

    Returns:
        Radius -> the numbers of each draw.

    Raises:
        ValueError: a radius is negative or not finite, there is none, or another option is wrong.

    References:
        - Phan et al. (2025), *Beyond losses reweighting: empowering multi-task learning via the generalization
          perspective*, ICCV: figure 10.
        - Li et al. (2018), *Visualizing the loss landscape of neural nets*, NeurIPS.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> _ = [nn.init.zeros_(parameter) for parameter in model.parameters()]
        >>> def measure():
        ...     return {"norm": round(norm(list(model.parameters())), 4)}
        >>> robustness(model, measure, [0.0, 50.0], draws=2)
        {0.0: [{'norm': 0.0}, {'norm': 0.0}], 50.0: [{'norm': 50.0}, {'norm': 50.0}]}
    """
    one_of("scale", scale, get_args(Scale))
    whole_number("draws", draws, 1)
    whole_number("seed", seed, 0)
    if not len(radii) or not all(radius >= 0 and math.isfinite(radius) for radius in radii):
        raise ValueError(f"got the radii {list(radii)}; expected finite numbers of at least 0, e.g. [0.0, 50.0].")
    generator, parameters = torch.Generator().manual_seed(seed), list(model.parameters())
    start = [parameter.detach().clone() for parameter in parameters]
    found: dict[float, list[dict[str, float]]] = {radius: [] for radius in radii}
    with untouched(model):
        for _ in range(draws):
            unit = _of_radius_one(random_direction(parameters, generator), start, scale)
            for radius, numbers in found.items():
                move(parameters, start, (radius, unit))
                numbers.append(dict(measure()))
    return found


def _of_radius_one(direction: Sequence[Tensor], weights: Sequence[Tensor], scale: Scale) -> list[Tensor]:
    """Return a direction with the length of radius 1."""
    if scale == "filter":
        return filter_normalised(direction, weights)
    return on_sphere(direction, 1.0 if scale == "absolute" else norm(weights))
