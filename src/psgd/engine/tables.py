"""Tables of the parameters of a bucket, for kernels that process all of them in one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from torch import Tensor

from ..ops.factors import MOST
from ..ops.tensor_table import TensorTable

if TYPE_CHECKING:
    from .bucket import Bucket


def new_table(bucket: Bucket, thetas: Sequence[Tensor], moves: bool) -> TensorTable | None:
    """Table of parameters with the offsets of their directions, scales and slices; None if kernels cannot read them.

    Args:
        bucket: a bucket in which each block is one parameter
        thetas: these parameters as real tensors, or tensors of the same kind
        moves: whether kernels move the parameters
    """
    alike = {(theta.device, theta.dtype, theta.is_contiguous() or not moves) for theta in thetas}
    small = all(theta.numel() < MOST for theta in thetas)
    if not (small and alike == {(bucket.device, thetas[0].dtype, True)}):
        return None
    starts, scales, used = [], [], 1  # scale 0 is one, for blocks without a diagonal factor
    axes: list[list[tuple[int, int, int]]] = []
    slices = 0
    for stack, start in zip(bucket.stacks, bucket.starts, strict=False):
        dims, axis, numel = stack.group.dims, stack.group.scale_axis, stack.blocks[0].numel
        count = len(stack.blocks)
        places = [(n, math.prod(dims[k + 1 :])) for k, n in enumerate(dims)]
        firsts = list(accumulate((count * n for n in dims), initial=slices))
        slices = firsts.pop()
        n, after = (1, numel) if axis is None else places[axis]
        for row in range(count):
            starts.append(start + row * numel)
            scales.append((0 if axis is None else used + row * n, n, after))
            axes.append([(first + row * of[0], *of) for first, of in zip(firsts, places, strict=True)])
        used += 0 if axis is None else n * count
    return TensorTable(thetas, starts, scales, axes, moves)
