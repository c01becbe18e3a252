"""Algorithm 1 of Phan et al. (2025), line by line, for models without randomness and buffers.

Plain on purpose: whole vectors, fresh tensors, one thing after another. The engine must equal it.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Aggregate = Callable[[Tensor], Tensor]


def flatten(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    parts = [torch.zeros_like(p) if t is None else t for t, p in zip(tensors, like, strict=True)]
    return torch.cat([part.reshape(-1) for part in parts]) if parts else torch.zeros(0, dtype=torch.float64)


def task_gradient(closure, task, shared, head) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of a task, and its gradient on the shared parameters and on its head."""
    loss = closure([task])[task]
    grads = torch.autograd.grad(loss, [*shared, *head], allow_unused=True)
    return loss.detach(), flatten(grads[: len(shared)], shared), flatten(grads[len(shared) :], head)


def scales(parameters: Sequence[Tensor], adaptive: bool, matrices_only: bool) -> Tensor:
    """Return T: 1, or |weights| for all parameters, or for those with two axes or more."""
    T = [p.detach().abs() if adaptive and (p.ndim > 1 or not matrices_only) else torch.ones_like(p) for p in parameters]
    return flatten(T, parameters)


def ascent(T: Tensor, g: Tensor, rho: float, norm: Tensor) -> Tensor:
    """Return rho T^2 g / norm."""
    return torch.zeros_like(g) if norm == 0 else rho * T**2 * g / norm


def step(
    closure: Callable[[Sequence[str]], Mapping[str, Tensor]],
    shared: Sequence[Tensor],
    heads: Mapping[str, Sequence[Tensor]],
    aggregate: Aggregate,
    *,
    rho_sh: float,
    rho_ns: float,
    adaptive: bool = False,
    matrices_only: bool = False,
    joint: bool = False,
    combine: str = "individual",
    local: float = 1.0,
    degree: float = 1.0,
) -> dict:
    """Return the update directions, for the shared parameters and for each head, and all quantities on the way.

    With a ``degree`` other than 1, that of ``aggregate``, the flat part is scaled by r^(1 - degree).
    """
    theta = flatten(shared, shared).detach()
    clean = {task: task_gradient(closure, task, shared, heads[task]) for task in heads}
    mean = torch.stack([g for _, g, _ in clean.values()]).mean(0)
    sam = {}
    for task, (_, g, h) in clean.items():
        own = flatten(heads[task], heads[task]).detach()
        T_sh, T_ns = (scales(p, adaptive, matrices_only) for p in (shared, heads[task]))
        along = local * g + (1 - local) * mean
        n_sh, n_ns = (T_sh * along).norm(), (T_ns * h).norm()
        if joint:
            n_sh = n_ns = torch.stack([n_sh, n_ns]).norm()
        write(shared, theta + ascent(T_sh, along, rho_sh, n_sh))
        write(heads[task], own + ascent(T_ns, h, rho_ns, n_ns))
        sam[task] = task_gradient(closure, task, shared, heads[task])
        write(shared, theta)
        write(heads[task], own)
    G_loss = torch.stack([clean[t][1] for t in heads])
    G_sam = torch.stack([sam[t][1] for t in heads])
    G_flat = G_sam - G_loss
    return {
        "direction": COMBINE[combine](aggregate, G_loss, G_flat, G_sam, damping(G_loss, G_flat, degree)),
        "heads": {t: sam[t][2] for t in heads},
        "losses": torch.stack([clean[t][0] for t in heads]),
        "perturbed_losses": torch.stack([sam[t][0] for t in heads]),
        "loss_gradients": G_loss,
        "flat_gradients": G_flat,
    }


def damping(G_loss: Tensor, G_flat: Tensor, degree: float) -> float:
    """Return r^(1 - degree), with r the geometric mean of |f_i| / |g_i| over the tasks where neither is zero."""
    ratios = [(f.norm() / g.norm()).item() for g, f in zip(G_loss, G_flat, strict=True) if g.norm() > 0 < f.norm()]
    return math.prod(ratios) ** ((1 - degree) / len(ratios)) if ratios else 0.0


COMBINE = {
    "individual": lambda A, g, f, sam, factor: A(g) + factor * A(f),
    "direct": lambda A, g, f, sam, factor: A(sam),
    "second": lambda A, g, f, sam, factor: A(torch.stack([A(g), A(f)])),
    "each": lambda A, g, f, sam, factor: A(torch.stack([A(torch.stack(pair)) for pair in zip(g, f, strict=True)])),
}


def write(parameters: Sequence[Tensor], vector: Tensor) -> None:
    with torch.no_grad():
        for p, part in zip(parameters, vector.split([p.numel() for p in parameters]), strict=True):
            p.copy_(part.view_as(p))
