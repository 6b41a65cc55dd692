"""Passes over all parameters, or all factors, for which torch has no kernel that runs at the speed of memory.

Where Triton is there, which comes with torch for CUDA; everywhere else the same in torch's own operations.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .compiled import jit, tl, triton

#: elements that one program handles
CHUNK = 4096
#: positions within a block are 32-bit numbers
MOST = 2**31 - CHUNK


_DTYPES = (
    {}
    if triton is None
    else {torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
)


#: kernels that are being compiled, by device
_compiling: dict[torch.device, list[Future[None]]] = {}
#: devices where that has failed
_failed: set[torch.device] = set()


@cache
def prepare(device: torch.device, dtype: torch.dtype, low: torch.dtype) -> None:
    """Begin to compile what a step needs, in the background: it takes seconds, once on a machine.

    Args:
        device: where
        dtype: of ``Q``
        low: of products that are only estimates
    """
    if triton is None or device.type != "cuda":
        return
    workers = ThreadPoolExecutor(3)
    trials = [workers.submit(trial, device, dtype, low) for trial in (_try_scaled, _try_descend, _try_subtract)]
    workers.shutdown(wait=False)
    _compiling.setdefault(device, []).extend(trials)


def ready(device: torch.device) -> bool:
    """Whether there are kernels for a device. Waits for those that are being compiled."""
    if triton is None or device.type != "cuda":
        return False
    if device not in _compiling:
        prepare(device, torch.float32, torch.float32)
    while trials := _compiling[device]:
        if (error := trials.pop().exception()) is not None and device not in _failed:
            _failed.add(device)
            warnings.warn(f"PSGD does without Triton on {device}, which does not work there: {error}", stacklevel=2)
    return device not in _failed


def _aligned(numel: int, *tensors: Tensor) -> bool:
    """Whether every block of the arrays begins where 16 bytes can be read at once."""
    return numel % 16 == 0 and all(t.data_ptr() % 16 == 0 for t in tensors)


def scaled(v: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """``v · scale``, rounded once, into ``out``, which may be ``v`` itself.

    Args:
        v: array ``(B, *dims)``
        scale: ``B`` numbers, or as many along one axis, with as many axes as ``v``
        out: contiguous, of any dtype
    """
    numel = v[0].numel()
    if not (ready(v.device) and v.is_contiguous() and scale.is_contiguous() and numel < MOST):
        return torch.mul(v, scale, out=out)
    _launch_scaled(v, scale, out)
    return out


def _launch_scaled(v: Tensor, scale: Tensor, out: Tensor) -> None:
    n, after = broadcast(scale, v)
    numel = v[0].numel()
    with torch.cuda.device(v.device):
        grid = (triton.cdiv(numel, CHUNK), len(v))
        _scaled[grid](v, scale, out, numel, n, after, _aligned(numel, v, out), _wide(v), CHUNK)


def _try_scaled(device: torch.device, dtype: torch.dtype, low: torch.dtype) -> None:
    v = torch.ones(1, 16, 16, dtype=dtype, device=device)
    _launch_scaled(v, v[:, :, :1].contiguous(), v.to(low))


@jit
def _scaled(  # type: ignore[no-untyped-def]
    v, scale, out, numel, n, after, aligned: tl.constexpr, wide: tl.constexpr, chunk: tl.constexpr
):
    b = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * chunk + tl.arange(0, chunk)
    inside = i < numel
    start = b * numel
    if aligned:
        start = tl.multiple_of(start, 16)
    x = tl.load(v + start + i, mask=inside).to(wide)
    s = tl.load(scale + b * n + _position(i, numel, n, after), mask=inside).to(wide)
    tl.store(out + start + i, (x * s).to(out.dtype.element_ty), mask=inside)


@jit
def _position(i, numel, n, after):  # type: ignore[no-untyped-def]
    """``(i // after) % n``, by one division where one is enough."""
    if after == 1:
        at = i % n
    else:
        at = i // after
        if after * n < numel:
            at = at % n
    return at


def broadcast(scale: Tensor, v: Tensor) -> tuple[int, int]:
    """How a position ``i`` in a block finds its scale: at ``(i // after) % n``."""
    axes = [axis for axis in range(1, v.ndim) if scale.shape[axis] > 1]
    assert len(axes) <= 1
    assert len(scale) == len(v)
    if not axes:
        return 1, v[0].numel()
    return v.shape[axes[0]], math.prod(v.shape[axes[0] + 1 :])


def descend_(Q: Tensor, change: Tensor, step: Tensor) -> None:
    """``Q ← Q − step · change`` for a stack; where the step is zero, ``Q`` keeps its bits, whatever the change is.

    The change may be overwritten.
    """
    numel = Q[0].numel()
    if ready(Q.device) and Q.is_contiguous() and change.is_contiguous() and numel < MOST:
        _launch_descend(Q, change, step.contiguous())
        torch.autograd.graph.increment_version(Q)
        return
    step = step.view(-1, *[1] * (Q.ndim - 1))
    change = change.to(Q.dtype)
    torch.where(step > 0, torch.addcmul(Q, change, step.to(Q.dtype), value=-1, out=change), Q, out=Q)


def _launch_descend(Q: Tensor, change: Tensor, step: Tensor) -> None:
    numel = Q[0].numel()
    with torch.cuda.device(Q.device):
        grid = (triton.cdiv(numel, CHUNK), len(Q))
        _descend[grid](Q, change, step, numel, _aligned(numel, Q, change), _wide(Q), CHUNK)


def _try_descend(device: torch.device, dtype: torch.dtype, low: torch.dtype) -> None:
    Q = torch.ones(1, 16, 16, dtype=dtype, device=device)
    _launch_descend(Q, Q.to(low), torch.ones(1, device=device))


@jit
def _descend(  # type: ignore[no-untyped-def]
    Q, change, step, numel, aligned: tl.constexpr, wide: tl.constexpr, chunk: tl.constexpr
):
    b = tl.program_id(1).to(tl.int64)
    mu = tl.load(step + b).to(wide)
    if mu > 0:
        i = tl.program_id(0) * chunk + tl.arange(0, chunk)
        inside = i < numel
        start = b * numel
        if aligned:
            start = tl.multiple_of(start, 16)
        q = tl.load(Q + start + i, mask=inside).to(wide)
        d = tl.load(change + start + i, mask=inside).to(wide)
        tl.store(Q + start + i, (q - mu * d).to(Q.dtype.element_ty), mask=inside)


class Table:
    """Where parameters of many shapes lie, and their directions in one buffer: one kernel goes through all of them.

    Args:
        thetas: parameters of one dtype, each contiguous
        starts: where in the buffer the direction of each begins
        scales: for each where its scale begins among all scales, and how it is found from there, see ``broadcast``
    """

    def __init__(self, thetas: Sequence[Tensor], starts: Sequence[int], scales: Sequence[tuple[int, int, int]]) -> None:
        self.pointers = [theta.data_ptr() for theta in thetas]
        self.dtype = thetas[0].dtype
        numels = [theta.numel() for theta in thetas]
        self.aligned = all(number % 16 == 0 for number in (*self.pointers, *starts))
        blocks = [(*where, *scale) for *where, scale in zip(self.pointers, numels, starts, scales, strict=True)]
        chunks = [(b, c) for b, numel in enumerate(numels) for c in range(-(-numel // CHUNK))]
        self.blocks = sent(torch.tensor(blocks, dtype=torch.int64, device="cpu"), thetas[0].device)
        self.chunks = sent(torch.tensor(chunks, dtype=torch.int32, device="cpu"), thetas[0].device)

    def subtract_(self, v: Tensor, scale: Tensor, rate: Tensor, decay: Tensor, usable: Tensor) -> None:
        """``θ ← θ − (rate · scale · v + decay · θ)`` if ``usable``; in one launch, so for all or for none.

        Args:
            v: the buffer of all directions
            scale: all scales
            rate: for each parameter
            decay: for each parameter
            usable: one flag
        """
        with torch.cuda.device(v.device):
            _subtract[(len(self.chunks),)](
                self.blocks,
                self.chunks,
                v,
                scale,
                rate,
                decay,
                usable,
                self.aligned and v.data_ptr() % 16 == 0,
                _DTYPES[self.dtype],
                tl.float64 if torch.float64 in (self.dtype, v.dtype) else tl.float32,
                CHUNK,
            )


@jit
def _subtract(  # type: ignore[no-untyped-def]
    blocks,
    chunks,
    v,
    scale,
    rate,
    decay,
    usable,
    aligned: tl.constexpr,
    dtype: tl.constexpr,
    wide: tl.constexpr,
    chunk: tl.constexpr,
):
    if tl.load(usable) != 0:
        pid = tl.program_id(0).to(tl.int64)
        b = tl.load(chunks + 2 * pid)
        i = tl.load(chunks + 2 * pid + 1) * chunk + tl.arange(0, chunk)
        block = blocks + 6 * b
        theta, numel, start = tl.load(block), tl.load(block + 1).to(tl.int32), tl.load(block + 2)
        n, after = tl.load(block + 4).to(tl.int32), tl.load(block + 5).to(tl.int32)
        if aligned:
            theta, start = tl.multiple_of(theta, 16), tl.multiple_of(start, 16)
        theta = theta.to(tl.pointer_type(dtype))
        inside = i < numel
        x = tl.load(v + start + i, mask=inside).to(wide)
        t = tl.load(theta + i, mask=inside).to(wide)
        s = tl.load(scale + tl.load(block + 3) + _position(i, numel, n, after), mask=inside).to(wide)
        d = x * (s * tl.load(rate + b).to(wide)) + t * tl.load(decay + b).to(wide)
        tl.store(theta + i, (t - d).to(dtype), mask=inside)


def _try_subtract(device: torch.device, dtype: torch.dtype, low: torch.dtype) -> None:
    theta, one = (torch.ones(16, 16, device=device) for _ in range(2))
    rates = torch.zeros(1, device=device)
    Table([theta], [0], [(0, 1, 256)]).subtract_(one.to(dtype), one[0].to(dtype), rates, rates, rates > 0)


def _wide(v: Tensor) -> Any:
    return tl.float64 if v.dtype == torch.float64 else tl.float32


def sent(values: Tensor, device: torch.device) -> Tensor:
    """To a device, without making the host wait."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
