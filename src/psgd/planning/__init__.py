"""What an optimizer will take, before it is made."""

from .plan import plan
from .result import Plan, PlannedBlock, Rank

__all__ = ["Plan", "PlannedBlock", "Rank", "plan"]
