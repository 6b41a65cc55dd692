"""Steps of the optimizer that are recorded: which ones can be, and what a recording depends on. See ``replay``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import options, usable
from .criteria import Criterion, c3
from .fleet import Fleet
from .groups.axes import lower
from .groups.inverse_free import Chores
from .probes import Probe, Whitening
from .replay import Replays
from .shared import SharedOptimizer

#: moves all parameters, by the numbers of the param groups, where a step is usable
Advance = Callable[[Sequence[Mapping[str, Any]], usable.Flags], None]


class RecordedOptimizer(SharedOptimizer):
    """A ``SharedOptimizer`` that replays its steps where it can."""

    probe: Probe
    criterion: Criterion
    cuda_graph: bool = True

    def _can_replay(self, fleets: Sequence[Fleet], moved: Sequence[int]) -> bool:
        """Whether all of a step that follows the averages is the same work at the same places every time."""
        if self._team is not None or self._whole is None or fleets is not self._whole.fleets:
            return False
        tables = [fleet.aim(self._params) for fleet in fleets]
        return (
            self.cuda_graph
            and len({fleet.device for fleet in fleets}) == 1
            and all(table and fleet.averaging for fleet, table in zip(fleets, tables, strict=True))
            and (not moved or (self._whitens_average() and len(moved) == self._filled))
            and not torch.cuda.is_current_stream_capturing()
        )

    def _whitens_average(self) -> bool:
        return isinstance(self.probe, Whitening) and self.probe.of_average and self.criterion is c3

    def _replay(self, fleets: Sequence[Fleet], kind: tuple[bool, Chores], advance: Advance, ok: Tensor) -> None:
        """Advance by a recorded step, once there is one. The step sizes may change, all else is part of the record.

        Args:
            kind: whether ``Q`` is updated, and what else is done then
        """
        assert self._whole is not None
        replays = self._whole.replays
        if replays is None:
            replays = self._whole.replays = Replays(fleets[0].device, sum(fleet.nbytes() for fleet in fleets))
        rates = replays.hold("lr", [group["lr"] for group in self.param_groups], torch.float64)
        (usable_now,) = replays.hold("usable", [ok], torch.bool)
        groups = [{**group, "lr": rate} for group, rate in zip(self.param_groups, rates, strict=True)]
        numbers = tuple(group[name] for group in groups for name in options.NAMES if name not in ("lr", "seed"))
        tables = tuple(fleet.table for fleet in fleets)
        updates, _ = kind
        factors = [factor for fleet in fleets for factor in fleet.matrices]
        kept = not updates and all(factor.keeps_P() for factor in factors)
        if not kept:  # a recording forms P of all factors, or of none
            for factor in factors:
                factor.forget_P()
        dtypes = [fleet.stacks[0].like.dtype for fleet in fleets]
        damping = tuple(self.probe.relative_damping(dtype) for dtype in dtypes)
        low = tuple(lower(fleet.device, dtype) for fleet, dtype in zip(fleets, dtypes, strict=True))
        # Neither kernels nor recordings tell autograd that tensors change. Before, so that an interrupt comes too late.
        torch.autograd.graph.increment_version(self._params)
        if updates:
            torch.autograd.graph.increment_version([factor.root for factor in factors])
        key = (*kind, kept, numbers, tables, damping, low)
        try:
            replays(key, lambda: advance(groups, {fleets[0].device: usable_now}))
        except BaseException:
            for factor in factors:
                factor.forget_P()
            raise
        for factor in factors if not updates else []:
            factor.confirm_P()
