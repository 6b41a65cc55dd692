"""Limits of the steps of blocks with a diagonal factor, which leaves more in a direction than a dense factor does."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..groups.base import Preconditioned, Scaled, joined
from ..ops.streams import at_once
from .stack import Stack

if TYPE_CHECKING:
    from .bucket import Bucket

#: largest root mean square of a slice along the axis of the factor, such as the row of an embedding, over ``max_rms``
SLICE = 3.0
#: largest spectral norm of a block, over ``max_rms`` times the spectral norm of white noise
SPECTRUM = 2.0


def limit_(bucket: Bucket, d: Preconditioned, length: Tensor, max_rms: float) -> tuple[Tensor, Tensor | None]:
    """Shorten slices to a root mean square of ``SLICE · max_rms``, and find the factors that limit spectral norms.

    Spectral norms are limited to ``SPECTRUM · max_rms (√n + √(numel / n))``. The last factor is the spectral norm of
    white noise, with ``n`` the length of the diagonal axis. A diagonal factor cannot remove a direction that many
    slices share: a step with the same root mean square is several times as long in it as with a dense factor, and a
    learning rate that suits dense factors is too large.

    Args:
        bucket: bucket of the blocks
        d: ``P m``, whose scales are changed
        length: length of ``P m`` of each block
        max_rms: largest root mean square of a block

    Returns:
        new length of each block, and the factor for each block that makes its spectral norm as large as is allowed,
        infinite for blocks without a diagonal factor; None if no block has one
    """
    axes = [stack.group.scale_axis for stack in bucket.stacks]
    if all(axis is None for axis in axes):
        return length, None
    lengths = bucket.split(length)
    divisors = [None] * len(axes) if d.divisor is None else bucket.split(d.divisor)
    each = zip(bucket.stacks, d.arrays, lengths, divisors, strict=True)
    # Tasks replace these tensors, but must not free what they read: other tasks could get that memory.
    read = [(a.scale, a.slices, a.stretch) for a in d.arrays]
    # The arrays are large, but reading them once, by one kernel each, leaves most of a device idle.
    new = at_once([partial(_limit_stack_, *of_stack, max_rms) for of_stack in each], lengths, bucket.device)
    del read
    return joined([length for length, _ in new]), joined([limit for _, limit in new])


def _limit_stack_(
    stack: Stack, a: Scaled, length: Tensor, divisor: Tensor | None, max_rms: float
) -> tuple[Tensor, Tensor]:
    """``limit_`` for the blocks of one stack."""
    axis = stack.group.scale_axis
    shorter = a.limit_slices_(SLICE * max_rms, divisor)
    norm = None if axis is None else a.spectral_norm(axis)
    if shorter is not None:
        length = (shorter if divisor is None else shorter / divisor).to(length.dtype)
    if axis is None or norm is None:
        return length, torch.full_like(length, torch.inf)
    norm = norm.to(length.dtype) if divisor is None else norm.to(length.dtype) / divisor
    n = stack.group.dims[axis]
    white = n**0.5 + (stack.blocks[0].numel / n) ** 0.5
    return length, SPECTRUM * max_rms * white / norm
