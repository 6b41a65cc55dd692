"""State of the optimizer: how it is kept, checked, saved and loaded."""

from . import checkpoint, checks, facts, options, summary
from .choices import Choices
from .loading import loading
from .store import Store

__all__ = ["Choices", "Store", "checkpoint", "checks", "facts", "loading", "options", "summary"]
