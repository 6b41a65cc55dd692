"""Ranks that share the blocks of an optimizer: each fits ``Q`` of its own blocks, and sends their steps to the others.

Parameters may be replicated on all ranks, as with ``DistributedDataParallel``, or sharded as ``DTensor``s, as with
``fully_shard``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.agreement import Fact, RanksDifferError, compare
from ..ops.distributed import aligned, is_dtensor, local, slices_of
from ..ops.parameters import Flags, all_finite, subtract_
from ..ops.real import as_real, precise_dtype
from .assign import assign
from .base import Alone, Caught, Grads, Moves, Pairs, Ranks
from .dtensor import Shards

T = TypeVar("T")


def ranks_of(shard: Any, params: Sequence[Any]) -> Ranks:
    """Ranks of ``shard`` if it is given, else the ranks that hold sharded parameters, else this process alone."""
    tensors = [p for p in params if isinstance(p, Tensor)]
    meshes = list(dict.fromkeys(p.device_mesh for p in tensors if is_dtensor(p)))  # type: ignore[attr-defined]
    if shard is None and not meshes:
        return Alone()
    # With tensor parallelism some parameters are divided over all axes of a mesh, others over one of them.
    group = _group(max(meshes, key=lambda mesh: mesh.size()) if shard is None else shard)
    return Team(group, tensors[0].device)


class Team(Ranks):
    """Ranks of a process group.

    Args:
        group: the process group
        device: device of tensors that are sent
    """

    sends = True
    has_all = False

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.reset()

    def reset(self) -> None:
        #: rank that owns the block of each parameter, by position
        self.owners: dict[int, int] = {}
        #: total cost of a step of the blocks of each rank
        self.busy = [0.0] * self.size
        self._shards: Shards | None = None
        #: positions of the parameters that move in this step, on all ranks
        self._moving: list[int] = []

    def check_new(self, params: Iterable[Tensor], where: str) -> None:
        ours = set(dist.get_process_group_ranks(self.group))
        for p in params:
            if is_dtensor(p):
                mesh = p.device_mesh  # type: ignore[attr-defined]
                if not ours.issuperset(mesh.mesh.flatten().tolist()):
                    raise ValueError(
                        f"params{where}: some are divided over {mesh}, but ranks {sorted(ours)} share the work; PSGD "
                        "wants one mesh that all others are parts of, or shard= with the ranks of all meshes"
                    )
                slices_of(p)

    def keep(self, blocks: Sequence[T], positions: Callable[[T], Sequence[int]], cost: Callable[[T], float]) -> list[T]:
        costs = [cost(block) for block in blocks]
        owners = assign(costs, self.size, self.busy)
        for block, each, owner in zip(blocks, costs, owners, strict=True):
            self.busy[owner] += each
            self.owners.update(dict.fromkeys(positions(block), owner))
        self._shards = None
        return [block for block, owner in zip(blocks, owners, strict=True) if owner == self.rank]

    def catch(self) -> Caught:
        return Caught(keep=True)

    def owns(self, position: int) -> bool:
        return self.owners.get(position, self.rank) == self.rank

    def align(self, grads: Grads, params: Sequence[Tensor]) -> Grads:
        return {i: aligned(grad, params[i]) for i, grad in sorted(grads.items())}

    def gather(self, grads: Grads, pairs: Pairs, params: Sequence[Tensor]) -> tuple[Grads, Pairs, list[Tensor]]:
        flags = all_finite(map(local, grads.values()))
        self._moving = sorted(grads)
        mine = {i: grad for i, grad in grads.items() if self.owners[i] == self.rank}
        measured = {i: pair for i, pair in pairs.items() if self.owners[i] == self.rank}
        parts = {i: [local(t) for t in (grads[i], *pairs.get(i, ()))] for i in self._moving if is_dtensor(params[i])}
        if parts:
            del grads
            pairs.clear()
            dtype = precise_dtype([params[i] for i in parts])
            for i, (grad, *pair) in self._sharded(params).collect(parts, dtype).items():
                mine[i] = grad
                if pair:
                    measured[i] = (pair[0], pair[1])
        return mine, measured, flags

    def _sharded(self, params: Sequence[Tensor]) -> Shards:
        if self._shards is None:
            mine = {i: p for i, p in enumerate(params) if is_dtensor(p) and i in self.owners}
            self._shards = Shards(self, mine, self.owners)
        return self._shards

    def all_true(self, ok: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        together = {}
        for device, flag in ok.items():
            number = flag.to(self.device, torch.float32)
            dist.all_reduce(number, dist.ReduceOp.MIN, group=self.group)
            together[device] = (number > 0).to(flag.device)
        return together

    def length(self, mine: Tensor) -> Tensor:
        square = mine.to(torch.float64).square().to(self.device, copy=True)
        dist.all_reduce(square, group=self.group)
        return square.to(mine.device).sqrt()

    def move_(
        self, moves: Moves, params: Sequence[Tensor], group_of: Sequence[int], given: Collection[int], ok: Flags
    ) -> None:
        """Send the steps of this rank's blocks to the other ranks, and move all parameters by the steps of all."""

        def subtract(steps: Mapping[int, Tensor]) -> None:
            thetas = [as_real(local(params[i])) for i in steps]
            subtract_(thetas, list(steps.values()), [moves.decays[group_of[i]] for i in steps], ok)

        mine = dict(moves.steps())
        dtype = precise_dtype([params[i] for i in self._moving])
        divided = [i for i in self._moving if is_dtensor(params[i])]
        if divided:
            here = {i: mine[i] for i in divided if i in mine}
            subtract(self._sharded(params).deliver(here, divided, dtype))
        owners = {i: self.owners[i] for i in self._moving if not is_dtensor(params[i])}
        shapes = {i: as_real(params[i]).shape for i in owners}
        for steps in self.broadcast(mine, owners, shapes, dtype) if owners else ():
            subtract(steps)

    def own_part(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        if not isinstance(saved.get("state"), dict):
            return saved
        ids = [key for group in saved["param_groups"] for key in group["params"]]
        others = {key for i, key in enumerate(ids) if not self.owns(i)}
        state = {
            key: {k: v for k, v in entries.items() if k in ("step", "skipped")}
            if key in others and isinstance(entries, Mapping)
            else entries
            for key, entries in saved["state"].items()
        }
        return {**saved, "state": state}

    def check_copy(self) -> None:
        raise TypeError("PSGD: ranks share this one, so it cannot be copied or pickled; use its state_dict()")

    def same(self, what: str, facts: Callable[[], list[Fact]], advice: str, error: Exception | None = None) -> None:
        if isinstance(error, RanksDifferError):  # all ranks raise this error already
            raise error
        owned = Fact(lambda k: f"the owner of parameter {list(self.owners)[k]}", list(self.owners.values()))
        known = [*facts(), owned] if error is None else []
        compare(what, known, advice, error, self.group, self.device)

    def together(self, error: Exception | None, what: str) -> None:
        """Raise an error on the rank where it occurred, and on all other ranks an error that names the operation."""
        failed = torch.tensor(float(error is not None), device=self.device)
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=self.group)
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame, which would keep tensors of the closure alive
        if failed.item():
            raise RuntimeError(f"{what}: it failed on another rank, so it was not done on rank {self.rank} either")

    def exchange(self, outgoing: Sequence[Sequence[Tensor]], counts: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Send tensors to each rank, and receive ``counts`` elements from each rank, as flat tensors."""
        parts = [t.reshape(-1).to(self.device, dtype) for to_rank in outgoing for t in to_rank]
        flat = torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=self.device)
        received = torch.empty(sum(counts), dtype=dtype, device=self.device)
        sizes = [sum(t.numel() for t in to_rank) for to_rank in outgoing]
        dist.all_to_all_single(received, flat, list(counts), sizes, group=self.group)
        return list(received.split(list(counts)))

    def broadcast(
        self, mine: Mapping[int, Tensor], owners: Mapping[int, int], shapes: Mapping[int, Any], dtype: torch.dtype
    ) -> Iterator[dict[int, Tensor]]:
        """Tensors of all ranks by position, one rank after the other.

        While the tensors of one rank are used, those of the next rank are being sent.

        Args:
            mine: tensors of this rank
            owners: rank that holds the tensor of each position, the same on all ranks
            shapes: shapes of all tensors
            dtype: dtype of all tensors
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


def _group(shard: Any) -> Any:
    """Process group of ``shard``; for a device mesh, a group of all of its ranks."""
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
