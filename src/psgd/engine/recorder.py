"""Recorded steps: decides which steps become CUDA graphs, under which key, and points them to the present gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..criteria import Criterion
from ..groups.axes import lower
from ..ops.parameters import Flags
from ..ops.real import as_real
from ..ops.triton import ready
from ..probes import Probe
from . import flags
from .bucket import Bucket
from .graphs import Graphs
from .tensors import PairsAtAddresses, TensorsAtAddresses
from .work import Work

#: all of a step that the device does alone
Advance = Callable[[Work], None]


@dataclass
class _Recordings:
    """Recordings of steps of some buckets, and the addresses that these read."""

    buckets: set[Bucket]
    graphs: Graphs
    #: by the name of the tensors, and the buckets they are for
    tensors: dict[tuple[str, tuple[Bucket, ...]], TensorsAtAddresses] = field(default_factory=dict)

    def at_addresses(
        self, name: str, buckets: tuple[Bucket, ...], by_position: Mapping[int, Tensor]
    ) -> TensorsAtAddresses:
        """Tensors of some buckets, by their present addresses; always the same arrays of addresses."""
        if (name, buckets) not in self.tensors:
            self.tensors[name, buckets] = TensorsAtAddresses(buckets)
        self.tensors[name, buckets].point(by_position)
        return self.tensors[name, buckets]


class Recorder:
    """Replays steps that were recorded, and records those that come again.

    Args:
        enabled: whether steps are recorded; without it the same work is launched from the host
        tables: whether kernels may go through all parameters, as they must in a recording
        options: names of the numbers of a param group that a recording depends on
    """

    def __init__(self, enabled: bool, tables: bool, options: Iterable[str]) -> None:
        self.enabled, self.tables = enabled, tables
        self.options = tuple(options)
        self._recordings: _Recordings | None = None

    def run(
        self,
        work: Work,
        probe: Probe,
        criterion: Criterion,
        params: Sequence[Tensor],
        agree: Callable[[list[Tensor]], Flags],
        advance: Advance,
    ) -> None:
        """Advance, or replay what advancing did.

        Args:
            work: what the step does
            probe: fits ``Q``
            criterion: what ``Q`` is fitted to
            params: all parameters
            agree: makes one decision from flags, for each device
            advance: all of a step that the device does alone
        """
        for bucket in work.buckets if self.tables else ():
            bucket.find_table(params)
        given = self._readable(work, probe, criterion)
        if given is None:
            work.ok = agree([*work.flags, *work.find_lengths()])
            advance(work)
        else:
            self._replay(work, given, probe, criterion, advance, params)

    def _readable(self, work: Work, probe: Probe, criterion: Criterion) -> dict[str, dict[int, Tensor]] | None:
        """Tensors whose addresses a recorded step has to know, if this step can be one; else None.

        It can if it is the same work at the same places every time, but for the places of gradients and pairs.
        """
        buckets = work.buckets
        if (
            not buckets
            or any(bucket.table is None for bucket in buckets)
            or len({bucket.device for bucket in buckets}) != 1
            or (work.due and not probe.recordable(criterion))
            or torch.cuda.is_current_stream_capturing()
            or not (_only_averages(buckets, probe) or ready(buckets[0].device, "gather"))
        ):
            return None
        due = [i for bucket in buckets if bucket.group in work.due for i in bucket.positions]
        pairs = work.pairs.by_position
        if pairs and not all(i in pairs for i in due):
            return None
        given = {"grads": {i: _in_order(as_real(grad)) for i, grad in work.grads.by_position.items()}}
        if pairs:
            given["dthetas"] = {i: _in_order(dtheta) for i, (dtheta, _) in pairs.items()}
            given["dgrads"] = {i: _in_order(dgrad) for i, (_, dgrad) in pairs.items()}
        each = {name: [b for b in buckets if name == "grads" or b.group in work.due] for name in given}
        return given if all(b.can_read(given[name]) for name, some in each.items() for b in some) else None

    def _replay(
        self,
        work: Work,
        given: Mapping[str, Mapping[int, Tensor]],
        probe: Probe,
        criterion: Criterion,
        advance: Advance,
        params: Sequence[Tensor],
    ) -> None:
        """Advance by a recorded step, once there is one, or by the step that would be recorded.

        Step sizes, and the addresses of gradients and pairs, may change; all else is part of the recording.

        Args:
            work: what the step does
            given: what ``_readable`` returned
            probe: fits ``Q``
            criterion: what ``Q`` is fitted to
            advance: all of a step that the device does alone
            params: all parameters
        """
        buckets = work.buckets
        device = buckets[0].device
        due = tuple(bucket for bucket in buckets if bucket.group in work.due)
        recordings = self._of(work, probe)
        tensors = {
            name: recordings.at_addresses(name, tuple(buckets) if name == "grads" else due, by_position)
            for name, by_position in given.items()
        }
        for bucket in buckets:
            bucket.find_averages()
        graphs = recordings.graphs
        rates = graphs.hold("lr", [group["lr"] for group in work.groups], torch.float64)
        so_far = flags.agree(work.flags, [device])[device] if work.flags else True
        (before,) = graphs.hold("ok", [so_far], torch.bool)
        recorded = replace(
            work,
            grads=tensors["grads"],
            pairs=PairsAtAddresses(tensors["dthetas"], tensors["dgrads"]) if "dthetas" in tensors else work.pairs,
            groups=[{**group, "lr": rate} for group, rate in zip(work.groups, rates, strict=True)],
        )
        kept = tuple(bucket not in due and bucket.Q.keeps_P() for bucket in buckets)

        def step() -> None:
            for bucket, keeps in zip(buckets, kept, strict=True):
                if not keeps:  # a recording forms P of all factors of a bucket, or of none
                    bucket.Q.forget_P()
            recorded.ok = {device: reduce(torch.logical_and, recorded.find_lengths(), before)}
            advance(recorded)

        # Neither kernels nor recordings tell autograd that tensors change. Before, so that an interrupt comes too late.
        changed = [params[i] for bucket in buckets for i in bucket.positions]
        changed += [buffer for bucket in due for stack in bucket.stacks for buffer in stack.group.buffers().values()]
        torch.autograd.graph.increment_version(changed)
        key = (kept, tuple(sorted(work.due.items())), *self._key(recorded, tensors.values(), probe, criterion))
        try:
            if self.enabled:
                graphs(key, step)
            else:
                step()
        except BaseException:
            for bucket in buckets:
                bucket.Q.forget_P()
            raise
        for bucket in buckets:
            if bucket not in due:
                bucket.Q.confirm_P()

    def _of(self, work: Work, probe: Probe) -> _Recordings:
        """Recordings of steps of these buckets, and of others of the same optimizer.

        A param group may rest for a step without ending the recordings of all. New buckets, as after loading a
        checkpoint, have nothing in common with the old ones, whose recordings are dropped.
        """
        buckets = work.buckets
        if self._recordings is None or self._recordings.buckets.isdisjoint(buckets):
            nbytes = sum(bucket.nbytes() for bucket in buckets)
            if not _only_averages(buckets, probe):  # copies of gradients and pairs
                nbytes += 3 * sum(grad.nbytes for grad in work.grads.by_position.values())
            self._recordings = _Recordings(set(), Graphs(buckets[0].device, nbytes))
        self._recordings.buckets.update(buckets)
        return self._recordings

    def _key(
        self, work: Work, tensors: Iterable[TensorsAtAddresses], probe: Probe, criterion: Criterion
    ) -> tuple[Any, ...]:
        """Everything else that a recording depends on."""
        numbers = tuple(group[name] for group in work.groups for name in self.options)
        tables = tuple(bucket.table for bucket in work.buckets)
        aligned = tuple(addresses.aligned for each in tensors for addresses in each.addresses.values())
        dtypes = [bucket.Q.dtype for bucket in work.buckets]
        fitted = tuple(probe.key(dtype) for dtype in dtypes)
        low = tuple(lower(bucket.device, dtype) for bucket, dtype in zip(work.buckets, dtypes, strict=True))
        averaging = tuple(bucket.averaging for bucket in work.buckets)
        return numbers, tables, aligned, averaging, fitted, low, criterion


def _only_averages(buckets: Sequence[Bucket], probe: Probe) -> bool:
    """Whether gradients are averaged and then not needed any more, so that they need not be copied."""
    return probe.of_average and all(bucket.averaging for bucket in buckets)


def _in_order(t: Tensor) -> Tensor:
    """``t`` with its elements one after the other in memory: itself, or a copy."""
    return t.contiguous().resolve_neg()
