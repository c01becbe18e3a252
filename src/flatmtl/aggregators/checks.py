"""Checks of what aggregators get and give, with messages that say what to do."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from flatmtl._linalg import floats
from flatmtl._solvers.rows import row_norms


def check_jacobian(jacobian: Tensor) -> None:
    """Raise if ``jacobian`` is not a real floating-point matrix with at least one row."""
    if jacobian.ndim != 2 or jacobian.shape[0] == 0 or not jacobian.is_floating_point():
        raise ValueError(
            f"task gradients have shape {tuple(jacobian.shape)} and dtype {jacobian.dtype}; expected a "
            "floating-point matrix (m, n) with one row for each of at least one task. "
            "Stack the flattened gradients: torch.stack([...])."
        )


def check_finite(G: Tensor) -> None:
    """Raise, naming the rows, if a row of the matrix behind the Gramian ``G`` is not finite."""
    if not all(map(math.isfinite, floats(G.diagonal()))):
        check_rows(torch.isfinite(G.diagonal()))


def check_rows(finite: Tensor) -> None:
    """Raise, naming the rows, unless every row is finite."""
    bad = [i for i, ok in enumerate(floats(finite)) if not ok]
    if bad:
        raise ValueError(
            f"task gradients {bad} (rows, from 0) are not finite; expected finite rows. "
            "Leave these tasks out, or find the loss that overflows."
        )


def in_float64(gramian: Tensor) -> Tensor:
    """Return a Gramian in float64 on the CPU; one rounded to a narrower dtype is made semidefinite again.

    Raises:
        ValueError: if it is not finite, naming the rows.
    """
    G = gramian.detach().to("cpu", torch.float64)
    check_finite(G)
    if gramian.dtype == torch.float64:
        return G
    norms = row_norms(G)
    lengths = torch.where(norms > 0.0, norms, torch.ones_like(norms))
    eigenvalues, Q = cast("tuple[Tensor, Tensor]", torch.linalg.eigh(G / lengths[:, None] / lengths))
    return norms[:, None] * (Q * eigenvalues.clamp(min=0.0)) @ Q.T * norms


def check_positive(aggregator: object, losses: Tensor, instead: str) -> None:
    """Raise, naming the rows, if a loss is not positive."""
    bad = [i for i, positive in enumerate(floats(losses > 0.0)) if not positive]
    if bad:
        raise ValueError(
            f"losses {floats(losses[bad])} of rows {bad} (from 0) are not positive; {aggregator!r} needs losses "
            f"above zero. {instead}"
        )


def check_weights(aggregator: object, w: object, m: int) -> Tensor:
    """Return weights in float64 on the CPU; raise, naming the aggregator, if it did not return one for each row.

    Raises:
        ValueError: if they are no vector of ``m`` real numbers.
        FloatingPointError: if one is not finite.
    """
    if not isinstance(w, Tensor) or w.shape != (m,) or w.is_complex():
        what = f"a tensor of shape {tuple(w.shape)} and dtype {w.dtype}" if isinstance(w, Tensor) else f"{w!r}"
        raise ValueError(
            f"the weights of the aggregator {type(aggregator).__name__} are {what} for {m} tasks; expected a tensor "
            f"of shape ({m},) with a real number for each."
        )
    weights = w.detach().to("cpu", torch.float64)
    if not all(map(math.isfinite, floats(weights))):
        raise FloatingPointError(
            f"the weights of the aggregator {type(aggregator).__name__} are {floats(weights)}; expected finite "
            "numbers. Mend the aggregator for degenerate tasks, or choose another."
        )
    return weights


def check_choice(option: str, value: object, choices: Sequence[object]) -> None:
    """Raise if the value of an option is none of its choices."""
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{option} is {value!r}; expected one of {known}.")


def times(w: Tensor, scale: float, exponent: float) -> Tensor:
    """Return weights times a power of the scale; raise if one leaves float64."""
    if scale == 1.0 or exponent == 0.0:
        return w
    result = w * torch.tensor(scale, dtype=torch.float64, device="cpu") ** exponent
    if not bool(((result.abs() >= torch.finfo(torch.float64).tiny) & torch.isfinite(result) | (w == 0.0)).all()):
        raise FloatingPointError(
            f"task gradients of a size of {scale:.0e} need weights of {floats(w)} times that to the power of "
            f"{exponent:.3g}, which float64 does not hold. Multiply all losses by one constant."
        )
    return result


def on_cpu() -> AbstractContextManager[Any]:
    """Return a context in which new tensors are on the CPU, whatever the default device is."""
    try:
        default = torch.get_default_device()
    except AttributeError:  # PyTorch 2.6, where set_default_device(None) was called: then it is the CPU
        return nullcontext()
    return nullcontext() if default.type == "cpu" else torch.device("cpu")
