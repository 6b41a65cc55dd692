"""Buckets for a step in which some blocks have no gradient: those keep all their bits, and the others do not notice.

If few blocks rest, the whole bucket takes its step, and those few get back what they had: a batch of all blocks is
there already, and what is copied is small. If many rest, the others are copied to a smaller bucket, which costs no work
for those that rest.
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

#: largest share of a bucket, in bytes of state, that rests while the whole bucket takes a step; that wastes at most a
#: third of the work, and copies less than the other way would
FEW = 1 / 4


class Division:
    """Blocks of a bucket that have a gradient, and those that have none.

    Args:
        bucket: the bucket
        given: for each stack the rows of the blocks that have a gradient
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
        """Rows of the blocks that have a gradient, for each stack."""
        return [self.on_device(rows) for rows in self.given]

    @cached_property
    def resting(self) -> list[list[int]]:
        """Rows of the blocks that have none, for each stack."""
        each = zip(self.counts, map(set, self.given), strict=True)
        return [[row for row in range(count) if row not in given] for count, given in each]

    @cached_property
    def has_gradient(self) -> Tensor:
        """Whether each block has a gradient."""
        flags = torch.zeros(sum(self.counts), dtype=torch.bool, device="cpu")
        for part, rows in zip(flags.split(self.counts), self.given, strict=True):
            part[rows] = True
        return sent(flags, self.device)

    def on_device(self, rows: list[int]) -> Tensor:
        """Rows as a tensor that indexes others."""
        return sent(torch.tensor(rows, dtype=torch.int64, device="cpu"), self.device)


def having(bucket: Bucket, given: Container[int]) -> Bucket | None:
    """Bucket for a step of the blocks of which at least one parameter is given: itself if all are, None if none is."""
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
    """All blocks of a bucket, of which a few rest.

    Args:
        whole: the bucket
        division: which of its blocks rest
    """

    def __init__(self, whole: Bucket, division: Division) -> None:
        super().__init__(whole.stacks, whole.group, whole.structure, whole.normalize)
        self.Q, self.positions, self.numel, self.ones = whole.Q, whole.positions, whole.numel, whole.ones
        self._among = division

    def find_table(self, like: object, moves: bool) -> None:
        """No table: kernels go through all parameters, and some of them stay where they are."""

    @contextmanager
    def updating(self, fits: bool) -> Iterator[None]:
        """Also if the step fails, blocks that rest have what they had."""
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
        """Direction in which blocks that rest, which nobody moves, have a length of zero."""
        direction.length = torch.where(self._among.has_gradient, direction.length, 0.0)
        direction.limit = torch.where(self._among.has_gradient, direction.limit, 1.0)
        return direction


class SomeOfBucket(Bucket):
    """Copies of the blocks of a bucket that have a gradient; stacks of which all blocks have one are not copied.

    Args:
        whole: the bucket
        division: which of its blocks have a gradient
    """

    def __init__(self, whole: Bucket, division: Division) -> None:
        self.taken = [
            (stack, rows, stack.select(rows, index))
            for stack, rows, index in zip(whole.stacks, division.given, division.rows, strict=True)
            if rows
        ]
        super().__init__([part for _, _, part in self.taken], whole.group, whole.structure, whole.normalize)

    def find_table(self, like: object, moves: bool) -> None:
        """No table: its copies are elsewhere at every step."""

    @contextmanager
    def updating(self, fits: bool) -> Iterator[None]:
        """Afterwards the bucket that they were copied from has learned what they have; if the step fails, nothing."""
        yield
        learned = []
        for whole, rows, part in self.taken:
            if part is not whole:
                theirs = part.buffers()
                changed = whole.changing(fits)
                learned += [(buffer, rows, theirs[name]) for name, buffer in changed.items()]
        _put_(learned)


def _put_(values: Sequence[tuple[Tensor, list[int], Tensor]]) -> None:
    """Copy values to some rows of each of some buffers, in one call: an interrupt finds all of them copied, or none."""
    places = [buffer.select(0, row) for buffer, rows, _ in values for row in rows]
    if places:
        torch._foreach_copy_(places, [row for _, _, new in values for row in new.unbind()])
