"""Division of work of known costs among ranks, by a rule that gives every rank the same answer."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

#: FLOPs that cost as much time as the memory traffic of one byte of state. A step of a matrix reads or writes arrays of
#: its size 16 times: gradients 2, averages 3, whitening along two axes 6, the step 2, parameters 3. In the time of
#: reading one byte, a device can do about 200 FLOPs (H200: 989 TFLOP/s, 4.8 TB/s).
FLOPS_PER_BYTE = 16 * 200


def cost(flops: float, nbytes: int) -> float:
    """Time of a step of a block, in FLOPs: its products, and the memory traffic of its state.

    A rough measure is enough, as long as neither the work nor the memory of a rank becomes much too large.
    """
    return flops + FLOPS_PER_BYTE * nbytes


def cost_of(group: Any, average_bytes: int) -> float:
    """Cost of a block, independent of the options of its param group, which may change in training; owners may not."""
    return cost(sum(group.flops()), group.nbytes() + average_bytes)


def assign(costs: Sequence[float], world_size: int, busy: Sequence[float] | None = None) -> list[int]:
    """Rank of each piece of work: the costliest is assigned first, each to the rank with the least work so far.

    Ranks may be ``busy`` already. Equal costs are assigned in their order, and among equally busy ranks the lowest is
    chosen, so ranks need not communicate. If none was busy, the busiest rank has at most ``4/3 − 1/(3 world_size)``
    times the work that it would have with the best division (Graham, 1969).

    >>> assign([3, 1, 4, 1, 5], 2)
    [1, 0, 1, 0, 0]
    """
    ranks = sorted((load, rank) for rank, load in enumerate(busy or [0.0] * world_size))
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, owners[i] = ranks[0]
        heapq.heapreplace(ranks, (load + costs[i], owners[i]))
    return owners
