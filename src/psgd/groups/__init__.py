"""The Lie groups that ``Q`` may belong to, and the structures of ``P`` made of them."""

from .base import Factor, Group, Structure
from .diagonal import Diagonal
from .kronecker import Kronecker
from .limited_memory import LimitedMemory
from .low_rank import LowRank
from .triangular import Dense

__all__ = ["Dense", "Diagonal", "Factor", "Group", "Kronecker", "LimitedMemory", "LowRank", "Structure"]
