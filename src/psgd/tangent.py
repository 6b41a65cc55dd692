"""The tangent of a fitting criterion, kept as one pair of arrays.

Each criterion of the paper moves ``Q`` along a symmetric matrix ``S = x yᵀ + y xᵀ``, summed over the columns of
``x`` and ``y`` if they have more than one. The pair ``(x, y)`` contains everything about ``S`` that an update needs,
and it is only as large as the parameters. ``S`` itself is therefore formed only if it is small.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .ops.look import between, can_look, seen
from .ops.power import power_iteration

#: number of rows of ``S`` handled at a time: large enough for fast products, small enough to stay in a cache
BLOCK_ROWS = 128
#: number of elements of vectors among which a CPU looks for the largest ``|S_ij|``
LONGEST = 64


def rows_at_once(device: torch.device, n: int) -> int:
    """Number of rows that are computed at a time if ``S`` is not formed: many on a GPU, to save launches."""
    return BLOCK_ROWS if device.type == "cpu" else max(BLOCK_ROWS, -(-n // 8))


@dataclass(frozen=True)
class Tangent:
    """A stack of pairs ``(x, y)``: ``(B, *dims)`` as a criterion returns it, ``(B, n, k)`` unfolded along one axis.

    Scaling ``x`` or ``y`` scales ``S``, so it cannot change a normalised step. ``unit_`` uses this fact to keep the
    products of very large or very small gradients within the range of the number format.

    >>> import torch
    >>> t = Tangent(torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[3.0], [1.0]]]))
    >>> t.matrix()
    tensor([[[6., 7.],
             [7., 4.]]])
    >>> t.max_abs(), t.max_diag()
    (tensor([7.]), tensor([6.]))
    """

    x: Tensor
    y: Tensor
    #: whether ``S`` is ``a aᵀ − b bᵀ`` with ``a = y / 2 + x`` and ``b = y / 2 − x``
    is_difference: bool = False

    def unit_(self) -> Tensor:
        """Scale both parts in place to a maximum of one; return for each block of the stack whether it is usable.

        A block is not usable if ``S`` is zero or if one of the two parts is not finite; such a part becomes zero.
        """
        return _scale_to_one_(self.x) & _scale_to_one_(self.y)

    def unfold(self, axis: int) -> Tangent:
        """View the pair with ``axis`` (not counting the axis of the stack) as rows and all other axes as columns."""
        return Tangent(unfold(self.x, axis), unfold(self.y, axis))

    @property
    def rows(self) -> int:
        return self.x.shape[1]

    @property
    def columns(self) -> int:
        return self.x.shape[2]

    @cached_property
    def _formed(self) -> Tensor | None:
        """``S`` itself, if it is small."""
        if is_small(self.rows, self.columns):
            half = torch.bmm(self.x, self.y.mT)
            return half + half.mT
        return None

    @cached_property
    def _blocks(self) -> list[Tensor]:
        """``S`` as blocks of ``BLOCK_ROWS`` rows, see ``upper``, if it is large but not much larger than the pair."""
        if is_small(self.rows, self.columns) or not is_formed(self.rows, self.columns):
            return []
        starts = range(0, self.rows, BLOCK_ROWS)
        return [self._rows(start, min(start + BLOCK_ROWS, self.rows)) for start in starts]

    def _rows(self, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` of ``S`` from column ``start`` on, formed from the pair alone."""
        x, y = self.x[:, start:], self.y[:, start:]
        size = stop - start
        return torch.baddbmm(torch.bmm(x[:, :size], y.mT), y[:, :size], x.mT)

    def upper(self, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` of ``S``, from column ``start`` on.

        The caller that uses them last may overwrite them.
        """
        if self._formed is not None:
            return self._formed[:, start:stop, start:]
        if self._blocks and start % BLOCK_ROWS == 0 and stop == min(start + BLOCK_ROWS, self.rows):
            return self._blocks[start // BLOCK_ROWS]
        return self._rows(start, stop)

    def matrix(self) -> Tensor:
        return self.upper(0, self.rows)

    def diagonal(self) -> Tensor:
        if self._formed is not None:
            return self._formed.diagonal(dim1=1, dim2=2)
        if self._blocks:
            return torch.cat([block.diagonal(dim1=1, dim2=2) for block in self._blocks], 1)
        return self.diagonal_alone()

    def diagonal_alone(self) -> Tensor:
        """The diagonal of ``S``, computed without forming ``S``; its rounding differs from that of a formed ``S``."""
        return 2 * (self.x * self.y).sum(-1)

    def max_abs(self) -> Tensor:
        """The largest ``|S_ij|``; as ``S`` is symmetric, also the largest of its upper triangle."""
        if self._formed is not None:
            return largest(self._formed)
        if looks_at_longest(self.x.device, self.rows, self.columns):
            found = self._max_abs_of_longest()
            if found is not None:
                return found
        size = BLOCK_ROWS if self._blocks else rows_at_once(self.x.device, self.rows)
        starts = range(0, self.rows, size)
        return torch.stack([largest(self.upper(i, min(i + size, self.rows))) for i in starts]).amax(0)

    def _max_abs_of_longest(self) -> Tensor | None:
        """The largest ``|S_ij|`` for vectors, by O(n) work; None if this work is not enough to find it.

        ``S_ij = x_i y_j + y_i x_j`` is at most ``r_i r_j``, where ``r_i`` is the length of ``(x_i, y_i)``. Among the
        ``k`` indices with the largest ``r_i``, the largest element is therefore the largest of all if it is at least
        ``r_1 r_k``, with the largest and the smallest of these ``r_i``. The host reads this comparison, on CPUs only.
        """
        x, y = self.x[:, :, 0], self.y[:, :, 0]
        lengths, longest = torch.hypot(x, y).topk(LONGEST)
        x, y = x.gather(1, longest)[:, :, None], y.gather(1, longest)[:, :, None]
        found = largest(torch.baddbmm(torch.bmm(x, y.mT), y, x.mT))
        return found if bool((found >= lengths[:, 0] * lengths[:, -1]).all()) else None

    def max_diag(self) -> Tensor:
        return self.diagonal().abs().amax(-1)

    def spectral(self, iterations: int = 4) -> Tensor:
        """The norm ``‖S‖₂``: for vectors exactly, as ``|x·y| + ‖x‖‖y‖``; for matrices by power iteration.

        Power iteration approaches the norm from below. It never falls below the largest ``|S_ii|``, which is enough
        to keep the diagonal of ``Q`` positive.
        """
        x, y = self.x, self.y
        if self.columns == 1:
            x, y = x[:, :, 0], y[:, :, 0]
            return (x * y).sum(-1).abs() + torch.linalg.vector_norm(x, dim=-1) * torch.linalg.vector_norm(y, dim=-1)
        # The leading eigenvector lies in the span of the columns of x and y: start from the longest of each.
        v = torch.cat([_longest_column(x), _longest_column(y)], -1)
        _, length = power_iteration(lambda v: x @ (y.mT @ v) + y @ (x.mT @ v), v, iterations + 1)
        return torch.maximum(length.amax((1, 2)).to(x.dtype), self.max_diag())


@dataclass(frozen=True)
class DiagonalTangent:
    """The diagonal ``(B, n)`` of ``S``, for groups of diagonal matrices; all three norms are equal for it."""

    values: Tensor

    def diagonal(self) -> Tensor:
        return self.values

    def max_abs(self) -> Tensor:
        return self.values.abs().amax(-1)

    max_diag = max_abs
    spectral = max_abs


def is_formed(rows: int, columns: int) -> bool:
    """Whether ``S``, or its upper triangle, is kept from one use to the next.

    It is kept if it is small, or not much larger than the pair, whose ``rows`` and ``columns`` are given.
    """
    return is_small(rows, columns) or (columns > 1 and rows <= max(4 * columns, 4 * BLOCK_ROWS))


def is_small(rows: int, columns: int) -> bool:
    """Whether ``S`` is formed as a whole by one product."""
    return rows <= (LONGEST if columns == 1 else 2 * BLOCK_ROWS)


def looks_at_longest(device: torch.device, rows: int, columns: int) -> bool:
    """Whether the largest ``|S_ij|`` is first looked for among the ``LONGEST`` elements of vectors."""
    return columns == 1 and rows > LONGEST and can_look(device)


def unfold(v: Tensor, axis: int) -> Tensor:
    """View ``v`` of shape ``(B, *dims)`` as ``(B, dims[axis], product of the others)``."""
    if v.ndim == 2:
        return v.unsqueeze(2)
    if v.ndim == 3:
        return v.mT if axis else v
    return v.movedim(axis + 1, 1).reshape(v.shape[0], v.shape[axis + 1], -1)


def fold(v: Tensor, axis: int, shape: torch.Size) -> Tensor:
    """Undo ``unfold``: ``fold(unfold(v, axis), axis, v.shape) == v``."""
    if len(shape) == 2:
        return v.squeeze(2)
    if len(shape) == 3:
        return v.mT if axis else v
    moved = (shape[0], shape[axis + 1], *shape[1 : axis + 1], *shape[axis + 2 :])
    return v.reshape(moved).movedim(1, axis + 1)


def largest(v: Tensor) -> Tensor:
    """The largest absolute value of each block of a stack; NaN if the block contains one.

    On a CPU it is many times faster than ``vector_norm``, and makes no copy as large as ``v``.
    """
    axes = tuple(range(1, v.ndim))
    if v.is_cuda and axes:
        return torch.linalg.vector_norm(v, torch.inf, dim=axes)
    if len(v) == 1:  # minimum and maximum in one pass
        least, most = v.aminmax()
        return torch.maximum(most, -least).view(1)
    return torch.maximum(v.amax(axes), -v.amin(axes))


def _scale_to_one_(v: Tensor) -> Tensor:
    size = largest(v)
    usable = between(size, 0.0, torch.inf)
    shape = (-1, *[1] * (v.ndim - 1))
    if seen(v.device, lambda: usable):
        v.div_(size.view(shape))
        return usable
    v.div_(torch.where(usable, size, 1.0).view(shape)).masked_fill_(~usable.view(shape), 0)
    return usable


def _longest_column(v: Tensor) -> Tensor:
    index = torch.linalg.vector_norm(v, dim=1, keepdim=True).argmax(-1, keepdim=True)
    return v.gather(2, index.expand(-1, v.shape[1], -1))
