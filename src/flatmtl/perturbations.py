"""Worst-case steps: where, within a radius, a task's loss rises most."""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flatmtl._linalg import norm as euclidean_norm
from flatmtl._options import check_known


class Part(NamedTuple):
    """Weights that are perturbed together, the trunk or one head, with the gradients to ascend along."""

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    rho: float


class SAM:
    r"""A step of length ``rho`` along the gradient, to the first-order worst case within a ball.

    With a task's gradients :math:`g` on the shared parameters and :math:`h` on its own head,

    .. math::
        \epsilon_{sh} = \rho \, g / \lVert g \rVert, \qquad \epsilon_{ns} = \rho_{heads} \, h / \lVert h \rVert,

    or, with ``norm="joint"``, both over :math:`\lVert [g, h] \rVert`. A zero gradient gives no step.
    The step does not depend on the scale of the loss.

    Args:
        rho: radius for the shared parameters; not negative.
        rho_heads: radius for each head; ``rho`` if ``None``.
        norm: ``"separate"`` norms for trunk and head (Algorithm 1), or one ``"joint"`` norm.
        local: the trunk is perturbed along ``local * g_i + (1 - local) * mean(g)``. 1 is the paper's, one
            perturbation for each task; 0 is one common to all tasks, which saves ``m - 1`` forward passes.
            ``None`` stands for 1 with gradient aggregators and for 0 with loss weightings, whose ``g_i`` are those
            of the weighted losses: there 0 is SAM on the weighted sum, and ``norm="joint"`` one norm over the trunk
            and all heads.
        scope: ``"global"`` perturbs by gradients averaged over ranks, ``"rank"`` each rank by its own. The two
            are the same in one process.

    Raises:
        ValueError: for a negative or non-finite radius, ``local`` outside [0, 1], or an unknown option.

    References:
        - Foret, Kleiner, Mobahi and Neyshabur (2021), *Sharpness-aware minimization for efficiently improving
          generalization*, ICLR.
        - Phan et al. (2025), *Beyond losses reweighting: empowering multi-task learning via the generalization
          perspective*, ICCV.

    Example:
        >>> SAM(rho=0.05)
        SAM(rho=0.05)
        >>> SAM(rho=-0.05)
        Traceback (most recent call last):
        ...
        ValueError: rho must not be negative, got -0.05. For plain multi-task learning pass perturbation=None.
    """

    def __init__(
        self,
        rho: float,
        *,
        rho_heads: float | None = None,
        norm: Literal["separate", "joint"] = "separate",
        local: float | None = None,
        scope: Literal["global", "rank"] = "global",
    ) -> None:
        self.rho = _radius("rho", rho)
        self.rho_heads = self.rho if rho_heads is None else _radius("rho_heads", rho_heads)
        check_known("norm", norm, ("separate", "joint"))
        self.norm = norm
        self.local = None if local is None else _share("local", local)
        check_known("scope", scope, ("global", "rank"))
        self.scope = scope

    @property
    def is_none(self) -> bool:
        """Whether both radii are zero, so that nothing is perturbed."""
        return self.rho == 0.0 and self.rho_heads == 0.0

    def local_of(self, *, weighted: bool) -> float:
        """Return ``local``, or what ``None`` stands for: 1, or 0 where the tasks are ``weighted`` into one loss."""
        if self.local is None:
            return 0.0 if weighted else 1.0
        return self.local

    def is_adaptive(self, weight: Tensor) -> bool:
        """Return whether the step on ``weight`` is scaled by its entries; never for SAM."""
        del weight
        return False

    def ascend(self, parts: Sequence[Part], kept: Sequence[Sequence[Tensor]]) -> None:
        r"""Move the weights of every part in place by :math:`\rho T^2 g / \lVert T g \rVert`.

        ``T`` is 1, or :math:`|\theta|` where :meth:`is_adaptive`; ``kept`` holds copies of the weights. The
        weights themselves serve as the place to form the step, so nothing of their size is allocated (but in
        half precision, where a step would be rounded away).
        """
        steps = [
            [self._scaled(w, w0, g) for w, w0, g in zip(part.weights, copies, part.gradients, strict=True)]
            for part, copies in zip(parts, kept, strict=True)
        ]
        norms = [euclidean_norm(step) for step in steps]
        if self.norm == "joint":
            norms = [euclidean_norm(norms)] * len(norms)
        for part, copies, step, length in zip(parts, kept, steps, norms, strict=True):
            root = torch.where(length > 0, part.rho / length, 0.0).sqrt()  # the factor itself may leave float32
            for w, w0, s in zip(part.weights, copies, step, strict=True):
                s.mul_(root.to(s.device)).mul_(root.to(s.device))
                if self.is_adaptive(w):
                    s.mul_(w0)
                s.add_(w0)
                if s is not w:
                    w.copy_(s)

    def _scaled(self, weight: Tensor, kept: Tensor, gradient: Tensor) -> Tensor:
        """Return ``T g`` up to signs in float32 or better, in the weight's own memory if that is as wide."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        place = weight if weight.dtype == wide else torch.empty_like(weight, dtype=wide)
        place.copy_(gradient)
        return place.mul_(kept) if self.is_adaptive(weight) else place

    def __repr__(self) -> str:
        defaults = {
            "rho_heads": self.rho,
            "norm": "separate",
            "local": None,
            "scope": "global",
            "adapt": "all",
        }
        options = [f"{k}={v!r}" for k, v in vars(self).items() if k not in defaults or v != defaults[k]]
        return f"{type(self).__name__}({', '.join(options)})"


class ASAM(SAM):
    r"""The adaptive form of :class:`SAM`: each entry's step is in proportion to the entry's own size.

    With :math:`T = |\theta|` elementwise, :math:`\epsilon = \rho \, T^2 g / \lVert T g \rVert`, apart for trunk
    and head (or over one joint norm). The step, and so the sharpness, does not change when a layer is scaled up
    and the next one down by the same factor. Useful radii are about ten times those of SAM.

    Args:
        rho: radius; see :class:`SAM` for it and the other options.
        rho_heads: see :class:`SAM`.
        norm: see :class:`SAM`.
        local: see :class:`SAM`.
        scope: see :class:`SAM`.
        adapt: ``"all"`` scales every parameter (as the authors' code), ``"matrices"`` leaves those with fewer
            than two axes (biases, norms) unscaled.

    Raises:
        ValueError: as :class:`SAM`.

    References:
        - Kwon, Kim, Park and Choi (2021), *ASAM: adaptive sharpness-aware minimization for scale-invariant
          learning of deep neural networks*, ICML.

    Example:
        >>> ASAM(rho=0.5, adapt="matrices")
        ASAM(rho=0.5, adapt='matrices')
    """

    def __init__(
        self,
        rho: float,
        *,
        rho_heads: float | None = None,
        norm: Literal["separate", "joint"] = "separate",
        local: float | None = None,
        scope: Literal["global", "rank"] = "global",
        adapt: Literal["all", "matrices"] = "all",
    ) -> None:
        super().__init__(rho, rho_heads=rho_heads, norm=norm, local=local, scope=scope)
        check_known("adapt", adapt, ("all", "matrices"))
        self.adapt = adapt

    def is_adaptive(self, weight: Tensor) -> bool:
        """Return whether the step on ``weight`` is scaled by its entries."""
        return self.adapt == "all" or weight.ndim > 1


@contextmanager
def perturbed(perturbation: SAM, parts: Sequence[Part], places: Sequence[Sequence[Tensor]]) -> Generator[None]:
    """Perturb the weights within this context and put them back bit for bit after it, whatever happens in it.

    Args:
        perturbation: says how.
        parts: weights with the gradients to ascend along.
        places: for each part, tensors like its weights in which the weights are kept meanwhile.
    """
    weights = [w for part in parts for w in part.weights]
    kept = [p for place in places for p in place]
    with torch.no_grad():
        _copy(weights, to=kept)
    try:
        with torch.no_grad():
            perturbation.ascend(parts, places)
        torch.clear_autocast_cache()  # it may hold casts of the unperturbed weights
        yield
    finally:
        _put_back(kept, weights)
        torch.clear_autocast_cache()


def _put_back(kept: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Put weights back, all of them also if a signal such as Ctrl-C comes meanwhile."""
    try:
        with torch.no_grad():
            _copy(kept, to=weights)
    except BaseException:
        with torch.no_grad():
            _copy(kept, to=weights)
        raise


def _copy(source: Sequence[Tensor], *, to: Sequence[Tensor]) -> None:
    for place, tensor in zip(to, source, strict=True):
        place.copy_(tensor)


def _radius(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{name} must be a number, got {value!r}. Useful radii lie between 0.005 and 5.")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}. Useful radii lie between 0.005 and 5.")
    if value < 0:
        raise ValueError(
            f"{name} must not be negative, got {value}. For plain multi-task learning pass perturbation=None."
        )
    return float(value)


def _share(name: str, value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1], got {value}. 1 perturbs each task apart, 0 all tasks alike.")
    return float(value)
