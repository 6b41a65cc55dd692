"""Power iteration: an estimate of the largest absolute eigenvalue, which except for rounding is never too large."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def power_iteration(
    A: Callable[[Tensor], Tensor], v: Tensor, iterations: int, length: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``v ← A (v / ‖v‖)``, repeated ``iterations`` times, for every column of a stack.

    Args:
        A: symmetric linear map
        v: start vectors, ``(B, n, k)``
        iterations: number of products
        length: ``‖v‖``, ``(B, 1, k)``, if it is known

    Returns:
        the last ``v``, and its length ``(B, 1, k)`` in float32 or better: at most the largest ``|λ|``, and close to it
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    tiny = torch.finfo(dtype).tiny
    if length is None:
        length = torch.linalg.vector_norm(v, dim=1, keepdim=True, dtype=dtype)
    for _ in range(iterations):
        v = A(v / length.clamp_min(tiny).to(v.dtype))
        length = torch.linalg.vector_norm(v, dim=1, keepdim=True, dtype=dtype)
    return v, length
