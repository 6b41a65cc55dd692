"""Tensors of the parameters, such as gradients: given by position, or by addresses that a captured step reads.

A bucket packs, averages and checks them by the same methods in both cases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..groups.axes import support
from ..ops import parameters
from ..ops.look import can_look
from ..ops.real import as_real
from ..ops.tensor_table import Addresses
from .numbers import write_

if TYPE_CHECKING:
    from .bucket import Bucket


class Tensors:
    """Tensors by the positions of their parameters."""

    def __init__(self, by_position: Mapping[int, Tensor]) -> None:
        self.by_position = by_position

    def pack(self, bucket: Bucket) -> Iterator[Tensor]:
        """Arrays ``(B, *shape)``, one for each stack, created on demand; missing tensors count as zero."""
        for stack in bucket.stacks:
            yield stack.pack(self.by_position)

    def can_look(self, bucket: Bucket) -> bool:
        """Whether the host can read numbers without waiting for a device."""
        return can_look(bucket.device)

    def lengths(self, bucket: Bucket) -> Tensor:
        """Length of each block of a bucket; not finite if an element is not, or if its square overflows."""
        given = [i for i in bucket.positions if i in self.by_position]
        norms = torch._foreach_norm([as_real(self.by_position[i]) for i in given], 2, bucket.dtype)
        if len(given) == len(bucket.positions):
            each = list(norms)
        else:
            found, zero = dict(zip(given, norms, strict=True)), torch.zeros_like(norms[0])
            each = [found.get(i, zero) for i in bucket.positions]
        if bucket.single:
            return torch.stack(each)
        parts = iter(each)
        blocks = [block for stack in bucket.stacks for block in stack.blocks]
        return torch.stack([torch.stack([next(parts) for _ in block.params]).norm() for block in blocks])

    def support(self, bucket: Bucket) -> list[list[Tensor] | None]:
        """Slices of each stack that are not zero, see ``Measured``."""
        given = [as_real(self.by_position[i]) for i in bucket.positions if i in self.by_position]
        # Blocks without any gradient keep their Q, so their slices do not matter. Within a block, a missing gradient
        # counts as zero.
        complete = bucket.single or len(given) == len(bucket.positions)
        # The usual case: no gradient has a zero, so all slices count.
        if complete and self.can_look(bucket) and all(g.abs().amin().item() > 0 for g in given):
            return [None] * len(bucket.stacks)
        return [support(g, s.group.dims) for s, g in zip(bucket.stacks, self.pack(bucket), strict=True)]

    def average_(self, bucket: Bucket, weight: float, limit: Tensor | None, ok: Tensor) -> Tensor | None:
        """``m ← m + weight (limit · g − m)`` for the averages of a bucket, and the same for the sum of their weights.

        Args:
            bucket: bucket of the averages
            weight: weight of the gradients
            limit: factor for the gradient of each block, or None
            ok: whether the step is taken

        Returns:
            length of the average of each block, if the averaging kernel computes it anyway; else None
        """
        limits = [None] * len(bucket.stacks) if limit is None else bucket.split(limit)
        means: list[Tensor] = []
        values: list[Tensor] = []
        for stack, factor in zip(bucket.stacks, limits, strict=True):
            mean = stack.average["momentum"]
            pairs = stack.same_layout(mean, self.by_position) if factor is None else None
            if pairs is None:  # packed stack by stack, so that only one copy exists at a time
                g = stack.pack(self.by_position)
                if factor is not None:
                    g = g * factor.view(-1, *[1] * (g.ndim - 1))
                parameters.average_([mean], [g], weight, ok)
            else:
                means += pairs[0]
                values += pairs[1]
        totals = bucket.numbers("momentum_weight").pieces
        ones = [bucket.ones] if len(totals) == 1 else bucket.split(bucket.ones)
        parameters.average_([*means, *totals], [*values, *ones], weight, ok)
        return None


class TensorsAtAddresses(Tensors):
    """Tensors whose addresses are stored in arrays on the device, so that a captured step can read other tensors.

    Args:
        buckets: buckets that have a table
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        super().__init__({})
        self.addresses = {bucket: Addresses(len(bucket.positions), bucket.device) for bucket in buckets}
        #: length of each tensor of a bucket, and whether it has enough zeros to fill a slice, see ``lengths``
        self.found = {bucket: (bucket.ones.clone(), bucket.ones > 0) for bucket in buckets}

    def point(self, tensors: Mapping[int, Tensor]) -> None:
        """Write the addresses of other tensors; the caller keeps these tensors alive until the graph was replayed."""
        for bucket, addresses in self.addresses.items():
            addresses.point([tensors[i].data_ptr() for i in bucket.positions])

    def can_look(self, bucket: Bucket) -> bool:
        return False

    def lengths(self, bucket: Bucket) -> Tensor:
        """Length of each block, always in the same memory, so that other CUDA graphs can read it too."""
        assert bucket.table is not None
        bucket.table.lengths(self.addresses[bucket], *self.found[bucket])
        return self.found[bucket][0]

    def support(self, bucket: Bucket) -> list[list[Tensor] | None]:
        """Slices that are not zero; call ``lengths`` first, as it counts the zeros of each tensor."""
        assert bucket.table is not None
        flags = bucket.table.support(self.addresses[bucket], self.found[bucket][1])
        dims = [stack.group.dims for stack in bucket.stacks]
        parts = iter(flags.split([len(s.blocks) * n for s, of in zip(bucket.stacks, dims, strict=True) for n in of]))
        return [
            [next(parts).view(len(stack.blocks), n) for n in of] for stack, of in zip(bucket.stacks, dims, strict=True)
        ]

    def pack(self, bucket: Bucket) -> Iterator[Tensor]:
        assert bucket.table is not None
        buffer = torch.empty(bucket.starts[-1], dtype=bucket.table.dtype, device=bucket.device)
        bucket.table.gather(self.addresses[bucket], buffer)
        for stack, part in zip(bucket.stacks, bucket.parts_of(buffer), strict=True):
            yield part.view(len(part), *stack.blocks[0].shape).to(bucket.dtype)

    def average_(self, bucket: Bucket, weight: float, limit: Tensor | None, ok: Tensor) -> Tensor:
        assert bucket.table is not None
        rest = torch.full_like(bucket.numel, weight)
        factor = torch.ones_like(rest) if limit is None else limit
        addresses = self.addresses[bucket], bucket.mean_addresses
        lengths = bucket.table.average_(*addresses, bucket.dtype, rest, factor, ok)
        totals = bucket.numbers("momentum_weight")
        old = totals.read()
        write_((totals, torch.where(ok, torch.lerp(old, torch.ones_like(old), rest), old)))
        return lengths


class Pairs:
    """Pairs ``(δθ, δg)`` by the positions of their parameters; ``take`` hands them over to its caller."""

    def __init__(self, by_position: dict[int, tuple[Tensor, Tensor]]) -> None:
        self.by_position = by_position

    def take(self, bucket: Bucket) -> Iterator[list[Tensor]]:
        """``[δθ, δg]`` for each stack of a bucket; blocks without a pair get zeros, which do not change ``Q``."""
        for stack in bucket.stacks:
            # The lists are emptied on the way to free memory: each half of a pair is as large as the parameters.
            measured = {i: list(self.by_position.pop(i)) for i in stack.params() if i in self.by_position}
            yield [stack.pack({i: halves.pop(0) for i, halves in measured.items()}) for _ in range(2)]


class PairsAtAddresses(Pairs):
    """Pairs whose addresses are stored in arrays on the device."""

    def __init__(self, dthetas: TensorsAtAddresses, dgrads: TensorsAtAddresses) -> None:
        super().__init__({})
        self.halves = (dthetas, dgrads)

    def take(self, bucket: Bucket) -> Iterator[list[Tensor]]:
        halves = [half.pack(bucket) for half in self.halves]
        for _ in bucket.stacks:
            yield [next(half) for half in halves]
