"""What the optimizer keeps, checks, saves and loads."""

from . import checkpoint, checks, options, summary
from .store import Store

__all__ = ["Store", "checkpoint", "checks", "options", "summary"]
