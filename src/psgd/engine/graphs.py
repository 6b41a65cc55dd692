"""Steps captured as CUDA graphs: if kernels are short, launching them costs more time than running them."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..notice import warn

#: result of a function
T = TypeVar("T")

#: number of warm-up calls before a capture, in which libraries initialise themselves and options may still change
WARM_UP = 2
#: largest number of graphs that are kept, and of keys whose calls are counted
MOST = 16
#: devices on which graphs were freed; torch still reserves the memory of their pools, see ``Graphs._record``
_freed: set[torch.device] = set()
#: largest share of a device's memory for which steps are captured; kernels on more memory are long anyway
LARGE = 1 / 16


class Graphs:
    """CUDA graphs of functions without arguments, each captured under a key after ``WARM_UP`` ordinary calls.

    All memory that a function reads and writes must keep its address. Its temporary memory stays reserved, in one pool
    for all graphs. The result of a function is kept with its graph and is valid until the next replay, as another graph
    may use the same memory.

    Args:
        device: a CUDA device
        nbytes: number of bytes of the optimizer's state on this device, and of the copies that a step makes
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self._seen: Counter[Hashable] = Counter()
        #: graphs with the results of their functions
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool: Any = None
        self._held: dict[str, list[tuple[Any, Tensor]]] = {}

    def __len__(self) -> int:
        """Number of graphs that are kept."""
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        """Whether a graph is kept under a key."""
        return key in self._graphs

    @cached_property
    def worthwhile(self) -> bool:
        return is_small(self.device, self.nbytes)

    def hold(self, name: str, values: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
        """Copy numbers, or tensors with one element, to device memory with the same addresses at every call."""
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

    def __call__(self, key: Hashable, function: Callable[[], T]) -> T:
        """Result of the function, which is called, or whose graph under this key is replayed."""
        if key not in self._graphs:
            self._seen[key] += 1
            if self._seen[key] <= WARM_UP or not self._record(key, function):
                while len(self._seen) > MOST:  # keys that occur only once, as in a schedule, are never captured
                    del self._seen[next(iter(self._seen))]
                return function()
        graph, result = self._graphs[key] = self._graphs.pop(key)  # most recently used
        graph.replay()
        return cast("T", result)

    def _record(self, key: Hashable, function: Callable[[], Any]) -> bool:
        """Capture the function and return whether that worked; if not, the caller calls the function instead.

        A capture executes nothing on the device, so the function can still be called after a failed one.
        """
        if not self.worthwhile:
            return False
        if self._pool is None and self.device in _freed:
            # Torch uses the memory of a pool for no other pool: reserved memory would grow with every new optimizer.
            _freed.discard(self.device)
            torch.cuda.empty_cache()
        if self._pool is None:
            weakref.finalize(self, _freed.add, self.device)
        graph = torch.cuda.CUDAGraph()
        side = capture_stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        error: BaseException | None = None
        result: Any = None
        with torch.cuda.stream(side), without_garbage_collection():
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                result = function()
            except BaseException as e:
                error = e
            try:
                graph.capture_end()
            except RuntimeError as e:  # a consequence of the first error, if there was one
                release_generator(self.device)
                error = error or e
        if error is not None:
            self.worthwhile = False
            if not isinstance(error, RuntimeError):
                raise error
            warn(f"PSGD goes on without CUDA graphs, as a step could not be recorded: {error}")
            return False
        torch.cuda.current_stream(self.device).wait_stream(side)
        self._pool = graph.pool()
        self._keep(key, graph, result)
        return True

    def _keep(self, key: Hashable, graph: torch.cuda.CUDAGraph, result: Any) -> None:
        self._graphs[key] = graph, result
        del self._seen[key]
        while len(self._graphs) > MOST:
            del self._graphs[next(iter(self._graphs))]


def is_small(device: torch.device, nbytes: int) -> bool:
    """Whether a state of this size leaves enough memory for captured steps, whose temporary memory stays reserved."""
    return device.type != "cuda" or nbytes < LARGE * torch.cuda.get_device_properties(device).total_memory


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Stream on which the graphs of all optimizers on a device are captured.

    Memory belongs to a stream, and libraries keep a workspace for each stream. If every optimizer of a process had a
    stream of its own, each would leave 32 MiB behind on an H200.
    """
    return torch.cuda.Stream(device)


def release_generator(device: torch.device) -> None:
    """Let a device's random generator go on where it was before a capture that could not be ended.

    Torch leaves the generator in the state of the capture, and every later random number of the process, such as a
    dropout mask, raises an error. A copy of that state has the same seed and offset, without the capture. Graphs of the
    user that were captured before and draw random numbers still refer to the old state.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Context, also a decorator, without garbage collection: freed objects may call the driver and break a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
