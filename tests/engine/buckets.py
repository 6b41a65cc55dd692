"""Buckets and stores without an optimizer, for tests."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from psgd import Kronecker
from psgd.blocks import PerTensor
from psgd.engine.bucket import Bucket
from psgd.engine.direction import Direction, Room
from psgd.engine.stack import Stack
from psgd.groups import Structure
from psgd.groups.base import Preconditioned, Scaled
from psgd.ranks import Alone
from psgd.state import Store

YES, NO = torch.tensor(True), torch.tensor(False)
CPU = torch.device("cpu")
SHAPES = [(3, 4), (3, 4), (5,)]  # two blocks in the first stack, one in the second


def bucket_of(
    group: int = 0,
    first: int = 0,
    momentum: bool = False,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    structure: Structure = Kronecker(),
) -> Bucket:
    """Bucket of three blocks of ``SHAPES``, whose parameters are at the positions from ``first`` on."""
    params = [torch.zeros(shape, dtype=dtype, device=device) for shape in SHAPES]
    blocks = PerTensor().divide(list(enumerate(params, first)))
    stacks = []
    for same in (blocks[:2], blocks[2:]):
        Q = structure.init(same[0].shape, batch=len(same), dtype=dtype, device=device)
        stacks.append(Stack(same, Q, {}, Stack.new_lengths(len(same), dtype, torch.device(device)), dtype))
        if momentum:
            stacks[-1].start_average()
    return Bucket(stacks, group, structure, None)


def grads_of(seed: int = 0, dtype: torch.dtype = torch.float64, first: int = 0) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {i: torch.randn(shape, generator=generator, dtype=dtype) for i, shape in enumerate(SHAPES, first)}


def options(lr: Any = 0.1, **others: Any) -> dict[str, Any]:
    """Numbers of a param group."""
    return {"lr": lr, "max_rms": math.inf, "max_norm": None, "weight_decay": 0.0, "maximize": False, **others}


def direction_of(
    bucket: Bucket, lengths: Sequence[float] | Tensor, divisor: Tensor | None = None, max_rms: float = math.inf
) -> Direction:
    """Direction of ones in every block; its lengths are as told, true or not."""
    arrays = [
        Scaled(torch.ones(len(stack.blocks), *stack.group.dims, dtype=bucket.dtype, device=bucket.device), None)
        for stack in bucket.stacks
    ]
    length = torch.as_tensor(lengths, dtype=bucket.dtype, device=bucket.device)
    d = Preconditioned(arrays, length, divisor)
    limits = {"max_rms": max_rms, "clip_steps": math.inf}
    return bucket.direction(d, limits, None, True, YES, Room(bucket))


def store_of(*groups: Sequence[nn.Parameter], structure: Structure = Kronecker(), **numbers: Any) -> Store:
    """Store of an optimizer with such param groups."""
    store = Store(structure, PerTensor(), None, None, Alone())
    given = [{"params": list(group), "momentum": 0.9, **numbers} for group in groups]
    store.attach(defaultdict(dict), given)
    for index, group in enumerate(given):
        store.adopt(index, group)
    return store
