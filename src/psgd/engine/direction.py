"""The direction of a step, ``P m`` of all blocks of a bucket, and the buffer that it may lie in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..groups.base import Preconditioned

if TYPE_CHECKING:
    from .bucket import Bucket


class Room:
    """Buffer for ``P g`` of all stacks of a bucket, made when first asked for; only if kernels go through all of them.

    Args:
        bucket: the bucket
        buffer: buffer that is there already, or None
    """

    def __init__(self, bucket: Bucket, buffer: Tensor | None = None) -> None:
        self.bucket = bucket
        self.buffer = buffer

    def outs(self) -> list[Tensor | None]:
        """Part of each stack, or None."""
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
        limit: factor for each block that limits the step
        pace: factor for each block of the learning rate, or None
        buffer: buffer in which all arrays lie, if they do
    """

    limit: Tensor = field(kw_only=True)
    pace: Tensor | None = None
    buffer: Tensor | None = None
