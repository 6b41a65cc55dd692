"""CUDA graphs on a CPU, and the kernels that recorded steps need.

Operations are logged while they are done, and a replay does them again on the same tensors, as a CUDA graph does. The
kernels of a table read and write what is at an address. All that is replaced in the package is named in
``emulated_graphs``, ``graphs_made`` and ``without_kernels``.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import psgd.engine.bucket
import psgd.engine.recorder
import psgd.ops.look
from psgd.engine.graphs import Graphs
from psgd.ops.tensor_table import Addresses, TensorTable

#: what comes from the host, and what waits for the device
FORBIDDEN = (torch.ops.aten.lift_fresh.default, torch.ops.aten._local_scalar_dense.default)


class Log(TorchDispatchMode):
    active: ClassVar[list[Log]] = []

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, ...]] = []

    def __enter__(self) -> Log:
        self.active.append(self)
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        self.active.pop()
        super().__exit__(*args)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function not in FORBIDDEN, f"{function} in a recording"
        result = function(*args, **(kwargs or {}))
        self.done.append((function, args, kwargs or {}, result))
        return result


def kernel(function: Callable[..., None]) -> Callable[..., None]:
    """A function that is logged as one operation."""

    @wraps(function)
    def run(*args: Any) -> None:
        for log in Log.active:
            log.done.append((function, args, {}, None))
        with _disable_current_modes():
            function(*args)

    return run


def at(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    memory = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors among arguments or results of an operation."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class Recording:
    """What a graph would do. The first replay is the recording itself, which has been done already.

    Which tensors an operation makes, and which tensors there are, is found once: it costs more than the operations do.
    """

    def __init__(self, done: list[tuple[Any, ...]]) -> None:
        self.done = [
            (function, args, kwargs, self.made_by(function, result)) for function, args, kwargs, result in done
        ]
        self.tensors = tuple({id(t): t for _, *rest in done for t in tensors_in(rest)}.values())
        self.replays = 0

    @staticmethod
    def made_by(function: Any, result: Any) -> list[torch.Tensor]:
        """Tensors that the operation made, which are not a part of its arguments."""
        if result is None or any(r.alias_info is not None for r in function._schema.returns):
            return []
        return tensors_in(result)

    def replay(self) -> None:
        self.replays += 1
        if self.replays == 1:
            return
        with torch.autograd._unsafe_preserve_version_counter(self.tensors):
            for function, args, kwargs, made in self.done:
                again = function(*args, **kwargs)
                if made:
                    for old, new in zip(made, tensors_in(again), strict=True):
                        old.copy_(new)


class Emulated(Graphs):
    """Recordings of one optimizer. ``count`` is the number of its steps that were recorded or replayed."""

    worthwhile = True
    #: of all optimizers
    total: ClassVar[Counter[str]] = Counter()

    def __init__(self, device: torch.device, nbytes: int) -> None:
        super().__init__(device, nbytes)
        self.count = 0

    def _record(self, key, function) -> bool:
        with Log() as log:
            result = function()
        self._keep(key, Recording(log.done), result)
        return True

    def __call__(self, key, function):
        result = super().__call__(key, function)
        self.count += key in self
        self.total["replays"] += key in self
        return result

    @property
    def remembered(self) -> int:
        """Number of keys that have come, but not often enough to be recorded."""
        return len(self._seen)


def blocks_of(table: TensorTable) -> Iterator[list[int]]:
    yield from table.blocks.tolist()


@kernel
def subtract_(
    self: TensorTable,
    v: torch.Tensor,
    scale: torch.Tensor,
    rate: torch.Tensor,
    decay: torch.Tensor,
    usable: torch.Tensor,
) -> None:
    for b, (address, numel, start, first, n, after) in enumerate(blocks_of(self)):
        theta, i = at(address, numel, self.dtype), torch.arange(numel)
        step = v[start : start + numel] * scale[first : first + n][(i // after) % n] * rate[b] + theta * decay[b]
        theta.copy_(torch.where(usable, theta - step, theta))


@kernel
def lengths(self: TensorTable, sources: Addresses, lengths: torch.Tensor, has_zeros: torch.Tensor) -> None:
    for b, (address, (_, numel, *_)) in enumerate(zip(sources.place.tolist(), blocks_of(self), strict=True)):
        x = at(address, numel, self.dtype)
        lengths[b] = torch.linalg.vector_norm(x, dtype=lengths.dtype)
        has_zeros[b] = (x == 0).sum() >= self.smallest[b]


@kernel
def _support(self: TensorTable, sources: Addresses, has_zeros: torch.Tensor, flags: torch.Tensor) -> None:
    for b, (address, (_, numel, *_)) in enumerate(zip(sources.place.tolist(), blocks_of(self), strict=True)):
        x, i = at(address, numel, self.dtype), torch.arange(numel)
        for first, n, after in self.axes[b].tolist():
            flags[first : first + n] = 0 if has_zeros[b] else 1
            if n:
                flags[first + (i // after % n)[x != 0]] = 1


def support(self: TensorTable, sources: Addresses, has_zeros: torch.Tensor) -> torch.Tensor:
    flags = torch.empty(len(self.owners))
    _support(self, sources, has_zeros, flags)
    return flags


@kernel
def gather(self: TensorTable, sources: Addresses, out: torch.Tensor) -> None:
    for address, (_, numel, start, *_) in zip(sources.place.tolist(), blocks_of(self), strict=True):
        out[start : start + numel] = at(address, numel, self.dtype)


@kernel
def average_(
    self: TensorTable,
    sources: Addresses,
    means: Addresses,
    dtype: torch.dtype,
    weight: torch.Tensor,
    factor: torch.Tensor,
    usable: torch.Tensor,
) -> None:
    each = zip(sources.place.tolist(), means.place.tolist(), weight, factor, blocks_of(self), strict=True)
    for source, mean, w, f, (_, numel, *_) in each:
        m = at(mean, numel, dtype)
        x = at(source, numel, self.dtype).to(dtype) * f
        m.copy_(torch.where(usable, torch.lerp(m, x, w.to(dtype)), m))


@contextmanager
def emulated_graphs(graphs: type[Emulated] = Emulated) -> Iterator[Counter[str]]:
    """Record and replay the steps on a CPU, by the kernels above.

    Args:
        graphs: the class that records, in place of the one that makes CUDA graphs

    Returns:
        a counter, whose entry "replays" is the number of steps that were recorded or replayed in this context
    """
    Emulated.total.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(psgd.ops.look, "can_look", lambda device: not Log.active)  # as little as at a GPU's numbers
        for module in (psgd.engine.bucket, psgd.engine.recorder):
            patch.setattr(module, "ready", lambda device, kernel: True)
        for function in (subtract_, lengths, support, gather, average_):
            patch.setattr(TensorTable, function.__name__, function)
        patch.setattr(psgd.engine.recorder, "Graphs", graphs)
        yield Emulated.total


@contextmanager
def graphs_made() -> Iterator[list[Any]]:
    """All recordings that optimizers make in this context, real or emulated: a new entry whenever they begin anew."""
    made: list[Any] = []
    kind = psgd.engine.recorder.Graphs

    def make(*args: Any) -> Graphs:
        made.append(kind(*args))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psgd.engine.recorder, "Graphs", make)
        yield made


@contextmanager
def without_kernels() -> Iterator[None]:
    """Let steps be those of torch alone, also where graphs are emulated: without kernels, and so without recordings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psgd.engine.bucket, "ready", lambda device, kernel: False)
        yield
