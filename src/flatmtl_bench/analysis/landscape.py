"""The loss surface around a model, on a plane through its weights."""

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor, nn

from flatmtl_bench.analysis.directions import Measure, filter_normalised, move, random_direction
from flatmtl_bench.analysis.untouched import untouched
from flatmtl_bench.choices import whole_number


def landscape(
    model: nn.Module,
    measure: Measure,
    positions: Sequence[float],
    *,
    seed: int = 0,
    reestimate: Callable[[], object] | None = None,
) -> dict[str, Tensor]:
    r"""Return what a model's numbers are at :math:`\theta + x d_1 + y d_2`, for all ``x`` and ``y`` of some positions.

    Both directions are Gaussian and filter-normalised, see :func:`~.directions.filter_normalised`. They come from the
    seed alone: models of one architecture are shown along the same draw, normalised to the filters of each. The model
    is in eval mode, all its parameters move, and it is left as it was.

    Args:
        model: whose weights are moved.
        measure: returns numbers by name of the model as it stands, e.g. the test loss of each task.
        positions: along both directions, k of them, in units of the norm of each filter; 0 is the model itself.
        seed: of the directions.
        reestimate: is called at each point before it is measured, e.g. ``lambda: update_bn(inputs, model)`` of
            ``torch.optim.swa_utils``, so that BatchNorm has the statistics of the moved weights. It finds torch's
            random stream at the same place at each point. None: buffers are those of the model.

    Returns:
        For each name its values ``(k, k)``, float64: entry ``[i, j]`` is that at ``x = positions[i]``,
        ``y = positions[j]``. What is not finite at a point is so here.

    Raises:
        ValueError: there is no position or parameter, or the names that ``measure`` returns are not always the same.

    References:
        - Li et al. (2018), *Visualizing the loss landscape of neural nets*, NeurIPS.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> def measure():
        ...     return {"loss": model.weight.square().sum().item()}
        >>> surface = landscape(model, measure, [-1.0, 0.0, 1.0])["loss"]
        >>> surface.shape, surface[1, 1].item() == measure()["loss"]
        (torch.Size([3, 3]), True)
    """
    whole_number("seed", seed, 0)
    if not len(positions) or not torch.tensor(list(positions)).isfinite().all():
        raise ValueError(f"got the positions {list(positions)}; expected finite numbers, e.g. [-1.0, 0.0, 1.0].")
    generator, parameters = torch.Generator().manual_seed(seed), list(model.parameters())
    first, second = (filter_normalised(random_direction(parameters, generator), parameters) for _ in range(2))
    start = [parameter.detach().clone() for parameter in parameters]
    found: list[dict[str, float]] = []
    with untouched(model):
        for x, y in product(positions, positions):
            move(parameters, start, (x, first), (y, second))
            if reestimate is not None:
                torch.manual_seed(seed)
                reestimate()
            found.append(dict(measure()))
    return _surfaces(found, len(positions))


def _surfaces(found: Sequence[dict[str, float]], size: int) -> dict[str, Tensor]:
    """Return the values of all points for each name."""
    names = list(found[0])
    if any(set(values) != set(names) for values in found):
        seen = sorted({name for values in found for name in values})
        raise ValueError(f"`measure` returned {seen} at some points and not at others; expected the same names always.")
    return {
        name: torch.tensor([values[name] for values in found], dtype=torch.float64).reshape(size, size)
        for name in names
    }
