"""Worst-case steps: where, within a radius, a task's loss rises most."""

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flatmtl._linalg import add_each, copy_each, fits_float32, multiply_each
from flatmtl._linalg import norm as euclidean_norm
from flatmtl._options import check_known

Norm = Callable[[Iterable[Tensor]], Tensor]
"""The Euclidean norm over all entries, those that other processes hold included."""


class Part(NamedTuple):
    """Weights that are perturbed together, the trunk or one head.

    Attributes:
        weights: the weights.
        gradients: for each the gradient to ascend along.
        rho: how far.
        length: norm over all gradients, a float64 scalar, if it is known.
    """

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    rho: float
    length: Tensor | None = None


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
        scope: ``"global"`` perturbs by gradients averaged over ranks, ``"rank"`` each rank by its own, which a model
            under ``fully_shard`` does not have. The two are the same in one process.

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
        self.rho = rho
        self.rho_heads = rho if rho_heads is None else rho_heads
        check_known("norm", norm, ("separate", "joint"))
        self.norm = norm
        self.local = None if local is None else _share("local", local)
        check_known("scope", scope, ("global", "rank"))
        self.scope = scope

    @property
    def rho(self) -> float:
        """Radius for the shared parameters; a new one holds from the next step on."""
        return self._rho

    @rho.setter
    def rho(self, value: float) -> None:
        self._rho = _radius("rho", value)

    @property
    def rho_heads(self) -> float:
        """Radius for each head; a new one holds from the next step on."""
        return self._rho_heads

    @rho_heads.setter
    def rho_heads(self, value: float) -> None:
        self._rho_heads = _radius("rho_heads", value)

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

    @torch.no_grad()
    def ascend(self, parts: Sequence[Part], kept: Sequence[Sequence[Tensor]], norm_of: Norm = euclidean_norm) -> None:
        r"""Set the weights of every part to the kept ones moved by :math:`\rho T^2 g / \lVert T g \rVert`.

        ``T`` is 1, or :math:`|\theta|` where :meth:`is_adaptive`; ``kept`` holds copies of the unperturbed weights.
        The weights themselves serve as the place to form the step, so nothing of their size is allocated (but in
        half precision, where a step would be rounded away).
        """
        places = [[_place_of(w) for w in part.weights] for part in parts]
        lengths = [self._length(*of_part, norm_of) for of_part in zip(parts, kept, places, strict=True)]
        if self.norm == "joint":
            lengths = [euclidean_norm(lengths)] * len(lengths)
        for part, copies, own, length in zip(parts, kept, places, lengths, strict=True):
            factor = torch.where(length > 0, part.rho / length, 0.0)
            scaled = [self.is_adaptive(w) for w in part.weights]
            for yes in {*scaled}:
                some = [i for i, adaptive in enumerate(scaled) if adaptive == yes]
                bases = [copies[i].to(own[i]) for i in some]
                steps = [own[i] if yes else part.gradients[i].to(own[i]) for i in some]
                _add_multiples(bases, steps, factor, times=bases if yes else None, out=[own[i] for i in some])
            apart = [(place, w) for place, w in zip(own, part.weights, strict=True) if place is not w]
            if apart:
                copy_each([place for place, _ in apart], to=[w for _, w in apart])

    def _length(self, part: Part, kept: Sequence[Tensor], places: Sequence[Tensor], norm_of: Norm) -> Tensor:
        """Return the norm of ``T g``; in the places of weights that are adaptive, ``T g`` up to signs stands then."""
        adaptive = [self.is_adaptive(w) for w in part.weights]
        if part.length is not None and not any(adaptive):
            return part.length
        for w0, g, place, yes in zip(kept, part.gradients, places, adaptive, strict=True):
            if yes:
                torch.mul(g.to(place), w0, out=place)
        return norm_of(p if yes else g for p, g, yes in zip(places, part.gradients, adaptive, strict=True))

    def __repr__(self) -> str:
        defaults = {
            "rho_heads": self.rho,
            "norm": "separate",
            "local": None,
            "scope": "global",
            "adapt": "all",
        }
        names = [name for name in signature(type(self)).parameters if hasattr(self, name)]
        values = {name: getattr(self, name) for name in names}
        options = [f"{k}={v!r}" for k, v in values.items() if k not in defaults or v != defaults[k]]
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


def _add_multiples(
    bases: Sequence[Tensor],
    steps: Sequence[Tensor],
    factor: Tensor,
    *,
    times: Sequence[Tensor] | None,
    out: Sequence[Tensor],
) -> None:
    """Put ``base + factor * step * times`` into ``out``, which may hold the steps.

    The factor itself may leave float32, its root does not.
    """
    number = float(factor) if factor.device.type == "cpu" else math.nan
    if fits_float32(number):
        for i, (base, step, place) in enumerate(zip(bases, steps, out, strict=True)):
            if times is None:
                torch.add(base, step, alpha=number, out=place)
            else:
                torch.addcmul(base, step, times[i], value=number, out=place)
        return
    copy_each(steps, to=out)
    for device in {place.device for place in out}:
        some = [i for i, place in enumerate(out) if place.device == device]
        places, root = [out[i] for i in some], factor.sqrt().to(out[some[0]])
        multiply_each(places, root)
        multiply_each(places, root)
        if times is not None:
            multiply_each(places, [times[i] for i in some])
        add_each(places, [bases[i] for i in some])


def _place_of(weight: Tensor) -> Tensor:
    """Return where to form the step on a weight: its own memory if that is as wide as float32."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight if weight.dtype == wide else torch.empty_like(weight, dtype=wide)


def ascend(
    perturbation: SAM, parts: Sequence[Part], places: Sequence[Sequence[Tensor]], norm_of: Norm = euclidean_norm
) -> None:
    """Perturb the weights of :func:`kept`, which may be perturbed otherwise already."""
    perturbation.ascend(parts, places, norm_of)
    torch.clear_autocast_cache()  # it may hold casts of other weights


@contextmanager
def kept(weights: Sequence[Tensor], places: Sequence[Tensor]) -> Generator[None]:
    """Keep weights in places of their kind, and put them back bit for bit in the end, also after an exception."""
    copy_each(weights, to=places)
    try:
        yield
    finally:
        copy_each(places, to=weights)
        torch.clear_autocast_cache()


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
