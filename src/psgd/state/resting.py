"""Blocks that have had no gradient for a while, as those of layers that a model never uses."""

from __future__ import annotations

from ..blocks import Block

#: number of steps in a row at which the same blocks have no gradient before they are stacked apart
PATIENCE = 3


class Resting:
    """Decides which blocks are stacked apart from the others, so that the steps of the others can be recorded.

    A bucket of which some blocks have no gradient cannot be recorded. Stacking costs a copy of the state and all
    recordings, so the number of steps to wait doubles each time.
    """

    def __init__(self) -> None:
        #: blocks that are stacked apart
        self.apart: frozenset[Block] = frozenset()
        self._last: frozenset[Block] = frozenset()
        self._times = 0
        self._patience: float = PATIENCE

    def changes(self, without: frozenset[Block]) -> bool:
        """Note which blocks have no gradient at a step, and return whether ``apart`` is another set of blocks now."""
        self._times = self._times + 1 if without == self._last else 1
        self._last = without
        if without == self.apart or self._times < self._patience:
            return False
        self.apart = without
        self._patience *= 2
        return True

    def stop(self) -> None:
        """Leave ``apart`` as it is from now on: somebody has recorded the addresses of the present stacks."""
        self._patience = float("inf")
