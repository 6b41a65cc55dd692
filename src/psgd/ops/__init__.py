"""Primitives: a torch reference of each and, where it pays, a Triton twin."""

from .distributed import part_of
from .real import as_real

__all__ = ["as_real", "part_of"]
