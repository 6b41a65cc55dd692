"""Numbers that a bucket keeps for each block, such as the length of its longest recent gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..groups.pool import adjacent


class Numbers:
    """One number for each block of a bucket, stored in the tensors of its stacks.

    If these tensors are adjacent in memory, which is usual, all numbers are read and written without a copy.

    Args:
        parts: tensor of each stack
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = list(parts)
        whole = adjacent(self.parts)
        #: the same numbers in as few tensors as possible
        self.pieces = self.parts if whole is None else [whole]

    def read(self) -> Tensor:
        """All numbers as one tensor, which may share memory with the stacks."""
        return self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces)

    def pairs(self, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each piece with the values for it."""
        if len(self.pieces) == 1:
            return iter([(self.pieces[0], values)])
        return zip(self.pieces, values.split_with_sizes([len(piece) for piece in self.pieces]), strict=True)


def write_(*values: tuple[Numbers, Tensor]) -> None:
    """Write all values in one call, so that an interrupt finds all of them written, or none."""
    pairs = [pair for numbers, new in values for pair in numbers.pairs(new)]
    torch._foreach_copy_([old for old, _ in pairs], [new for _, new in pairs])
