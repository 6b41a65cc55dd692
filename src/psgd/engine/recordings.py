"""CUDA graphs of an optimizer, with the memory that they read and write besides its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .bucket import Bucket
from .graphs import Graphs
from .tensors import TensorsAtAddresses


@dataclass
class Recordings:
    """CUDA graphs of the steps of some buckets, and the memory at fixed addresses that these graphs share."""

    buckets: set[Bucket]
    graphs: Graphs
    #: arrays of addresses, by the name of the tensors and their buckets
    tensors: dict[tuple[str, tuple[Bucket, ...]], TensorsAtAddresses] = field(default_factory=dict)
    #: buffers for directions, which all graphs share, see ``buffers_for``
    buffers: dict[Bucket, Tensor] = field(default_factory=dict)

    def at_addresses(
        self, name: str, buckets: tuple[Bucket, ...], by_position: Mapping[int, Tensor]
    ) -> TensorsAtAddresses:
        """Tensors of some buckets; their current addresses are written to the same arrays at every call."""
        if (name, buckets) not in self.tensors:
            self.tensors[name, buckets] = TensorsAtAddresses(buckets)
        self.tensors[name, buckets].point(by_position)
        return self.tensors[name, buckets]

    def buffers_for(self, buckets: Sequence[Bucket]) -> dict[Bucket, Tensor]:
        """Buffers for the directions of buckets: graphs whose results are directions share one copy of them."""
        for bucket in buckets:
            if bucket not in self.buffers:
                self.buffers[bucket] = torch.empty(bucket.starts[-1], dtype=bucket.Q.dtype, device=bucket.device)
        return self.buffers
