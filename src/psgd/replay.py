"""Steps recorded as CUDA graphs: where kernels are short, launching them takes longer than running them."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

#: how often something is done as usual before it is recorded: libraries set themselves up, options may still change
WARM_UP = 2
#: how many kernels of a recording may run beside each other
BRANCHES = 4
#: numbers of a task that fills the device
LARGE_TASK = 2**22
#: how many recordings are kept
MOST = 8
#: the part of a device's memory that optimizer state may take; with more than that, kernels are long
LARGE = 1 / 16


class Replays:
    """Functions without arguments and results, each recorded under a key once it has been called a few times.

    All memory they read and write must stay where it is. What they need meanwhile stays reserved, once for all of them.

    Args:
        device: a CUDA device
        nbytes: of the optimizer's state there
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device = device
        self.worthwhile = nbytes < LARGE * torch.cuda.get_device_properties(device).total_memory
        self._seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._stream = torch.cuda.Stream(device)
        self._held: dict[str, list[tuple[Any, Tensor]]] = {}

    def hold(self, name: str, values: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
        """Numbers, or tensors with one element, at places that stay the same from call to call."""
        held = self._held.get(name)
        if held is None or len(held) != len(values):
            held = [(None, torch.empty((), dtype=dtype, device=self.device)) for _ in values]
        for k, (value, (last, place)) in enumerate(zip(values, held, strict=True)):
            if isinstance(value, Tensor):
                place.copy_(value.detach().reshape(()), non_blocking=True)
            elif value != last:
                place.fill_(value)
            held[k] = (None if isinstance(value, Tensor) else value, place)
        self._held[name] = held
        return [place for _, place in held]

    def __call__(self, key: Hashable, function: Callable[[], None]) -> None:
        """Call the function, or replay what it did under that key."""
        if key not in self._graphs:
            self._seen[key] += 1
            if self._seen[key] <= WARM_UP or len(self._graphs) >= MOST or not self._record(key, function):
                function()
                return
        with torch.cuda.device(self.device):
            self._graphs[key].replay()

    def _record(self, key: Hashable, function: Callable[[], None]) -> bool:
        if not self.worthwhile:
            return False
        graph = torch.cuda.CUDAGraph()
        side = self._stream  # always the same: memory belongs to a stream
        side.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(side), without_garbage_collection():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    function()
                finally:
                    graph.capture_end()
        except RuntimeError as error:  # nothing has been done yet, so it can be done as usual
            warnings.warn(f"PSGD goes on without CUDA graphs, as a step could not be recorded: {error}", stacklevel=2)
            self.worthwhile = False
            return False
        torch.cuda.current_stream(self.device).wait_stream(side)
        self._pool = graph.pool()
        self._graphs[key] = graph
        return True


def at_once(tasks: Sequence[Callable[[], T]], sizes: Sequence[int], device: torch.device) -> list[T]:
    """The results of tasks that have nothing to do with each other: branches of a graph, where one is recorded.

    There small kernels run beside large ones. Everywhere else one task follows the other, and large ones always do:
    each fills the device, and can have the memory of the last.

    Args:
        tasks: whatever they read must be kept by them until all of them are done
        sizes: how many numbers each has to do with
        device: where
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return [task() for task in tasks]
    here = torch.cuda.current_stream(device)
    sides = _sides(device)
    for side in sides:
        side.wait_stream(here)
    results = []
    for k, (task, size) in enumerate(zip(tasks, sizes, strict=True)):
        with torch.cuda.stream(here if size >= LARGE_TASK else sides[k % len(sides)]):
            results.append(task())
    for side in sides:
        here.wait_stream(side)
    return results


@cache
def _sides(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(BRANCHES - 1)]


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Whatever is collected may call the driver, which must not happen during a recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
