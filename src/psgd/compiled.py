"""Triton, which comes with torch for CUDA, or None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    from triton import language as tl
except ImportError:  # torch for CPUs comes without it
    triton = tl = None

__all__ = ["jit", "tl", "triton"]


def jit(function: Callable[..., Any]) -> Any:
    """One kernel for all shapes, as compiling takes longer than many steps; nothing where there is no Triton."""
    return None if triton is None else triton.jit(do_not_specialize=["numel", "n", "after"])(function)
