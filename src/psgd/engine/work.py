"""The work of one step, once the probe has measured: what moves, and by what."""

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
    """Buckets, gradients and pairs of one step, with everything that decides on it.

    Args:
        buckets: blocks that have gradients
        grads: their gradients
        pairs: the pairs that were measured
        due: for each param group whose ``Q`` is to be updated what else that update does, see ``Probe.chores``
        groups: the param groups
        noise: returns standard normal numbers for the parameter at a position
        given: positions of the parameters that have gradients
        flags: what decides so far whether the step is taken
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
    #: whether the step is taken, for each device
    ok: Flags = field(default_factory=dict)
    #: buffers for directions that outlast the step; other buckets get a new one, see ``room``
    buffers: Mapping[Bucket, Tensor] = field(default_factory=dict)

    def find_lengths(self) -> list[Tensor]:
        """Find the lengths of all gradients; return flags that say whether they are finite."""
        self.lengths = {bucket: self.grads.lengths(bucket) for bucket in self.buckets}
        return [flag for lengths in self.lengths.values() for flag in flags.are_finite(lengths)]

    def room(self, bucket: Bucket) -> Room:
        """Room for the directions of a bucket."""
        return Room(bucket, self.buffers.get(bucket))

    def limit_(self, bucket: Bucket, most: float, ok: Tensor) -> Tensor | None:
        """Factor that limits the gradient of each block of a bucket, or None, see ``Bucket.limit_``."""
        return bucket.limit_(self.lengths[bucket], most, ok, self.grads.can_look(bucket))

    def measured(self, bucket: Bucket, m: Average, limit: Tensor | None, start: bool, room: Room) -> Measured:
        """Everything that the probe needs to fit all ``Q`` of a bucket.

        Args:
            bucket: the bucket
            m: averaged gradients
            limit: factor that limits the gradient of each block, or None
            start: whether a ``Q`` that is still the identity starts at the size that its first pair shows
            room: where ``P m`` is to be
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
