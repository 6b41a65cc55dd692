"""Parameters of which each rank holds a part, as with ``fully_shard``: their gradients made whole for one rank.

Whole gradients are preconditioned, never parts of them, so the result does not depend on how parameters are divided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange(Protocol):
    """Ranks that can send parts of tensors to each other."""

    rank: int
    size: int
    group: Any
    device: torch.device

    def exchange(
        self, outgoing: Sequence[Sequence[Tensor]], counts: Sequence[int], dtype: torch.dtype
    ) -> list[Tensor]: ...


def _slices(t: Tensor) -> tuple[slice, ...]:
    """Slices of a divided tensor that this rank holds."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements = t.placements  # type: ignore[attr-defined]
    if t.is_complex() or not all(type(p) in (Replicate, Shard) for p in placements):
        raise ValueError(
            f"params: one of {t.dtype} and of shape {tuple(t.shape)} is divided as {placements}; PSGD wants real ones, "
            "and of each one piece on a rank (Shard and Replicate)"
        )
    shape, offset = compute_local_shape_and_global_offset(t.shape, t.device_mesh, placements)  # type: ignore[attr-defined]
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


class Shards:
    """Parameters of which each rank holds a part, while one rank owns the block that they belong to.

    Args:
        team: the ranks
        params: parameters by position
        owners: rank that owns the block of a parameter, by position
    """

    def __init__(self, team: Exchange, params: Mapping[int, Tensor], owners: Mapping[int, int]) -> None:
        self.team = team
        self.owners = owners
        self.shapes = {i: p.shape for i, p in params.items()}
        everyone: list[Any] = [None] * team.size
        dist.all_gather_object(everyone, {i: _slices(p) for i, p in params.items()}, group=team.group)
        #: slices that a rank holds, by rank and position
        self.parts: list[dict[int, tuple[slice, ...]]] = everyone
        #: positions of the parts that a rank sends to their owners; only one rank sends a part that several hold
        self.sends: list[set[int]] = []
        for rank, held in enumerate(self.parts):
            before = self.parts[:rank]
            self.sends.append({i for i, part in held.items() if all(parts[i] != part for parts in before)})

    def collect(self, parts: Mapping[int, Sequence[Tensor]], dtype: torch.dtype) -> dict[int, list[Tensor]]:
        """Whole tensors of the blocks of this rank, from the parts on all ranks; several for each parameter."""
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
        """Parts that this rank holds, from whole tensors on the ranks that own them."""
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
