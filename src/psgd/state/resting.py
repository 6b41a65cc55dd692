"""Blocks that have had no gradient for several steps, such as those of layers that a model never uses."""

from __future__ import annotations

from ..blocks import Block

#: number of consecutive steps in which the same blocks have no gradient before they are stacked apart
PATIENCE = 3


class Resting:
    """Decision which blocks are stacked apart from the others, so that the steps of the others can be captured.

    A step of a bucket in which some blocks have no gradient cannot be captured as a CUDA graph. Stacking again copies
    the state and drops all captured graphs, so the number of steps to wait doubles each time.
    """

    def __init__(self) -> None:
        #: blocks that are stacked apart
        self.apart: frozenset[Block] = frozenset()
        self._last: frozenset[Block] = frozenset()
        self._times = 0
        self._patience: float = PATIENCE

    def changes(self, without: frozenset[Block]) -> bool:
        """Record which blocks have no gradient in a step, and return whether ``apart`` has changed."""
        self._times = self._times + 1 if without == self._last else 1
        self._last = without
        if without == self.apart or self._times < self._patience:
            return False
        self.apart = without
        self._patience *= 2
        return True

    def stop(self) -> None:
        """Never change ``apart`` again, as the user is capturing a CUDA graph with the addresses of these stacks."""
        self._patience = float("inf")
