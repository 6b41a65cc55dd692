"""Asynchronous work on a device: copies and parallel kernels that the host does not wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

#: number of branches of a captured graph whose kernels may run in parallel
BRANCHES = 4
#: number of elements from which a task fills the device
LARGE_TASK = 2**22


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Copy of ``values`` on a device; the host does not wait for the copy."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def at_once(tasks: Sequence[Callable[[], T]], sizes: Sequence[Tensor], device: torch.device) -> list[T]:
    """Results of independent tasks, which become branches of the graph if one is being captured.

    In a graph, small kernels then run in parallel to large ones. Without a capture, tasks run one after the other, and
    large tasks always do, because each fills the device and can reuse the memory of the one before.

    Args:
        tasks: functions without arguments; each must keep the tensors that it reads alive until all tasks are done
        sizes: for each task, a tensor of the size that it works on
        device: device of the tasks
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return [task() for task in tasks]
    here = torch.cuda.current_stream(device)
    sides = _sides(device)
    for side in sides:
        side.wait_stream(here)
    results = []
    for k, (task, size) in enumerate(zip(tasks, sizes, strict=True)):
        with torch.cuda.stream(here if size.numel() >= LARGE_TASK else sides[k % len(sides)]):
            results.append(task())
    for side in sides:
        here.wait_stream(side)
    return results


@cache
def _sides(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(BRANCHES - 1)]


class Arrival:
    """Asynchronous copy of values to the host.

    Args:
        values: values on any device; later changes do not affect the copy
    """

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        on_gpu = values.device.type == "cuda"  # on other devices, an asynchronous copy could be read too early
        self._values = values.detach().to("cpu", non_blocking=on_gpu, copy=True)
        if on_gpu:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(values.device))

    def read(self) -> Tensor | None:
        """Values, or None if the copy is not complete yet."""
        return self._values if self._event is None or self._event.query() else None


def capturing() -> bool:
    """Whether a CUDA graph is being captured, so that launched kernels are recorded and not executed."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
