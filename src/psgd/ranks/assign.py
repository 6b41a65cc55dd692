"""Who does what: work of known costs divided among ranks, by a rule that gives every rank the same answer."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

#: A step of a matrix reads or writes arrays of its size 16 times: gradients 2, averages 3, whitening along two axes 6,
#: the step 2, parameters 3. For each byte a device could do about 200 FLOPs meanwhile (H200: 989 TFLOP/s, 4.8 TB/s).
FLOPS_PER_BYTE = 16 * 200


def cost(flops: float, nbytes: int) -> float:
    """How long a block takes, in FLOPs: its products, and going over its state, which for diagonal factors is all.

    A rough measure will do. What matters is that neither the work nor the memory of a rank gets out of hand.
    """
    return flops + FLOPS_PER_BYTE * nbytes


def cost_of(group: Any, average_bytes: int) -> float:
    """That of a block, whatever numbers its param group has: those change while training, and owners must not."""
    return cost(sum(group.flops()), group.nbytes() + average_bytes)


def assign(costs: Sequence[float], world_size: int, busy: Sequence[float] | None = None) -> list[int]:
    """The rank of each piece of work: the costliest first, each to the rank that has least to do so far.

    Ranks may be ``busy`` already. Of equal costs the first comes first, of equally busy ranks the lowest: there is
    nothing to agree upon. Where none was busy, the busiest rank has at most ``4/3 − 1/(3 world_size)`` times as much
    to do as it would have at best (Graham, 1969).

    >>> assign([3, 1, 4, 1, 5], 2)
    [1, 0, 1, 0, 0]
    """
    ranks = sorted((load, rank) for rank, load in enumerate(busy or [0.0] * world_size))
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, owners[i] = ranks[0]
        heapq.heapreplace(ranks, (load + costs[i], owners[i]))
    return owners
