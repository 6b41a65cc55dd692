"""Work of one step after the probe has measured: the buckets that move, and the gradients and pairs they use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..ops.parameters import Flags
from ..probes import Average, Measured
from . import flags
from .bucket import Bucket
from .direction import Room
from .tensors import Pairs, Tensors


@dataclass
class Work:
    """Buckets, gradients, pairs and options of one step, and the flags that decide whether it is taken.

    Args:
        buckets: buckets of the blocks that have gradients
        grads: their gradients
        pairs: measured pairs
        due: further work of the update of ``Q``, see ``Probe.chores``, for each param group whose ``Q`` is updated
        groups: param groups
        noise: function that returns standard normal numbers for the parameter at a position
        given: positions of the parameters that have gradients
        flags: flags found before the lengths of gradients are known; the step is skipped if one is false
    """

    buckets: Sequence[Bucket]
    grads: Tensors
    pairs: Pairs
    due: Mapping[int, Hashable]
    groups: Sequence[Mapping[str, Any]]
    noise: Callable[[int], Tensor]
    given: Collection[int]
    flags: list[Tensor] = field(default_factory=list)
    #: length of the gradient of each block, see ``find_lengths``
    lengths: dict[Bucket, Tensor] = field(default_factory=dict)
    #: whether the step is taken, as one flag for each device
    ok: Flags = field(default_factory=dict)
    #: buffers that keep directions after the step; a bucket without one allocates a new buffer, see ``room``
    buffers: Mapping[Bucket, Tensor] = field(default_factory=dict)

    def find_lengths(self) -> list[Tensor]:
        """Compute the lengths of all gradients; return flags that tell whether they are finite."""
        self.lengths = {bucket: self.grads.lengths(bucket) for bucket in self.buckets}
        return [flag for lengths in self.lengths.values() for flag in flags.are_finite(lengths)]

    def room(self, bucket: Bucket) -> Room:
        """Buffer for the directions of a bucket."""
        return Room(bucket, self.buffers.get(bucket))

    def limit_(self, bucket: Bucket, most: float, ok: Tensor) -> Tensor | None:
        """Factor that limits the gradient of each block of a bucket, or None, see ``Bucket.limit_``."""
        return bucket.limit_(self.lengths[bucket], most, ok, self.grads.can_look(bucket))

    def measured(self, bucket: Bucket, m: Average, limit: Tensor | None, start: bool, room: Room) -> Measured:
        """Measurements from which the probe fits all ``Q`` of a bucket.

        Args:
            bucket: the bucket
            m: averaged gradients
            limit: factor that limits the gradient of each block, or None
            start: whether a ``Q`` that is still the identity is first scaled to the size that its first pair shows
            room: buffer for ``P m``
        """
        return Measured(
            average=m,
            gradients=lambda: bucket.limited(self.grads, limit),
            pairs=self.pairs.take(bucket),
            noise=(stack.pack({i: self.noise(i) for i in stack.params()}) for stack in bucket.stacks),
            sign=-1.0 if self.groups[bucket.group]["maximize"] else 1.0,
            chores=self.due[bucket.group],
            outs=room.outs,
            support=lambda: self.grads.support(bucket),
            start=start,
        )
