"""Primitive operations: each has a reference in torch and, if it pays, a Triton kernel."""

from .distributed import part_of
from .real import as_real

__all__ = ["as_real", "part_of"]
