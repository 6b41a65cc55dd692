"""Ranks: processes that share the work of a step."""

from .base import Alone, Ranks
from .team import Team, ranks_of

__all__ = ["Alone", "Ranks", "Team", "ranks_of"]
