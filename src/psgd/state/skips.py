"""Warning about consecutive skipped steps, which explains why a run does not move."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..notice import warn
from ..ops.streams import Arrival, capturing

#: number of steps between two checks of the counter, and so of consecutive skipped steps that cause a warning
EVERY = 20


class SkipCheck:
    """Check of the counter of skipped steps, which warns if all steps between two checks were skipped.

    The host does not wait for the counter of a GPU: a check may read the value whose copy an earlier check started.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._done = False
        #: counter that is checked, and the numbers of steps and of skipped steps at the last check
        self._counter: Tensor | None = None
        self._before: tuple[int, int] | None = None
        #: value on its way to the host, and the number of steps when its copy was started
        self._sent: tuple[Arrival, int] | None = None

    def __call__(self, skipped: Mapping[torch.device, Tensor]) -> None:
        """Count a step, which was taken or skipped, and check the counter every ``EVERY`` steps.

        Args:
            skipped: counters of skipped steps, which are the same on all devices and ranks
        """
        self._steps += 1
        if self._steps % EVERY == 1 and not self._done and not capturing():
            counter = next(iter(skipped.values()), None)
            if counter is not None and not counter.is_meta:
                self._look(counter)

    def _look(self, counter: Tensor) -> None:
        if counter is not self._counter:  # a new counter, as after loading a state dict
            self._counter, self._before, self._sent = counter, None, None
        self._receive()
        if self._sent is None:
            self._sent = Arrival(counter), self._steps
            self._receive()

    def _receive(self) -> None:
        if self._sent is None or (count := self._sent[0].read()) is None:
            return
        now, before = (self._sent[1], int(count)), self._before
        self._sent, self._before = None, now
        if before is not None and now[0] - before[0] == now[1] - before[1]:
            self._done = True
            warn(
                f"PSGD skipped {now[0] - before[0]} steps in a row, as the loss or gradients are not finite, so that "
                "the parameters do not move; PSGD(…, error_if_nonfinite=True) raises an error that names the parameter"
            )
