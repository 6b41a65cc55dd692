"""Buckets for a step in which some blocks have no gradient.

Blocks without a gradient keep every bit of their state, and do not affect the other blocks. If they are few, the whole
bucket takes the step, and their state is saved before it and restored after it: the batch of all blocks exists already,
and the copies are small. If they are many, the other blocks are copied to a smaller bucket, so that no work is spent on
blocks without a gradient.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

from ..ops.streams import sent
from .bucket import Bucket
from .direction import Direction

#: largest share of a bucket, in bytes of state, that may lack gradients while the whole bucket takes a step. This adds
#: at most a third to the work, and copies less than a smaller bucket would.
FEW = 1 / 4


class Division:
    """Division of the blocks of a bucket into those with and those without a gradient.

    Args:
        bucket: the bucket
        given: rows of the blocks that have a gradient, one list for each stack
    """

    def __init__(self, bucket: Bucket, given: list[list[int]]) -> None:
        self.given = given
        self.device = bucket.device
        missing = [count - len(rows) for count, rows in zip(bucket.counts, given, strict=True)]
        sizes = [stack.nbytes() for stack in bucket.stacks]
        resting = sum(n * size / m for n, size, m in zip(missing, sizes, bucket.counts, strict=True))
        self.few_rest = resting <= FEW * sum(sizes)
        self.counts = bucket.counts

    @cached_property
    def rows(self) -> list[Tensor]:
        """Rows of the blocks with a gradient, as one index tensor for each stack."""
        return [self.on_device(rows) for rows in self.given]

    @cached_property
    def resting(self) -> list[list[int]]:
        """Rows of the blocks without a gradient, one list for each stack."""
        each = zip(self.counts, map(set, self.given), strict=True)
        return [[row for row in range(count) if row not in given] for count, given in each]

    @cached_property
    def has_gradient(self) -> Tensor:
        """One flag for each block: whether it has a gradient."""
        flags = torch.zeros(sum(self.counts), dtype=torch.bool, device="cpu")
        for part, rows in zip(flags.split(self.counts), self.given, strict=True):
            part[rows] = True
        return sent(flags, self.device)

    def on_device(self, rows: list[int]) -> Tensor:
        """Rows as an index tensor on the device of the bucket."""
        return sent(torch.tensor(rows, dtype=torch.int64, device="cpu"), self.device)


def having(bucket: Bucket, given: Container[int]) -> Bucket | None:
    """Bucket for a step of all blocks with at least one parameter in ``given``.

    It is ``bucket`` itself if these are all of its blocks, and None if there are none.
    """
    if all(i in given for i in bucket.positions):
        return bucket
    rows = [stack.having(given) for stack in bucket.stacks]
    if not any(rows):
        return None
    if list(map(len, rows)) == bucket.counts:
        return bucket
    if bucket.division is None or bucket.division.given != rows:
        bucket.division = Division(bucket, rows)
    return MostOfBucket(bucket, bucket.division) if bucket.division.few_rest else SomeOfBucket(bucket, bucket.division)


class MostOfBucket(Bucket):
    """All blocks of a bucket, a few of which have no gradient.

    Args:
        whole: the bucket
        division: its blocks with and without a gradient
    """

    def __init__(self, whole: Bucket, division: Division) -> None:
        super().__init__(whole.stacks, whole.group, whole.structure, whole.normalize)
        self.Q, self.positions, self.numel, self.ones = whole.Q, whole.positions, whole.numel, whole.ones
        self._among = division

    def find_table(self, like: object, moves: bool) -> None:
        """Build no table: kernels would move all parameters, and those without a gradient must not move."""

    @contextmanager
    def updating(self, fits: bool) -> Iterator[None]:
        """Context that restores the state of blocks without a gradient at its end, even if the step fails."""
        kept = []
        for stack, rows in zip(self.stacks, self._among.resting, strict=True):
            if rows:
                index = self._among.on_device(rows)
                kept += [(buffer, rows, buffer.index_select(0, index)) for buffer in stack.changing(fits).values()]
        try:
            yield
        finally:
            _put_(kept)

    def of_moving_blocks(self, direction: Direction) -> Direction:
        """Direction in which blocks without a gradient have a length of zero and no limit, as they do not move."""
        direction.length = torch.where(self._among.has_gradient, direction.length, 0.0)
        direction.limit = torch.where(self._among.has_gradient, direction.limit, 1.0)
        return direction


class SomeOfBucket(Bucket):
    """Copies of the blocks that have a gradient; a stack in which all blocks have one is used without a copy.

    Args:
        whole: the bucket
        division: its blocks with and without a gradient
    """

    def __init__(self, whole: Bucket, division: Division) -> None:
        self.taken = [
            (stack, rows, stack.select(rows, index))
            for stack, rows, index in zip(whole.stacks, division.given, division.rows, strict=True)
            if rows
        ]
        super().__init__([part for _, _, part in self.taken], whole.group, whole.structure, whole.normalize)

    def find_table(self, like: object, moves: bool) -> None:
        """Build no table: the copies have other addresses at every step."""

    @contextmanager
    def updating(self, fits: bool) -> Iterator[None]:
        """Context that copies the new state back to the whole bucket at its end, and nothing if the step fails."""
        yield
        learned = []
        for whole, rows, part in self.taken:
            if part is not whole:
                theirs = part.buffers()
                changed = whole.changing(fits)
                learned += [(buffer, rows, theirs[name]) for name, buffer in changed.items()]
        _put_(learned)


def _put_(values: Sequence[tuple[Tensor, list[int], Tensor]]) -> None:
    """Copy values to the given rows of buffers, in one call, so that an interrupt finds all of them copied, or none."""
    places = [buffer.select(0, row) for buffer, rows, _ in values for row in rows]
    if places:
        torch._foreach_copy_(places, [row for _, _, new in values for row in new.unbind()])
