"""State of the optimizer: how it is kept, checked, saved and loaded."""

from . import arithmetic, checkpoint, checks, facts, options, spelling, summary
from .choices import Choices
from .defaults import Given
from .loading import loading
from .skips import SkipCheck
from .store import Store

__all__ = [
    "Choices",
    "Given",
    "SkipCheck",
    "Store",
    "arithmetic",
    "checkpoint",
    "checks",
    "facts",
    "loading",
    "options",
    "spelling",
    "summary",
]
