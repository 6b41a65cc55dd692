"""Direction of a step: ``P m`` of all blocks of a bucket, and the buffer that may hold it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..groups.base import Preconditioned

if TYPE_CHECKING:
    from .bucket import Bucket


class Room:
    """Buffer for ``P g`` of all stacks of a bucket, allocated on first use; only for buckets that have a table.

    Args:
        bucket: the bucket
        buffer: existing buffer to use, or None
    """

    def __init__(self, bucket: Bucket, buffer: Tensor | None = None) -> None:
        self.bucket = bucket
        self.buffer = buffer

    def outs(self) -> list[Tensor | None]:
        """Part of the buffer for each stack, or None for each if the bucket has no table."""
        bucket = self.bucket
        if bucket.table is None:
            return [None] * len(bucket.stacks)
        if self.buffer is None:
            self.buffer = torch.empty(bucket.starts[-1], dtype=bucket.Q.dtype, device=bucket.device)
        return [*bucket.parts_of(self.buffer)]


@dataclass
class Direction(Preconditioned):
    """``P m`` of a bucket.

    Args:
        limit: factor that limits the step of each block
        pace: factor of the learning rate of each block, or None
        buffer: buffer that holds all arrays, or None if they are separate
    """

    limit: Tensor = field(kw_only=True)
    pace: Tensor | None = None
    buffer: Tensor | None = None
