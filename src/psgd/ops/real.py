"""Parameters as real arrays: a complex array of shape ``(…)`` is seen as a real one of shape ``(…, 2)``."""

from __future__ import annotations

import torch
from torch import Tensor


def real(t: Tensor) -> Tensor:
    """A real view of ``t``; of a complex tensor that is conjugated lazily, a copy."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def like(t: Tensor, values: Tensor) -> Tensor:
    """Undo ``real``: ``values`` seen as a tensor of the kind of ``t``."""
    return torch.view_as_complex(values) if t.is_complex() else values
