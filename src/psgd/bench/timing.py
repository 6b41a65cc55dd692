"""Time measurements: by events of the device if there is one, else by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch


def wait_for(device: str) -> None:
    """Wait until the device has done all of its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _nothing() -> None:
    pass


class Laps:
    """Times between marks that are set while work is under way: the host does not wait for the device.

    Args:
        device: device whose work is timed, by events in its stream; by the clock on a CPU
    """

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def read(self, kinds: int) -> list[list[float]]:
        """Milliseconds of laps of some kinds that follow each other, each kind apart, and forget the marks.

        The device must have done its work. Every round has ``kinds`` + 1 marks, one before and one after each lap.
        """
        marks, self.marks = self.marks, []
        rounds = range(0, len(marks), kinds + 1)
        return [[self._between(marks[k + kind], marks[k + kind + 1]) for k in rounds] for kind in range(kinds)]

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) if self.cuda else 1000 * (end - begin)


def milliseconds(
    function: Callable[[], object],
    device: str,
    *,
    repeat: int = 20,
    warmup: int = 5,
    before: Callable[[], object] = _nothing,
) -> list[float]:
    """Times of ``repeat`` calls, after a warm-up; ``before`` is called before each, and not timed."""
    for _ in range(warmup):
        before()
        function()
    wait_for(device)
    if not device.startswith("cuda"):
        return [_by_clock(function, before) for _ in range(repeat)]
    # Events in the stream, read at the end: the host never waits in between, as in training.
    with torch.cuda.device(device):
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeat)]
        for begin, end in marks:
            before()
            begin.record()
            function()
            end.record()
        torch.cuda.synchronize(device)
        return [begin.elapsed_time(end) for begin, end in marks]


def _by_clock(function: Callable[[], object], before: Callable[[], object]) -> float:
    before()
    begin = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - begin)


def typical(function: Callable[[], object], device: str, *, seconds: float = 1.0, most: int = 50) -> float:
    """Median time of a call, from as many calls as fit in about ``seconds``: at least three, at most ``most``."""
    function()
    wait_for(device)
    once = max(milliseconds(function, device, repeat=1, warmup=1)[0], 1e-3)
    repeat = min(max(int(1000 * seconds / once), 3), most)
    return median(milliseconds(function, device, repeat=repeat, warmup=0))
