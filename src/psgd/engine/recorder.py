"""Steps of the optimizer that are recorded: which ones can be, and what a recording depends on. See ``replay``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..criteria import Criterion, c2, c3
from ..groups.axes import lower
from ..ops.addresses import Addressed
from ..ops.real import real
from ..ops.triton import ready
from ..probes import Probe, Whitening
from ..ranks.shared import SharedOptimizer
from ..state import options
from . import flags as usable
from .bucket import Fleet
from .found import Found, Grads, Pairs
from .graphs import Replays

#: moves all parameters, by the numbers of the param groups, where a step is usable
Advance = Callable[[Sequence[Mapping[str, Any]], usable.Flags, Grads, Pairs], None]


class RecordedOptimizer(SharedOptimizer):
    """A ``SharedOptimizer`` that replays its steps where it can."""

    probe: Probe
    criterion: Criterion
    cuda_graph: bool = True

    def _recordable(self, fleets: Sequence[Fleet], found: Found) -> dict[str, dict[int, Tensor]] | None:
        """What a recorded step has to be told the addresses of, if this step can be one.

        It can where it is the same work at the same places every time, but for those of gradients and pairs.
        """
        if (
            self._team is not None
            or len({fleet.device for fleet in fleets}) != 1
            or not all(fleet.table is not None and fleet.averaging is not None for fleet in fleets)
            or (found.moved and not (found.all_due and self._fits_alike(found)))
            or torch.cuda.is_current_stream_capturing()
            or not (self._only_averages(fleets) or ready(fleets[0].device, "gather"))
        ):
            return None
        given = {"grads": {i: _in_order(real(grad)) for i, grad in found.grads.items()}}
        if found.pairs:
            given["dthetas"] = {i: _in_order(dtheta) for i, (dtheta, _) in found.pairs.items()}
            given["dgrads"] = {i: _in_order(dgrad) for i, (_, dgrad) in found.pairs.items()}
        readable = all(fleet.can_read(tensors) for fleet in fleets for tensors in given.values())
        return given if readable else None

    def _fits_alike(self, found: Found) -> bool:
        """Whether ``Q`` is fitted without random numbers, and by nothing that the key does not know."""
        if isinstance(self.probe, Whitening):
            return self.criterion is c3
        known = self.criterion in (c2, c3) and type(self.probe).damp is Probe.damp
        return known and len(found.pairs) == len(found.moved)

    def _only_averages(self, fleets: Sequence[Fleet]) -> bool:
        """Whether gradients are averaged and then not needed any more, so that they need not be copied."""
        whitens = isinstance(self.probe, Whitening) and self.probe.of_average
        return whitens and all(fleet.averaging for fleet in fleets)

    def _replay(
        self,
        fleets: Sequence[Fleet],
        found: Found,
        given: Mapping[str, Mapping[int, Tensor]],
        advance: Advance,
        flags: Sequence[Tensor],
    ) -> None:
        """Advance by a recorded step, once there is one, or by the step that would be recorded.

        Step sizes, and where gradients and pairs lie, may change; all else is part of the record.

        Args:
            given: what ``_recordable`` returned
            flags: what decides besides the gradients whether the step is usable
        """
        assert self._whole is not None
        device = fleets[0].device
        replays = self._whole.replays
        if replays is None:
            nbytes = sum(fleet.nbytes() for fleet in fleets)
            if not self._only_averages(fleets):  # copies of gradients and pairs
                nbytes += 3 * sum(grad.nbytes for grad in found.grads.values())
            replays = self._whole.replays = Replays(device, nbytes)
        addressed = self._whole.addressed
        for name, tensors in given.items():
            if name not in addressed:
                addressed[name] = Addressed(fleets)
            addressed[name].point(tensors)
        for fleet in fleets:
            fleet.aim_at_averages()
        rates = replays.hold("lr", [group["lr"] for group in self.param_groups], torch.float64)
        (so_far,) = replays.hold("usable", [usable.agree(flags, [device])[device] if flags else True], torch.bool)
        groups = [{**group, "lr": rate} for group, rate in zip(self.param_groups, rates, strict=True)]

        updates = bool(found.moved)
        factors = [factor for fleet in fleets for factor in fleet.matrices]
        kept = not updates and all(factor.keeps_P() for factor in factors)

        def step() -> None:
            if not kept:  # a recording forms P of all factors, or of none
                for factor in factors:
                    factor.forget_P()
            ok = so_far.clone()
            addressed["grads"].check_(ok)
            pairs: Pairs = (addressed["dthetas"], addressed["dgrads"]) if found.pairs else {}
            advance(groups, {device: ok}, addressed["grads"], pairs)

        # Neither kernels nor recordings tell autograd that tensors change. Before, so that an interrupt comes too late.
        torch.autograd.graph.increment_version(self._params)
        if updates:
            torch.autograd.graph.increment_version([factor.root for factor in factors])
        key = (updates, kept, bool(found.pairs), found.chores, *self._kind(fleets, groups, given))
        try:
            if self.cuda_graph:
                replays(key, step)
            else:
                step()
        except BaseException:
            for factor in factors:
                factor.forget_P()
            raise
        for factor in factors if not updates else []:
            factor.confirm_P()

    def _kind(
        self, fleets: Sequence[Fleet], groups: Sequence[Mapping[str, Any]], given: Iterable[str]
    ) -> tuple[Any, ...]:
        """What else makes a recording another one."""
        numbers = tuple(group[name] for group in groups for name in options.NAMES if name not in ("lr", "seed"))
        tables = tuple(fleet.table for fleet in fleets)
        assert self._whole is not None
        addressed = [addresses for name in given for addresses in self._whole.addressed[name].of.values()]
        places = tuple(addresses.aligned for addresses in addressed), tuple(fleet.averaging for fleet in fleets)
        dtypes = [fleet.stacks[0].like.dtype for fleet in fleets]
        damping = tuple(self.probe.relative_damping(dtype) for dtype in dtypes)
        low = tuple(lower(fleet.device, dtype) for fleet, dtype in zip(fleets, dtypes, strict=True))
        return numbers, tables, places, damping, low, self.criterion, getattr(self.probe, "of_average", None)


def _in_order(t: Tensor) -> Tensor:
    """With its numbers one after the other in memory, as they are: itself, or a copy."""
    return t.contiguous().resolve_neg()
