"""Work on a device that the host does not wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

#: how many kernels of a recording may run beside each other
BRANCHES = 4
#: numbers of a task that fills the device
LARGE_TASK = 2**22


def sent(values: Tensor, device: torch.device) -> Tensor:
    """To a device, without making the host wait."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def at_once(tasks: Sequence[Callable[[], T]], sizes: Sequence[Tensor], device: torch.device) -> list[T]:
    """The results of tasks that have nothing to do with each other: branches of a graph, where one is recorded.

    There small kernels run beside large ones. Everywhere else one task follows the other, and large ones always do:
    each fills the device, and can have the memory of the last.

    Args:
        tasks: whatever they read must be kept by them until all of them are done
        sizes: for each task a tensor as large as what it works on
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
        with torch.cuda.stream(here if size.numel() >= LARGE_TASK else sides[k % len(sides)]):
            results.append(task())
    for side in sides:
        here.wait_stream(side)
    return results


@cache
def _sides(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(BRANCHES - 1)]
