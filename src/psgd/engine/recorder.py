"""Captured steps: which steps become CUDA graphs, under which key, and how graphs find the current gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar

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
from .direction import Direction
from .graphs import Graphs
from .recordings import Recordings
from .tensors import PairsAtAddresses, TensorsAtAddresses
from .work import Work

T = TypeVar("T")
#: part of a step without communication: averages, ``Q``, and the directions of the blocks of this rank
Advance = Callable[[Work], list[Direction]]
#: rest of a step, in which ranks may communicate: it moves the parameters along the directions
Move = Callable[[Work, list[Direction]], None]


class Recorder:
    """Captures steps that repeat as CUDA graphs, and replays them.

    Args:
        enabled: whether steps are captured; otherwise the host launches the same kernels
        sends: whether ranks communicate in a step. The lengths of gradients are then one graph, ``advance`` is another,
            and ranks communicate between and after the two.
        options: names of the options of a param group that a graph depends on
    """

    def __init__(self, enabled: bool, sends: bool, options: Iterable[str]) -> None:
        self.enabled, self.sends = enabled, sends
        self.options = tuple(options)
        self._recordings: Recordings | None = None

    def run(
        self,
        work: Work,
        probe: Probe,
        criterion: Criterion,
        params: Sequence[Tensor],
        agree: Callable[[list[Tensor]], Flags],
        advance: Advance,
        move: Move,
    ) -> None:
        """Take a step: call ``advance`` and ``move``, or replay their CUDA graphs.

        Args:
            work: work of the step
            probe: probe, which fits ``Q``
            criterion: criterion that ``P`` is fitted to
            params: all parameters
            agree: function from flags to one decision for each device, which is the same on all ranks
            advance: part of the step without communication
            move: rest of the step
        """
        for bucket in work.buckets:
            bucket.find_table(work.grads.by_position if self.sends else params, moves=not self.sends)
        given = self._readable(work, probe, criterion)
        if given is None:
            work.ok = agree([*work.flags, *work.find_lengths()])
            move(work, advance(work))
        else:
            self._replay(work, given, probe, criterion, params, agree, advance, move)

    def _readable(self, work: Work, probe: Probe, criterion: Criterion) -> dict[str, dict[int, Tensor]] | None:
        """Tensors whose addresses a captured step reads, by name and position; None if this step cannot be captured.

        It can be captured if it does the same work on the same memory every time, except for gradients and pairs.
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
        params: Sequence[Tensor],
        agree: Callable[[list[Tensor]], Flags],
        advance: Advance,
        move: Move,
    ) -> None:
        """Replay a captured step or, before it is captured, launch the same kernels from the host.

        Learning rates, and the addresses of gradients and pairs, may change; everything else is part of the graph.

        Args:
            work: work of the step
            given: result of ``_readable``
            probe: probe, which fits ``Q``
            criterion: criterion that ``P`` is fitted to
            params: all parameters
            agree: function from flags to one decision for each device, which is the same on all ranks
            advance: part of the step without communication
            move: rest of the step
        """
        buckets = work.buckets
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
        recorded = replace(
            work,
            grads=tensors["grads"],
            pairs=PairsAtAddresses(tensors["dthetas"], tensors["dgrads"]) if "dthetas" in tensors else work.pairs,
            groups=[{**group, "lr": rate} for group, rate in zip(work.groups, rates, strict=True)],
        )
        kept = tuple(bucket not in due and bucket.Q.keeps_P() for bucket in buckets)

        def alone() -> list[Direction]:
            for bucket, keeps in zip(buckets, kept, strict=True):
                if not keeps:  # a graph forms P of all factors of a bucket, or of none
                    bucket.Q.forget_P()
            return advance(recorded)

        # Neither kernels nor graphs tell autograd that tensors change. It is told before they run, so that an interrupt
        # cannot leave a change unreported.
        changed = [] if self.sends else [params[i] for bucket in buckets for i in bucket.positions]
        changed += [buffer for bucket in due for stack in bucket.stacks for buffer in stack.group.buffers().values()]
        torch.autograd.graph.increment_version(changed)
        key = (kept, tuple(sorted(work.due.items())), *self._key(recorded, tensors.values(), probe, criterion))
        try:
            if self.sends:
                self._in_parts(work, recorded, recordings, key, agree, alone, move)
            else:
                self._at_once(work, recorded, graphs, key, alone, move)
        except BaseException:
            for bucket in buckets:
                bucket.Q.forget_P()
            raise
        for bucket in buckets:
            if bucket not in due:
                bucket.Q.confirm_P()

    def _at_once(
        self,
        work: Work,
        recorded: Work,
        graphs: Graphs,
        key: Hashable,
        alone: Callable[[], list[Direction]],
        move: Move,
    ) -> None:
        """Take a step as one CUDA graph."""
        device = work.buckets[0].device
        so_far = flags.agree(work.flags, [device])[device] if work.flags else True
        (before,) = graphs.hold("ok", [so_far], torch.bool)

        def step() -> None:
            recorded.ok = {device: reduce(torch.logical_and, recorded.find_lengths(), before)}
            move(recorded, alone())

        self._call(graphs, key, step)

    def _in_parts(
        self,
        work: Work,
        recorded: Work,
        recordings: Recordings,
        key: Hashable,
        agree: Callable[[list[Tensor]], Flags],
        alone: Callable[[], list[Direction]],
        move: Move,
    ) -> None:
        """Take a step as two CUDA graphs, between and after which ranks communicate.

        All ranks communicate in the same order, whether they replay a graph, launch kernels or own no blocks.
        """
        graphs, device = recordings.graphs, work.buckets[0].device
        grads = recorded.grads
        assert isinstance(grads, TensorsAtAddresses)
        aligned = tuple(addresses.aligned for addresses in grads.addresses.values())
        tables = tuple(bucket.table for bucket in work.buckets)
        finite = self._call(graphs, ("lengths", tables, aligned), recorded.find_lengths)
        work.ok = agree([*work.flags, *finite])
        (ok,) = graphs.hold("ok", [work.ok[device]], torch.bool)
        recorded.ok = {device: ok}
        recorded.lengths = {bucket: lengths for bucket, (lengths, _) in grads.found.items()}
        if self.enabled and graphs.worthwhile:
            recorded.buffers = recordings.buffers_for(work.buckets)
        move(work, self._call(graphs, key, alone))

    def _call(self, graphs: Graphs, key: Hashable, function: Callable[[], T]) -> T:
        return graphs(key, function) if self.enabled else function()

    def _of(self, work: Work, probe: Probe) -> Recordings:
        """CUDA graphs of the steps of these buckets, and of other buckets of the same optimizer.

        If a param group has no gradients in a step, the graphs of the other steps are kept. If all buckets are new, as
        after loading a checkpoint, the graphs of the old ones are dropped.
        """
        buckets = work.buckets
        if self._recordings is None or self._recordings.buckets.isdisjoint(buckets):
            nbytes = sum(bucket.nbytes() for bucket in buckets)
            if not _only_averages(buckets, probe):  # copies of gradients and pairs
                nbytes += 3 * sum(grad.nbytes for grad in work.grads.by_position.values())
            self._recordings = Recordings(set(), Graphs(buckets[0].device, nbytes))
        self._recordings.buckets.update(buckets)
        return self._recordings

    def _key(
        self, work: Work, tensors: Iterable[TensorsAtAddresses], probe: Probe, criterion: Criterion
    ) -> tuple[Any, ...]:
        """Everything else that a graph depends on."""
        numbers = tuple(group[name] for group in work.groups for name in self.options)
        tables = tuple(bucket.table for bucket in work.buckets)
        aligned = tuple(addresses.aligned for each in tensors for addresses in each.addresses.values())
        dtypes = [bucket.Q.dtype for bucket in work.buckets]
        fitted = tuple(probe.key(dtype) for dtype in dtypes)
        low = tuple(lower(bucket.device, dtype) for bucket, dtype in zip(work.buckets, dtypes, strict=True))
        averaging = tuple(bucket.averaging for bucket in work.buckets)
        return numbers, tables, aligned, averaging, fitted, low, criterion


def _only_averages(buckets: Sequence[Bucket], probe: Probe) -> bool:
    """Whether a step uses gradients only to average them, so that it need not copy them."""
    return probe.of_average and all(bucket.averaging for bucket in buckets)


def _in_order(t: Tensor) -> Tensor:
    """``t`` with contiguous elements and without a lazy negation: itself, or a copy."""
    return t.contiguous().resolve_neg()
