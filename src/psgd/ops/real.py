"""Parameters as real arrays: a complex array of shape ``(…)`` is viewed as a real one of shape ``(…, 2)``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def as_real(t: Tensor) -> Tensor:
    """Real view of ``t``; a copy if ``t`` is a complex tensor with a pending conjugation."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def from_real(values: Tensor, like: Tensor) -> Tensor:
    """Inverse of ``as_real``: ``values`` viewed as a tensor of the kind of ``like``."""
    return torch.view_as_complex(values) if like.is_complex() else values


def precise_dtype(params: Sequence[Tensor]) -> torch.dtype:
    """Dtype of averages and steps, and of ``Q`` unless told otherwise: the parameters', but at least float32."""
    dtype = torch.float32
    for p in params:
        dtype = torch.promote_types(dtype, as_real(p).dtype)
    return dtype
