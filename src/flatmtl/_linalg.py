"""Gramians, weighted sums and norms of task gradients, exact at any scale and in any dtype.

Sums of squares of float32 numbers under- and overflow in float32, and long sums lose digits there. So float32 on the
CPU is summed as it is in short blocks, these in float64, and all of it again with care, every number in float64, if the
outcome is near what float32 cannot hold, or rows are near to dependent, where small errors weigh. Elsewhere everything
is in float64, block by block: no float64 copy of a whole Jacobian is ever made, and an accelerator is not waited for.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

SHORT = 1 << 10  # entries whose products float32 sums to 1e-7, also where a processor keeps few sums at once (AVX2)
SAFE = 1e-30  # sums of squares from this, for each entry, to its inverse lose nothing in float32
REGULAR = 0.01  # least eigenvalue of the cosines; weights err by 1e-7 over it
BLOCK_IN_CACHE = 1 << 17  # entries; in float64 they stay in a processor's cache, as twice as many do in float32
BLOCK_ON_DEVICE = 1 << 22  # entries; an accelerator wants fewer, larger pieces


class Gramian(NamedTuple):
    r"""Inner products of rows, :math:`J J^\top = s^2 G`; the factor is apart so that squares stay within float64.

    Attributes:
        G: ``(m, m)`` in float64.
        scale: ``s``, a power of two.
    """

    G: Tensor
    scale: float

    def of(self, rows: Sequence[int]) -> "Gramian":
        """Return the Gramian of some of the rows."""
        return Gramian(self.G[rows][:, rows], self.scale)

    def cpu(self) -> "Gramian":
        """Return it on the CPU, where problems of size ``m`` are solved."""
        return Gramian(self.G.cpu(), self.scale)

    def products(self) -> Tensor:
        r"""Return :math:`J J^\top`, whose squares may under- or overflow."""
        return self.G * self.scale * self.scale

    def norms(self) -> Tensor:
        """Return the norms of the rows, shape ``(m,)``."""
        return self.G.diagonal().sqrt() * self.scale

    def norm_of_sum(self, weights: Tensor) -> float:
        r"""Return :math:`\lVert J^\top w \rVert`."""
        w = weights.to(self.G)
        return math.sqrt(max(float(w @ self.G @ w), 0.0)) * self.scale


def gramian(jacobian: Tensor) -> Gramian:
    """Return the Gramian of the rows of ``jacobian``, on the same device.

    The scale is a power of two near the largest entry of ``J`` for float64 input; it is 1 for narrower dtypes, whose
    squares float64 always holds. A row that is not finite makes its own row and column non-finite and no other.
    """
    m, n = jacobian.shape
    if n > SHORT and _is_quick(jacobian):
        quick = _products(jacobian)
        if all(_is_safe(square, n) for square in floats(quick.diagonal())) and _is_regular(quick):
            return Gramian(quick, 1.0)
    scale = _power_of_two_near(jacobian) if jacobian.dtype == torch.float64 else 1.0
    G = torch.zeros(m, m, dtype=torch.float64, device=jacobian.device)
    for _, block in wide_blocks(jacobian):
        if scale != 1.0:
            block.div_(scale)
        G.add_(_products(block))
    return Gramian(G, scale)


def weighted_sum(
    jacobian: Tensor, weights: Tensor, *, gramian: Gramian | None = None, out: Tensor | None = None, add: bool = False
) -> Tensor:
    r"""Return :math:`J^\top w` of shape ``(n,)`` in the dtype of ``J``, in ``out`` if given; or ``add`` it to that.

    It is summed in float64 and rounded once; in float32 if the Gramian says that the rows hardly cancel.
    """
    total = jacobian.new_empty(jacobian.shape[1]) if out is None else out
    before = 1.0 if add else 0.0  # with 0, what stands there is not read
    if jacobian.dtype == torch.float32 and gramian is not None and _hardly_cancel(weights, gramian):
        weights = upload(weights.to(jacobian.dtype), jacobian.device)
        return torch.addmv(total, jacobian.T, weights, beta=before, out=total)
    weights = upload(weights.double(), jacobian.device)
    for columns, block in wide_blocks(jacobian):
        part = torch.mv(block.T, weights)
        total[columns] = total[columns] + part if add else part
    return total


def norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm over all entries of all tensors, a float64 scalar; 0 for no tensors."""
    tensors = list(tensors)
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    if any(t.dtype == torch.float64 for t in tensors):
        parts = [_scaled_norm(t) if t.dtype == torch.float64 else inner([t], [t]).sqrt() for t in tensors]
        return parts[0] if len(parts) == 1 else _scaled_norm(torch.stack([p.to(parts[0].device) for p in parts]))
    few = sum(t.numel() for t in tensors) <= SHORT or tensors[0].device.type != "cpu"
    if len(tensors) > 1 and few and len({t.device for t in tensors}) == 1:  # one operation costs more than the copy
        tensors = [torch.cat([t.detach().reshape(-1) for t in tensors])]
    return inner(tensors, tensors).sqrt()  # float64 always holds the squares


@torch.no_grad()
def inner(some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return the inner product over all entries of two lists of tensors of the same shapes, a float64 scalar.

    Long float32 tensors are summed in float32 within blocks: six digits, where a Gramian has seven.
    """
    if _are_quick(some, others):
        quick = [torch.dot(a, b) for a, b in _pairs_of_blocks(some, others)]
        return _sum_of_quick(quick, some, others)
    return _careful_inner(some, others)


@torch.no_grad()
def subtract_each(rows: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Set each row to the value minus it; return the inner product of the differences with the values.

    Both are formed block by block, as long as a block is in the processor's cache.
    """
    if not _are_quick(rows, values):
        for row, value in zip(rows, values, strict=True):
            torch.sub(value, row, out=row)
        return _careful_inner(rows, values)
    quick: list[Tensor] = []
    for row, value in _pairs_of_blocks(rows, values):
        torch.sub(value, row, out=row)
        quick.append(torch.dot(row, value))
    return _sum_of_quick(quick, rows, values)


@torch.no_grad()
def products_with(jacobian: Tensor, vector: Tensor) -> Tensor:
    r"""Return :math:`J v` of shape ``(m,)`` in float64.

    Long float32 rows are summed in float32 within short blocks, as for a Gramian.
    """
    if vector.numel() > SHORT and _is_quick(jacobian) and _is_quick(vector):
        quick = _products(jacobian, vector[None])[:, 0]
        if all(_is_safe(abs(product), vector.numel()) for product in floats(quick)):
            return quick
    total = torch.zeros(len(jacobian), dtype=torch.float64, device=jacobian.device)
    for columns, block in wide_blocks(jacobian):
        total += torch.mv(block, vector[columns].double())
    return total


def _pairs_of_blocks(some: Iterable[Tensor], others: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the blocks of two lists of float32 tensors, as vectors; those of contiguous tensors are views."""
    for a, b in zip(some, others, strict=True):
        pair = a.reshape(-1), b.reshape(-1)
        if a.numel() <= 2 * BLOCK_IN_CACHE:
            yield pair
        else:
            yield from zip(*(torch.split(x, 2 * BLOCK_IN_CACHE) for x in pair), strict=True)


def _sum_of_quick(products: Sequence[Tensor], some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return the sum of float32 products of blocks; formed again with care if float32 may have lost something."""
    total = torch.stack(list(products)).sum(dtype=torch.float64)
    count = sum(a.numel() for a in some)
    return total if _is_safe(abs(float(total)), count) else _careful_inner(some, others)


def _careful_inner(some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return the inner product, summed in float64."""
    device = some[0].device if some else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for a, b in zip(some, others, strict=True):
        size = _entries_per_block(a)
        for x, y in zip(torch.split(a.reshape(-1), size), torch.split(b.reshape(-1), size), strict=True):
            wide = x.double()
            total += torch.dot(wide, wide if a is b else y.double()).to(total.device)
    return total


@torch.no_grad()
def copy_each(sources: Sequence[Tensor], *, to: Sequence[Tensor]) -> None:
    """Copy each source to its place."""
    if to:
        torch._foreach_copy_(list(to), list(sources))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


@torch.no_grad()
def multiply_each(tensors: Sequence[Tensor], by: Tensor | Sequence[Tensor]) -> None:
    """Multiply tensors in place by one number, or each by its own tensor."""
    torch._foreach_mul_(list(tensors), by)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage, reportArgumentType, reportCallIssue]


@torch.no_grad()
def add_each(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Add to each tensor another, in place."""
    torch._foreach_add_(list(tensors), list(others))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which nothing is cast: a caller's autocast is for the closures."""
    on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def finite_rows(jacobian: Tensor) -> Tensor:
    """Return for each row whether all its entries are finite, without a second matrix of that size."""
    if jacobian.shape[1] == 0:
        return torch.ones(len(jacobian), dtype=torch.bool)
    least, greatest = jacobian.aminmax(dim=1)
    return torch.isfinite(least) & torch.isfinite(greatest)


def floats(vector: Tensor) -> list[float]:
    """Return the entries of a vector as Python numbers."""
    return cast("list[float]", vector.tolist())


def fits_float32(number: float) -> bool:
    """Return whether products with a number lose nothing in float32."""
    return number == 0.0 or SAFE < abs(number) < 1.0 / SAFE


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
    return (G.triu(1) < 0).sum(dtype=torch.float64) / pairs.sum()


def _scaled_norm(x: Tensor) -> Tensor:
    """Return the norm of a float64 tensor whose squares may under- or overflow."""
    if x.numel() == 0:
        return x.new_zeros(())
    least, greatest = x.detach().aminmax()
    unit = torch.maximum(-least, greatest)
    unit = torch.where(unit > 0.0, unit, 1.0)
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


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a small tensor of the host on a device, which need not have done what it was told before."""
    pinned = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=True)


def _is_quick(tensor: Tensor) -> bool:
    """Return whether to try sums in float32: only on the CPU is it slow to convert, and nothing to look at the sum."""
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def _are_quick(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether to try an inner product in float32: of all that is not so short that the copy costs nothing."""
    return sum(a.numel() for a in some) > SHORT and all(map(_is_quick, some)) and all(map(_is_quick, others))


def _is_safe(size: float, n: int) -> bool:
    """Return whether a sum of ``n`` products of this size lost nothing to the limits of float32."""
    return n * SAFE <= size <= 1.0 / SAFE


def _is_regular(products: Tensor) -> bool:
    """Return whether rows are so far from dependent that the weights of a problem bear the rounding of float32."""
    cosines = as_cosines(products)
    failed = cast("Any", torch.linalg.cholesky_ex)(
        cosines - REGULAR * torch.eye(len(cosines), dtype=cosines.dtype, device="cpu")
    ).info
    return not bool(failed)


def _products(matrix: Tensor, other: Tensor | None = None) -> Tensor:
    r"""Return :math:`J K^\top` in float64, summed in the dtype of the matrices within short blocks of columns.

    ``K`` is ``J`` if it is not given. An accelerator takes up the blocks at once, where one product of two long, thin
    matrices leaves it idle.
    """
    other = matrix if other is None else other
    count, rest = divmod(matrix.shape[1], SHORT)
    start = matrix.shape[1] - rest
    products = (matrix[:, start:] @ other[:, start:].T).double()
    if count:
        blocks, others = (_in_blocks(some, count) for some in (matrix, other))
        products += torch.bmm(blocks, others.transpose(1, 2)).sum(dim=0, dtype=torch.float64)
    return products


def _in_blocks(matrix: Tensor, count: int) -> Tensor:
    """Return the first ``count`` short blocks of columns, ``(count, m, SHORT)``."""
    return matrix[:, : count * SHORT].reshape(len(matrix), count, SHORT).transpose(0, 1)


def _hardly_cancel(weights: Tensor, gramian: Gramian) -> bool:
    """Return whether a weighted sum of float32 rows can be formed in float32, with an error that is relative to it."""
    terms = [abs(w) * norm for w, norm in zip(floats(weights), floats(gramian.norms()), strict=True)]
    if not all(map(fits_float32, floats(weights))):
        return False
    square = float(weights.double() @ gramian.products() @ weights.double())
    return 16.0 * math.sqrt(max(square, 0.0)) >= max(terms)


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
