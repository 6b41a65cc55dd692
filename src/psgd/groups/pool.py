"""Pools: factors of one kind and size from all blocks of a bucket, as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import Factor
from .diagonal import DiagonalFactor
from .near_symmetric import NearSymmetric, move_, move_along_, safe

#: smallest dense factor that can be thin; for smaller ones, a few large products cost less than many small ones
THIN = 256


def is_thin(n: int, numel: int) -> bool:
    """Whether a dense factor sees so few columns of its block that products with them cost less than n × n products.

    Args:
        n: length of the factor's axis
        numel: number of elements of the block
    """
    return n >= THIN and 2 * numel <= n * n


class Pool:
    """All factors of one kind and size as one tensor ``Q``, ``(N, n, n)`` or ``(N, n)``.

    Args:
        members: tensor of the factors of a group along an axis, by the indices of the group and the axis
        thin: whether each of these factors sees few columns, see ``is_thin``
    """

    #: index of the block of each factor
    block: Tensor
    #: number of columns of the block unfolded along the factor's axis: ``E[tr(b bᵀ)] / n`` for white ``b``
    columns: Tensor
    #: ``‖columns · I‖²_F``
    identity: Tensor

    def __init__(self, members: dict[tuple[int, int], Tensor], thin: bool = False) -> None:
        self.members, self.thin = members, thin
        view = adjacent(list(members.values()))
        self.copied = view is None
        self.Q = self._copy() if view is None else view
        self.dense = self.Q.ndim == 3
        self.rows: dict[tuple[int, int], slice] = {}
        row = 0
        for key, part in members.items():
            self.rows[key] = slice(row, row + len(part))
            row += len(part)

    def _copy(self) -> Tensor:
        return torch.cat(list(self.members.values()))

    def fetch(self) -> None:
        """Copy the factors again, unless ``Q`` is a view of them, as other code may have changed them."""
        if self.copied:
            self.Q = self._copy()

    def parts(self, M: Tensor) -> dict[tuple[int, int], Tensor]:
        """Part of an array of all factors that belongs to each member."""
        if len(self.rows) == 1:
            return dict.fromkeys(self.rows, M)
        return {key: M[rows] for key, rows in self.rows.items()}

    def P(self) -> Tensor:
        """``QᵀQ``; for diagonal factors its diagonal."""
        return torch.bmm(self.Q.mT, self.Q) if self.dense else self.Q.square()

    def diagonal(self, M: Tensor) -> Tensor:
        """Diagonals ``(N, n)`` of an array of all factors."""
        return M.diagonal(dim1=1, dim2=2) if self.dense else M

    def step_(
        self,
        S: Tensor,
        bound: Tensor,
        frobenius: Tensor,
        lr: float | Tensor,
        usable: Tensor,
        rounded: Tensor | None = None,
        room: Tensor | None = None,
    ) -> Tensor:
        """``Q ← Q − lr / bound · S Q`` for factors of usable blocks.

        Args:
            S: symmetric tangent of each factor, which is overwritten
            bound: estimate of ``‖S‖₂`` of each factor, or of an upper bound of it
            frobenius: upper bound of ``‖S‖_F`` of each factor
            lr: step size: one number, or one for each block of the bucket
            usable: for each block of the bucket, whether its factors move
            rounded: ``Q`` in the dtype of estimates, if it is known
            room: memory for the product, or None

        Returns:
            for each factor, whether its tangent is finite; a factor without a finite tangent does not move
        """
        step, finite = self._step(bound, frobenius, lr, usable)
        if self.dense:
            move_(self.Q, S, step, rounded, room)
        else:
            self.Q.mul_(1 - S.mul_(step[:, None]).masked_fill_((step == 0)[:, None], 0))
        return finite

    def step_along_(
        self,
        each: Sequence[Tensor],
        rounded: Tensor,
        diagonal: Tensor,
        bound: Tensor,
        frobenius: Tensor,
        lr: float | Tensor,
        usable: Tensor,
    ) -> Tensor:
        """``Q ← Q − lr / bound · (a aᵀ − D) Q``: ``step_`` for a tangent that is not formed.

        Args:
            each: ``a`` of each member, ``(B, n, columns)``
            rounded: ``Q`` in the dtype of ``a``
            diagonal: diagonals of ``D`` of all factors
            bound: see ``step_``
            frobenius: see ``step_``
            lr: see ``step_``
            usable: see ``step_``
        """
        step, finite = self._step(bound, frobenius, lr, usable)
        for a, rows in zip(each, self.rows.values(), strict=True):
            move_along_(self.Q[rows], a, rounded[rows], step[rows], diagonal[rows])
        return finite

    def _step(self, bound: Tensor, frobenius: Tensor, lr: float | Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
        """``lr / bound`` of each factor, or zero if it does not move, and whether the bound is finite."""
        if isinstance(lr, Tensor) and lr.ndim:
            lr = lr[self.block]
        # The second bound is safe even if the first is too small: overshooting never stretches a direction of Q.
        bound = torch.maximum(bound, frobenius * safe(lr))
        finite = bound < torch.inf
        return torch.where(usable.index_select(0, self.block) & finite, lr / bound, torch.zeros_like(bound)), finite


def put_back_(pools: Sequence[Pool]) -> None:
    """Copy each ``Q`` to its factors, unless it is a view of them.

    One call copies all of them, so that an interrupt never leaves a block with old and new factors mixed.
    """
    copied = [(part, pool.Q[pool.rows[key]]) for pool in pools if pool.copied for key, part in pool.members.items()]
    if copied:
        torch._foreach_copy_([part for part, _ in copied], [new for _, new in copied])


def adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """View of all parts as one tensor, if they are adjacent in memory; else None."""
    first = parts[0]
    offset = first.storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and part.storage_offset() == offset and part.is_contiguous()):
            return None
        offset += part.numel()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def factor_tensor(factor: Factor) -> Tensor:
    """Tensor of an inverse-free factor: its matrices, or their diagonals."""
    assert isinstance(factor, (NearSymmetric, DiagonalFactor))
    return factor.root if isinstance(factor, NearSymmetric) else factor.diag
