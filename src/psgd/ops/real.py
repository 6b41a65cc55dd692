"""Parameters as real arrays: a complex array of shape ``(…)`` is viewed as a real one of shape ``(…, 2)``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, reduce

import torch
from torch import Tensor


def as_real(t: Tensor) -> Tensor:
    """Real view of ``t``; a copy if ``t`` is a complex tensor with a pending conjugation."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def from_real(values: Tensor, like: Tensor) -> Tensor:
    """Inverse of ``as_real``: ``values`` viewed as a tensor of the kind of ``like``."""
    return torch.view_as_complex(values) if like.is_complex() else values


def shaped(t: Tensor, shape: Sequence[int]) -> Tensor:
    """``t.reshape(shape)``, but without a call of torch if ``t`` has this shape already."""
    return t if t.shape == shape else t.reshape(shape)


def precise_dtype(params: Sequence[Tensor]) -> torch.dtype:
    """Dtype of averages and steps, and the default of ``Q``: that of the parameters, but at least float32."""
    return _precise_dtype(frozenset(p.dtype for p in params))


@cache
def _precise_dtype(dtypes: frozenset[torch.dtype]) -> torch.dtype:
    return reduce(torch.promote_types, dtypes, torch.float32).to_real()
