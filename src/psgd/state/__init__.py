"""State of the optimizer: how it is kept, checked, saved and loaded."""

from . import checkpoint, checks, options, summary
from .store import Store

__all__ = ["Store", "checkpoint", "checks", "options", "summary"]
