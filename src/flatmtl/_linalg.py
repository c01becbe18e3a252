"""Gramians, weighted sums and norms of task gradients, exact at any scale and in any dtype.

Sums of squares of float32 numbers under- and overflow in float32, so everything here accumulates in
float64, block by block: no float64 copy of a whole Jacobian is ever made.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

BLOCK_IN_CACHE = 1 << 17  # entries; in float64 they stay in a processor's cache
BLOCK_ON_DEVICE = 1 << 22  # entries; an accelerator wants fewer, larger pieces


class Gramian(NamedTuple):
    r"""Inner products of rows, :math:`J J^\top = s^2 G`; the factor is apart so that squares stay within float64.

    Attributes:
        G: ``(m, m)`` in float64 on the CPU.
        scale: ``s``, a power of two.
    """

    G: Tensor
    scale: float

    def of(self, rows: Sequence[int]) -> "Gramian":
        """Return the Gramian of some of the rows."""
        return Gramian(self.G[rows][:, rows], self.scale)

    def products(self) -> Tensor:
        r"""Return :math:`J J^\top`, whose squares may under- or overflow."""
        return self.G * self.scale**2

    def norms(self) -> Tensor:
        """Return the norms of the rows, shape ``(m,)``."""
        return self.G.diagonal().sqrt() * self.scale


def gramian(jacobian: Tensor) -> Gramian:
    """Return the Gramian of the rows of ``jacobian``.

    The scale is a power of two near the largest entry of ``J`` for float64 input; it is 1 for narrower dtypes, whose
    squares float64 always holds. A row that is not finite makes its own row and column non-finite and no other.
    """
    m = jacobian.shape[0]
    scale = _power_of_two_near(jacobian) if jacobian.dtype == torch.float64 else 1.0
    G = torch.zeros(m, m, dtype=torch.float64, device=jacobian.device)
    for _, block in wide_blocks(jacobian):
        if scale != 1.0:
            block.div_(scale)
        G.addmm_(block, block.T)
    return Gramian(G.cpu(), scale)


def weighted_sum(jacobian: Tensor, weights: Tensor) -> Tensor:
    r"""Return :math:`J^\top w` of shape ``(n,)`` in the dtype of ``J``, summed in float64 and rounded once."""
    total = jacobian.new_empty(jacobian.shape[1])
    weights = weights.to(jacobian.device, torch.float64)
    for columns, block in wide_blocks(jacobian):
        total[columns] = torch.mv(block.T, weights)
    return total


def norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm over all entries of all tensors, a float64 scalar; 0 for no tensors."""
    parts = [_norm(t) for t in tensors]
    if not parts:
        return torch.zeros((), dtype=torch.float64)
    return _scaled_norm(torch.stack([p.to(parts[0].device) for p in parts]))


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product over all entries of two tensors of one shape, a float64 scalar."""
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    a, b = a.detach().reshape(-1), b.detach().reshape(-1)
    size = _entries_per_block(a)
    for start in range(0, len(a), size):
        total += torch.dot(a[start : start + size].double(), b[start : start + size].double())
    return total


def finite_rows(jacobian: Tensor) -> Tensor:
    """Return for each row whether all its entries are finite, without a second matrix of that size."""
    if jacobian.shape[1] == 0:
        return torch.ones(len(jacobian), dtype=torch.bool)
    least, greatest = jacobian.aminmax(dim=1)
    return torch.isfinite(least) & torch.isfinite(greatest)


def floats(vector: Tensor) -> list[float]:
    """Return the entries of a vector as Python numbers."""
    return cast("list[float]", vector.tolist())


def as_cosines(G: Tensor) -> Tensor:
    """Return the cosines between rows with Gramian ``G`` of shape ``(m, m)``; NaN for a zero row."""
    norms = G.diagonal().sqrt()
    return (G / norms[:, None] / norms).clamp(-1.0, 1.0)


def conflict_share(G: Tensor) -> Tensor:
    """Return the share of the pairs of rows with a negative inner product; NaN if there is no pair.

    Rows whose own inner product is NaN do not count as present.
    """
    present = ~G.diagonal().isnan()
    pairs = present.outer(present).triu(1)
    return (G.triu(1) < 0).sum() / pairs.sum()


def _norm(tensor: Tensor) -> Tensor:
    """Return the norm of one tensor in float64."""
    if tensor.dtype == torch.float64:
        return _scaled_norm(tensor)
    squares = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for _, block in wide_blocks(tensor.detach().reshape(1, -1)):
        squares += torch.dot(block[0], block[0])
    return squares.sqrt()


def _scaled_norm(x: Tensor) -> Tensor:
    """Return the norm of a float64 tensor whose squares may under- or overflow."""
    if x.numel() == 0:
        return x.new_zeros(())
    largest = x.detach().abs().amax()
    unit = torch.where(largest > 0.0, largest, torch.ones_like(largest))
    return cast("Tensor", torch.linalg.vector_norm(x.detach() / unit)) * unit


def wide_blocks(matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of columns and their entries in float64; each block overwrites the one before."""
    m, n = matrix.shape
    width = min(n, max(_entries_per_block(matrix) // max(m, 1), 1))
    buffer = torch.empty(m, width, dtype=torch.float64, device=matrix.device)
    for start in range(0, n, width or 1):
        columns = slice(start, min(start + width, n))
        block = buffer[:, : columns.stop - start]
        yield columns, block.copy_(matrix[:, columns])


def _entries_per_block(tensor: Tensor) -> int:
    return BLOCK_IN_CACHE if tensor.device.type == "cpu" else BLOCK_ON_DEVICE


def _power_of_two_near(jacobian: Tensor) -> float:
    """Return a power of two within a factor of two of the largest finite entry, 1 if there is none."""
    if jacobian.numel() == 0:
        return 1.0
    least, greatest = jacobian.aminmax(dim=1)
    largest = torch.maximum(-least, greatest)
    finite = largest[torch.isfinite(largest)]
    top = float(finite.max()) if finite.numel() else 0.0
    return math.ldexp(0.5, math.frexp(top)[1]) if top > 0.0 else 1.0
