"""One tensor for each parameter, such as gradients: known by position, or by the addresses that a recorded step reads.

A bucket packs them, averages them and checks them in the same words, whichever of the two they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..ops import parameters
from ..ops.tensor_table import Addresses

if TYPE_CHECKING:
    from .bucket import Bucket


class Tensors:
    """Tensors by the positions of their parameters."""

    def __init__(self, by_position: Mapping[int, Tensor]) -> None:
        self.by_position = by_position

    def pack(self, bucket: Bucket) -> Iterator[Tensor]:
        """Arrays ``(B, *shape)`` for the stacks of a bucket, made one by one; missing tensors count as zero."""
        for stack in bucket.stacks:
            yield stack.pack(self.by_position)

    def average_(self, bucket: Bucket, weight: float, ok: Tensor) -> None:
        """``m ← m + weight (g − m)`` for the averages of a bucket, and the same for the sum of their weights."""
        means: list[Tensor] = []
        values: list[Tensor] = []
        for stack in bucket.stacks:
            mean, total = stack.average["momentum"], stack.average["momentum_weight"]
            one = bucket.ones[: len(total)]
            pairs = stack.same_layout(mean, self.by_position)
            if pairs is None:  # packed stack by stack, so that only one copy is there at a time
                parameters.average_([mean, total], [stack.pack(self.by_position), one], weight, ok)
            else:
                means += [*pairs[0], total]
                values += [*pairs[1], one]
        if means:
            parameters.average_(means, values, weight, ok)


class TensorsAtAddresses(Tensors):
    """Tensors whose addresses lie in arrays on the device, for buckets that have a table.

    Args:
        buckets: each with a table
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        super().__init__({})
        self.addresses = {bucket: Addresses(len(bucket.positions), bucket.device) for bucket in buckets}

    def point(self, tensors: Mapping[int, Tensor]) -> None:
        """Refer to other tensors, which the caller keeps until the recording has been replayed."""
        for bucket, addresses in self.addresses.items():
            addresses.point([tensors[i].data_ptr() for i in bucket.positions])

    def check_(self, ok: Tensor) -> None:
        """Set a flag to false if any element is not finite."""
        for bucket, addresses in self.addresses.items():
            assert bucket.table is not None
            bucket.table.check_(addresses, ok)

    def pack(self, bucket: Bucket) -> Iterator[Tensor]:
        assert bucket.table is not None
        buffer = torch.empty(bucket.starts[-1], dtype=bucket.table.dtype, device=bucket.device)
        bucket.table.gather(self.addresses[bucket], buffer)
        for stack, part in zip(bucket.stacks, bucket.parts_of(buffer), strict=True):
            yield part.view(len(part), *stack.blocks[0].shape).to(bucket.dtype)

    def average_(self, bucket: Bucket, weight: float, ok: Tensor) -> None:
        assert bucket.table is not None
        rest = torch.full_like(bucket.numel, weight)
        bucket.table.average_(self.addresses[bucket], bucket.mean_addresses, bucket.dtype, rest, ok)
        each = [stack.average["momentum_weight"] for stack in bucket.stacks]
        totals = torch.cat(each)
        new = torch.where(ok, torch.lerp(totals, torch.ones_like(totals), rest), totals)
        torch._foreach_copy_(each, list(new.split(bucket.counts)))


class Pairs:
    """Pairs ``(δθ, δg)`` by the positions of their parameters; whoever takes them owns them."""

    def __init__(self, by_position: dict[int, tuple[Tensor, Tensor]]) -> None:
        self.by_position = by_position

    def take(self, bucket: Bucket) -> Iterator[list[Tensor]]:
        """``[δθ, δg]`` for each stack of a bucket; blocks without a pair get zeros, which say nothing of ``Q``."""
        for stack in bucket.stacks:
            # Lists that are emptied: a pair is as large as the parameters, and nobody else needs it.
            measured = {i: list(self.by_position.pop(i)) for i in stack.params() if i in self.by_position}
            yield [stack.pack({i: halves.pop(0) for i, halves in measured.items()}) for _ in range(2)]


class PairsAtAddresses(Pairs):
    """Pairs whose addresses lie in arrays on the device."""

    def __init__(self, dthetas: TensorsAtAddresses, dgrads: TensorsAtAddresses) -> None:
        super().__init__({})
        self.halves = (dthetas, dgrads)

    def take(self, bucket: Bucket) -> Iterator[list[Tensor]]:
        halves = [half.pack(bucket) for half in self.halves]
        for _ in bucket.stacks:
            yield [next(half) for half in halves]
