"""Ranks that share the blocks of an optimizer: each keeps ``Q`` of its own blocks, and sends their steps to the others.

Parameters may be the same on all ranks, as with ``DistributedDataParallel``, or ``DTensor``s, of which each rank holds
a part, as with ``fully_shard``. In both cases whole gradients are preconditioned, never parts of them, so the result
does not depend on how parameters are divided.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.distributed import is_divided


def _slices(t: Tensor) -> tuple[slice, ...]:
    """What of a divided tensor is here."""
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


class Team:
    """The ranks of a process group.

    Args:
        group: the process group
        device: of what is sent
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    @classmethod
    def of(cls, shard: Any, params: Sequence[Any]) -> Team | None:
        """Those that ``shard`` names, or else those that hold parts of the parameters; None where there is no one."""
        tensors = [p for p in params if isinstance(p, Tensor)]
        meshes = list(dict.fromkeys(p.device_mesh for p in tensors if is_divided(p)))  # type: ignore[attr-defined]
        if shard is None and not meshes:
            return None
        if len(meshes) > 1:
            raise ValueError(f"params: they are divided over {meshes[0]} and over {meshes[1]}; PSGD wants one mesh")
        group = _group(meshes[0] if shard is None else shard)
        if meshes and sorted(dist.get_process_group_ranks(group)) != sorted(meshes[0].mesh.flatten().tolist()):
            raise ValueError(
                f"shard={shard!r}: its ranks are {dist.get_process_group_ranks(group)}, but the parameters are divided "
                f"over {meshes[0]}; PSGD wants the same ranks, or shard=None"
            )
        return cls(group, tensors[0].device)

    def all_true(self, flag: Tensor) -> Tensor:
        """Whether a flag is true on all ranks."""
        number = flag.to(self.device, torch.float32)
        dist.all_reduce(number, dist.ReduceOp.MIN, group=self.group)
        return (number > 0).to(flag.device)

    def sum(self, values: Tensor) -> Tensor:
        total = values.to(self.device, copy=True)
        dist.all_reduce(total, group=self.group)
        return total.to(values.device)

    def same(self, what: str, value: Any, advice: str, error: Exception | None = None) -> None:
        """Raise on all ranks unless all have the same value, told by its ``repr``; the host waits for it.

        A rank that has an error raises that; its value must differ from those of the others.
        """
        digest = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")
        both = torch.tensor([digest, -digest], dtype=torch.int64, device=self.device)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self.group)
        largest, least = both.tolist()
        if error is not None:
            raise error
        if largest != -least:
            raise RuntimeError(
                f"{what}: not the same on all {self.size} ranks, or failed on another (this is {self.rank}); {advice}"
            )

    def together(self, error: Exception | None, what: str) -> None:
        """Raise an error on the rank that has one, and on all others another that says so."""
        failed = torch.tensor(float(error is not None), device=self.device)
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=self.group)
        if error is not None:
            raise error
        if failed.item():
            raise RuntimeError(f"{what}: it failed on another rank, so it was not done on rank {self.rank} either")

    def exchange(self, outgoing: Sequence[Sequence[Tensor]], counts: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Send tensors to each rank, and receive as many numbers as agreed upon from each, as flat tensors."""
        parts = [t.reshape(-1).to(self.device, dtype) for to_rank in outgoing for t in to_rank]
        flat = torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=self.device)
        received = torch.empty(sum(counts), dtype=dtype, device=self.device)
        sizes = [sum(t.numel() for t in to_rank) for to_rank in outgoing]
        dist.all_to_all_single(received, flat, list(counts), sizes, group=self.group)
        return list(received.split(list(counts)))

    def broadcast(
        self, mine: Mapping[int, Tensor], owners: Mapping[int, int], shapes: Mapping[int, Any], dtype: torch.dtype
    ) -> Iterator[dict[int, Tensor]]:
        """What the ranks have, by position, rank by rank; while one is being used, the next is on its way.

        Args:
            mine: what this rank has
            owners: which rank has what, the same on all ranks
            shapes: of all of them
            dtype: of all of them
        """
        positions = [[i for i in sorted(owners) if owners[i] == rank] for rank in range(self.size)]

        def begin(rank: int) -> tuple[Tensor, Any]:
            if rank == self.rank:
                parts = [mine[i].reshape(-1).to(self.device, dtype) for i in positions[rank]]
                flat = torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=self.device)
            else:
                flat = torch.empty(sum(shapes[i].numel() for i in positions[rank]), dtype=dtype, device=self.device)
            source = dist.get_global_rank(self.group, rank)
            return flat, dist.broadcast(flat, source, group=self.group, async_op=True) if len(flat) else None

        following = begin(0)
        for rank in range(self.size):
            flat, work = following
            if rank + 1 < self.size:
                following = begin(rank + 1)
            if work is not None:
                work.wait()
            parts = flat.split([shapes[i].numel() for i in positions[rank]])
            yield {i: part.view(shapes[i]) for i, part in zip(positions[rank], parts, strict=True)}


class Divided:
    """Parameters of which each rank holds a part, while one has the block that they belong to.

    Args:
        team: the ranks
        params: by position
        owners: by position the rank that has the block
    """

    def __init__(self, team: Team, params: Mapping[int, Tensor], owners: Mapping[int, int]) -> None:
        self.team = team
        self.owners = owners
        self.shapes = {i: p.shape for i, p in params.items()}
        everyone: list[Any] = [None] * team.size
        dist.all_gather_object(everyone, {i: _slices(p) for i, p in params.items()}, group=team.group)
        #: by rank and position, what it holds
        self.parts: list[dict[int, tuple[slice, ...]]] = everyone
        #: by rank, what it sends to the owner: of copies only one is sent
        self.sends: list[set[int]] = []
        for rank, held in enumerate(self.parts):
            before = self.parts[:rank]
            self.sends.append({i for i, part in held.items() if all(parts[i] != part for parts in before)})

    def collect(self, parts: Mapping[int, Sequence[Tensor]], dtype: torch.dtype) -> dict[int, list[Tensor]]:
        """Whole tensors for the blocks of this rank, from the parts of several tensors on all ranks."""
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
        """The parts that belong here of whole tensors that other ranks have."""
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


def _group(shard: Any) -> Any:
    """One process group of all ranks of a mesh."""
    from torch.distributed import device_mesh

    if not isinstance(shard, dist.ProcessGroup | device_mesh.DeviceMesh):
        raise TypeError(f"shard={shard!r}: PSGD wants a process group, a device mesh or None")
    if isinstance(shard, dist.ProcessGroup):
        return shard
    if shard.ndim == 1:
        return shard.get_group()
    ranks = shard.mesh.flatten().tolist()
    if sorted(ranks) == list(range(dist.get_world_size())):
        return dist.group.WORLD
    return shard._flatten().get_group()
