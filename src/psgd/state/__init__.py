"""State of the optimizer: how it is kept, checked, saved and loaded."""

from . import adding, arithmetic, checkpoint, checks, facts, options, spelling, summary
from .defaults import Given
from .loading import loading
from .skips import SkipCheck
from .store import Store

__all__ = [
    "Given",
    "SkipCheck",
    "Store",
    "adding",
    "arithmetic",
    "checkpoint",
    "checks",
    "facts",
    "loading",
    "options",
    "spelling",
    "summary",
]
