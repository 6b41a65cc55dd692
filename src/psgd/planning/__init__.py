"""Memory and work of an optimizer, computed before it is created."""

from .plan import plan
from .result import Plan, PlannedBlock, Rank

__all__ = ["Plan", "PlannedBlock", "Rank", "plan"]
