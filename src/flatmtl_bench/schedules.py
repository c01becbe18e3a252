"""How the learning rate changes from step to step, by the schedules of PyTorch."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR, StepLR

from flatmtl_bench.recipes.config import Schedule


def build(schedule: Schedule, optimizer: Optimizer, *, steps: int, epochs: int) -> LRScheduler:
    """Return the schedule of an optimizer, to be stepped after each of its steps.

    The warm-up goes in equal parts from ``lr / (warmup_steps + 1)`` to ``lr``; what is chosen by name begins after it.

    Args:
        schedule: what the config says.
        optimizer: its learning rates are the full ones.
        steps: number of steps in an epoch.
        epochs: number of epochs.

    Raises:
        ValueError: if the warm-up is as long as the run.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> plan = build(Schedule("linear", warmup_steps=1), optimizer, steps=5, epochs=1)
        >>> for _ in range(5):
        ...     print(plan.get_last_lr())
        ...     optimizer.step()
        ...     plan.step()
        [0.5]
        [1.0]
        [0.75]
        [0.5]
        [0.25]
    """
    warmup, total = schedule.warmup_steps, steps * epochs
    if warmup >= total:
        raise ValueError(
            f"the warm-up takes {warmup} steps, and the whole run has {total} ({epochs} epochs of {steps}). "
            "Give fewer --schedule.warmup-steps."
        )
    if not warmup:
        return _main(schedule, optimizer, steps, total)
    rise = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    return SequentialLR(optimizer, [rise, _main(schedule, optimizer, steps, total - warmup)], [warmup])


def _main(schedule: Schedule, optimizer: Optimizer, steps: int, total: int) -> LRScheduler:
    match schedule.name:
        case "cosine":
            return CosineAnnealingLR(optimizer, T_max=total)
        case "linear":
            return LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=total)
        case "step":
            return StepLR(optimizer, step_size=schedule.every * steps, gamma=schedule.factor)
        case "constant":
            return ConstantLR(optimizer, factor=1.0)
