"""Work on a device that the host does not wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

#: number of branches of a recording whose kernels may run at the same time
BRANCHES = 4
#: number of elements from which on a task fills the device
LARGE_TASK = 2**22


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Copy of ``values`` on a device, made without the host waiting for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def at_once(tasks: Sequence[Callable[[], T]], sizes: Sequence[Tensor], device: torch.device) -> list[T]:
    """Results of independent tasks, which become branches of the graph if one is being captured.

    In a graph small kernels then run beside large ones. Otherwise one task follows the other, and large tasks always
    do: each fills the device, and can use the memory of the one before.

    Args:
        tasks: functions without arguments; each must keep what it reads until all of them are done
        sizes: for each task a tensor as large as what it works on
        device: device that they run on
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
    """Copy of values on its way to the host, which need not wait for it.

    Args:
        values: values on any device; later changes of them do not matter
    """

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        on_gpu = values.device.type == "cuda"  # elsewhere a copy that is not waited for may be read too early
        self._values = values.detach().to("cpu", non_blocking=on_gpu, copy=True)
        if on_gpu:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(values.device))

    def read(self) -> Tensor | None:
        """The values, or None if they are not there yet."""
        return self._values if self._event is None or self._event.query() else None


def capturing() -> bool:
    """Whether what the host launches now becomes part of a graph, and is not done yet."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
