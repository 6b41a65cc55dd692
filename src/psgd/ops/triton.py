"""Compilation of Triton kernels in the background, if Triton is installed, as it is with torch for CUDA."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from ..notice import warn

try:
    import triton
    from triton import language as tl
except ImportError:  # torch for CPUs comes without it
    triton = tl = None

__all__ = ["DTYPES", "jit", "multiple", "prepare", "ready", "tl", "trial", "triton", "wide"]

#: names of kernel arguments that depend on shapes
SIZES = ("numel", "n", "rows", "columns", "tiles", "total")

#: Triton's dtypes by torch's
DTYPES: dict[torch.dtype, Any] = (
    {}
    if triton is None
    else {torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
)

#: function that runs a kernel once, from the device, the dtype of ``Q`` and the dtype of estimates
Trial = Callable[[torch.device, torch.dtype, torch.dtype], None]

_trials: defaultdict[str, list[Trial]] = defaultdict(list)
#: names of kernels that most steps need, which are compiled first
_early: list[str] = []
#: kernels that are being compiled, by device and name
_compiling: dict[torch.device, dict[str, list[Future[None]]]] = {}
#: devices for which compiling has failed
_failed: set[torch.device] = set()


def jit(function: Callable[..., Any]) -> Any:
    """Compile one kernel for all shapes, as compiling costs more time than many steps; None without Triton."""
    if triton is None:
        return None
    parameters = inspect.signature(function).parameters.values()
    variable = [p.name for p in parameters if p.name in SIZES and p.annotation is inspect.Parameter.empty]
    return triton.jit(do_not_specialize=variable)(function)


def trial(name: str, early: bool = True) -> Callable[[Trial], Trial]:
    """Register a function that compiles a kernel by calling it: early, or when the kernel is first needed."""

    def add(function: Trial) -> Trial:
        _trials[name].append(function)
        if early and name not in _early:
            _early.append(name)
        return function

    return add


@cache
def prepare(device: torch.device, dtype: torch.dtype, low: torch.dtype) -> None:
    """Start to compile the kernels of a step in the background, which costs seconds, once on a machine.

    Args:
        device: device of the kernels
        dtype: dtype of ``Q``
        low: dtype of products that are only estimates
    """
    if triton is not None and device.type == "cuda":
        _begin(_early, device, dtype, low)


def _begin(names: Sequence[str], device: torch.device, dtype: torch.dtype, low: torch.dtype) -> None:
    trials = [(name, function) for name in names for function in _trials[name]]
    workers = ThreadPoolExecutor(len(trials))
    compiling = _compiling.setdefault(device, {})
    for name, function in trials:
        compiling.setdefault(name, []).append(workers.submit(function, device, dtype, low))
    workers.shutdown(wait=False)


def ready(device: torch.device, kernel: str) -> bool:
    """Whether a kernel can be used on a device; if it is being compiled, wait for it, but not for other kernels."""
    if triton is None or device.type != "cuda":
        return False
    if kernel not in _compiling.get(device, {}):
        _begin([kernel], device, torch.float32, torch.float32)
    futures = _compiling[device][kernel]
    for future in tuple(futures):  # a copy, so that other callers still find the list
        if (error := future.exception()) is not None and device not in _failed:
            _failed.add(device)
            warn(f"PSGD does without Triton on {device}, which does not work there: {error}")
    futures.clear()
    return device not in _failed


def wide(*dtypes: torch.dtype) -> Any:
    """Dtype that a kernel computes in: float32, or float64 if that is among the dtypes."""
    return tl.float64 if torch.float64 in dtypes else tl.float32


@jit
def multiple(numel, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
    """``numel``, shown to the compiler as a multiple of 16 if ``aligned``, so that it can use wide loads and stores."""
    return numel // 16 * 16 if aligned else numel
