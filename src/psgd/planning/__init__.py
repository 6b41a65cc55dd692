"""Memory and work of an optimizer, before it is made."""

from .plan import plan
from .result import Plan, PlannedBlock, Rank

__all__ = ["Plan", "PlannedBlock", "Rank", "plan"]
