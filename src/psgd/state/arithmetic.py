"""Arithmetic of processors: whether they compute in bfloat16 or have to emulate it."""

from __future__ import annotations

import platform
from collections.abc import Iterable

import torch
from torch import Tensor

from ..notice import warn


def has_bfloat16(device: torch.device) -> bool:
    """Whether products of bfloat16 matrices are at least as fast as those of float32; True if this is unknown."""
    if device.type == "cuda":
        return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type != "cpu" or _cpu_has_bfloat16()


def _cpu_has_bfloat16() -> bool:
    """Whether oneDNN has kernels for bfloat16 and, on x86, the CPU has instructions for it.

    With AVX-512 but without these instructions, oneDNN converts every number.
    """
    try:
        kernels = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        x86 = platform.machine().lower() in ("x86_64", "amd64")
        return kernels and (not x86 or bool(torch.cpu._is_avx512_bf16_supported()))
    except (AttributeError, RuntimeError):  # private functions of torch, which another version may not have
        return True


def warn_if_emulated(dtype: torch.dtype | None, params: Iterable[Tensor]) -> None:
    """Warn if a device of the parameters has to emulate products of this dtype of ``Q``."""
    if dtype != torch.bfloat16:
        return
    for device in {p.device for p in params if isinstance(p, Tensor)}:
        if not has_bfloat16(device):
            warn(
                f"precond_dtype={dtype}: products of bfloat16 are emulated on this {device}, which has no arithmetic "
                "for it; torch.float32 is several times faster there, or many times"
            )
