"""Lie groups that ``Q`` may belong to, and the structures of ``P`` that they form."""

from .base import Factor, Group, Groups, Structure
from .diagonal import Diagonal
from .kronecker import Kronecker
from .limited_memory import LimitedMemory
from .low_rank import LowRank
from .triangular import Dense

__all__ = ["Dense", "Diagonal", "Factor", "Group", "Groups", "Kronecker", "LimitedMemory", "LowRank", "Structure"]
