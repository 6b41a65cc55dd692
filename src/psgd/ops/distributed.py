"""Distributed tensors (``DTensor``), of which each rank may hold a part, and means over ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: module that defines ``DTensor``; a program that never imported it has no such tensors, and the import costs a second
_DTENSOR = "torch.distributed.tensor"


def is_dtensor(t: Tensor) -> bool:
    """Whether ``t`` is a ``DTensor``, of which a rank may hold only a part."""
    return _DTENSOR in sys.modules and isinstance(t, sys.modules[_DTENSOR].DTensor)


def local(t: Tensor) -> Tensor:
    """Part of a tensor that this rank holds."""
    return t.to_local() if is_dtensor(t) else t  # type: ignore[attr-defined]


def slices_of(t: Tensor) -> tuple[slice, ...]:
    """Slices of a divided tensor that this rank holds."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    # With tensor parallelism and `fully_shard`, two axes of a mesh may divide one dimension. Torch calls this a strided
    # shard, but a rank still holds one slice.
    placements = t.placements  # type: ignore[attr-defined]
    known = all(type(p) in (Replicate, Shard, _StridedShard) for p in placements)
    if known and not t.is_complex():
        shape, offset = compute_local_shape_and_global_offset(t.shape, t.device_mesh, placements)  # type: ignore[attr-defined]
        if tuple(shape) == tuple(local(t).shape):
            return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
    raise ValueError(
        f"params: one of {t.dtype} and of shape {tuple(t.shape)} is divided as {placements}, and this rank holds "
        f"{tuple(local(t).shape)}; PSGD wants real ones, and of each one piece on a rank (Shard and Replicate)"
    )


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Part of a whole tensor that belongs to this rank if it is divided as ``like`` is, without communication."""
    return whole[slices_of(like)] if is_dtensor(like) else whole


def aligned(grad: Tensor, like: Tensor) -> Tensor:
    """Gradient, redistributed to the placements of its parameter if they differ; all ranks must call this function.

    Some layers with tensor parallelism return gradients with other placements.
    """
    if not is_dtensor(like):
        return grad
    if not is_dtensor(grad):
        raise ValueError(
            f"params: one of shape {tuple(like.shape)} is divided, its gradient is not; PSGD wants it to be"
        )
    same = grad.device_mesh == like.device_mesh and grad.placements == like.placements  # type: ignore[attr-defined]
    return grad if same else grad.redistribute(like.device_mesh, like.placements)  # type: ignore[attr-defined]


def several_ranks() -> bool:
    """Whether this is one of several processes."""
    return number_of_ranks() > 1


def number_of_ranks() -> int:
    """Number of processes of the default process group, or 1 if there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def average_(tensors: Iterable[Tensor], group: Any) -> None:
    """Replace tensors by their means over the ranks of a group."""
    tensors = list(tensors)
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    torch._foreach_div_(tensors, dist.get_world_size(group))
