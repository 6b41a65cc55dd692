"""Numbers of a step that are still on their device, until the host waits for them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..optimizer import PSGD
from .measure import OfBlocks, fetch, skipped
from .record import BlockRecord, Named, Record


class Taken:
    """Numbers of a future record, except for the loss, which may be given later.

    Args:
        optimizer: the optimizer after the step
        step: number of the step
        found: numbers of the blocks
        spectrum: spectrum of ``PH``, if it is known
        loss: loss of the step, if it is known
    """

    def __init__(
        self, optimizer: PSGD, step: int, found: OfBlocks, spectrum: Mapping[str, float] | None = None, loss: Any = None
    ) -> None:
        self.step, self.found, self.spectrum, self.loss = step, found, dict(spectrum or {}), loss
        self.time = time.time()
        rates = [group["lr"] for group in optimizer.param_groups]
        #: copies of the learning rates: a scheduler may change them, in place, before the loss is given
        self.rates = [rate.detach().clone() if isinstance(rate, Tensor) else rate for rate in rates]
        self.skipped = skipped(optimizer)
        stacks = optimizer.stacks
        #: stack of each block, its row there, and the number of rows
        self.places = {
            block.params: (k, row, len(stack.blocks))
            for k, stack in enumerate(stacks)
            for row, block in enumerate(stack.blocks)
        }

    def fits(self, blocks: Sequence[Named]) -> bool:
        """Whether the numbers belong to these blocks."""
        return set(self.places) == {block.params for block in blocks}

    def record(self, blocks: Sequence[Named]) -> Record:
        """Fetch all numbers; the host waits for the device here, once."""
        keys = [(metric, k) for metric, numbers in self.found.items() for k in range(len(numbers))]
        losses = [] if self.loss is None else [self.loss]
        common = [self.skipped, *self.rates, *losses]
        lists = fetch([*common, *(self.found[metric][k] for metric, k in keys)])
        found = dict(zip(keys, lists[len(common) :], strict=True))

        def of(metric: str, block: Named) -> list[float | None]:
            k, row, count = self.places[block.params]
            return [None if v != v else v for v in found.get((metric, k), [])[row::count]] or [None]

        return Record(
            step=self.step,
            time=self.time,
            loss=lists[len(common) - 1][0] if losses else None,
            skipped=int(lists[0][0]),
            lr=tuple(values[0] for values in lists[1 : 1 + len(self.rates)]),
            blocks=tuple(
                BlockRecord(
                    name=block.name,
                    q_step=of("q_step", block)[0],
                    condition=tuple(float("nan") if v is None else v for v in of("condition", block)),
                    residual=of("residual", block)[0],
                    update_rms=of("update_rms", block)[0],
                )
                for block in blocks
            ),
            spectrum=self.spectrum,
        )
