"""Factors of one kind and size, from all blocks of a bucket, as one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .base import Factor
from .diagonal import DiagonalFactor
from .near_symmetric import NearSymmetric


@dataclass
class Pool:
    """All factors of one kind and size as one tensor ``Q``, ``(N, n, n)`` or ``(N, n)``."""

    dense: bool
    #: a group and an axis of it, with the tensor of the stack's factors there
    members: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def join(self, start: int) -> int:
        """Make ``Q``: a view if the members lie one after the other in memory, as the optimizer puts them."""
        view = adjacent(list(self.members.values()))
        self.copied = view is None
        self.Q = self.copy() if view is None else view
        #: where the factors of this pool are among all factors
        self.span = slice(start, start + len(self.Q))
        self.rows: dict[tuple[int, int], slice] = {}
        row = 0
        for key, part in self.members.items():
            self.rows[key] = slice(row, row + len(part))
            row += len(part)
        return self.span.stop

    def copy(self) -> Tensor:
        return torch.cat(list(self.members.values()))

    def fetch(self) -> None:
        """Others may have moved the factors meanwhile."""
        if self.copied:
            self.Q = self.copy()

    def put_back_(self) -> None:
        if self.copied:
            for key, part in self.members.items():
                part.copy_(self.Q[self.rows[key]])

    def P(self) -> Tensor:
        return torch.bmm(self.Q.mT, self.Q) if self.dense else self.Q.square()

    def diagonal(self, M: Tensor) -> Tensor:
        return M.diagonal(dim1=1, dim2=2) if self.dense else M


def adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """All parts as one tensor, if they lie one after the other in memory."""
    first = parts[0]
    offset = first.storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and part.storage_offset() == offset and part.is_contiguous()):
            return None
        offset += part.numel()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def factor_tensor(factor: Factor) -> Tensor:
    assert isinstance(factor, (NearSymmetric, DiagonalFactor))
    return factor.root if isinstance(factor, NearSymmetric) else factor.diag
