"""Sharded parameters, as with ``fully_shard``: their gradients are gathered on the rank that owns their block.

Whole gradients are preconditioned, never parts of them, so the result does not depend on how parameters are divided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.distributed import slices_of


class Exchange(Protocol):
    """Ranks that can send parts of tensors to each other."""

    rank: int
    size: int
    group: Any
    device: torch.device

    def exchange(
        self, outgoing: Sequence[Sequence[Tensor]], counts: Sequence[int], dtype: torch.dtype
    ) -> list[Tensor]: ...


class Shards:
    """Sharded parameters: each rank holds a part of a parameter, and one rank owns the block that it belongs to.

    Args:
        team: the ranks
        params: parameters by position
        owners: rank that owns the block of each parameter, by position
    """

    def __init__(self, team: Exchange, params: Mapping[int, Tensor], owners: Mapping[int, int]) -> None:
        self.team = team
        self.owners = owners
        self.shapes = {i: p.shape for i, p in params.items()}
        everyone: list[Any] = [None] * team.size
        dist.all_gather_object(everyone, {i: slices_of(p) for i, p in params.items()}, group=team.group)
        #: slices that each rank holds, by rank and position
        self.parts: list[dict[int, tuple[slice, ...]]] = everyone
        #: positions of the parts that each rank sends to their owners; if several ranks hold a part, only one sends it
        self.sends: list[set[int]] = []
        for rank, held in enumerate(self.parts):
            before = self.parts[:rank]
            self.sends.append({i for i, part in held.items() if all(parts[i] != part for parts in before)})
        for i, shape in self.shapes.items():
            _check_tiles(shape, [parts[i] for parts in self.parts])

    def collect(self, parts: Mapping[int, Sequence[Tensor]], dtype: torch.dtype) -> dict[int, list[Tensor]]:
        """Whole tensors of the blocks of this rank, gathered from the parts on all ranks.

        A parameter may have several tensors, such as its gradient and its pair.
        """
        team = self.team
        outgoing: list[list[Tensor]] = [[] for _ in range(team.size)]
        for i in sorted(parts):
            if i in self.sends[team.rank]:
                outgoing[self.owners[i]] += parts[i]
        mine = [i for i in sorted(parts) if self.owners[i] == team.rank]
        pieces = [[(i, k) for i in mine if i in sent for k in range(len(parts[i]))] for sent in self.sends]
        counts = [sum(_numel(self.parts[rank][i]) for i, _ in from_rank) for rank, from_rank in enumerate(pieces)]
        whole = {i: [torch.empty(self.shapes[i], dtype=dtype, device=team.device) for _ in parts[i]] for i in mine}
        for rank, received in enumerate(team.exchange(outgoing, counts, dtype)):
            held = self.parts[rank]
            sizes = [_numel(held[i]) for i, _ in pieces[rank]]
            for (i, k), piece in zip(pieces[rank], received.split(sizes), strict=True):
                target = whole[i][k][held[i]]
                target.copy_(piece.view(target.shape))
        return whole

    def deliver(self, mine: Mapping[int, Tensor], moving: Sequence[int], dtype: torch.dtype) -> dict[int, Tensor]:
        """Parts of this rank, scattered from whole tensors on the ranks that own them."""
        team = self.team
        here = self.parts[team.rank]
        outgoing = [[mine[i][held[i]] for i in moving if i in mine] for held in self.parts]
        coming = [[i for i in moving if self.owners[i] == rank] for rank in range(team.size)]
        counts = [sum(_numel(here[i]) for i in from_rank) for from_rank in coming]
        found: dict[int, Tensor] = {}
        for from_rank, received in zip(coming, team.exchange(outgoing, counts, dtype), strict=True):
            for i, piece in zip(from_rank, received.split([_numel(here[i]) for i in from_rank]), strict=True):
                found[i] = piece.view([s.stop - s.start for s in here[i]])
        return found


def _numel(part: tuple[slice, ...]) -> int:
    return math.prod(s.stop - s.start for s in part)


def _check_tiles(shape: Sequence[int], parts: Sequence[tuple[slice, ...]]) -> None:
    """Raise unless slices divide every axis into pieces that touch and do not overlap."""
    for axis, size in enumerate(shape):
        pieces = sorted({(part[axis].start, part[axis].stop) for part in parts if _numel(part)})
        if [0, *(stop for _, stop in pieces)] != [*(start for start, _ in pieces), size]:
            raise ValueError(
                f"params: one of shape {tuple(shape)} is divided into {pieces} along axis {axis}; PSGD wants pieces "
                "that touch and do not overlap"
            )
