"""Looks of the host at flags, to leave out work that would change nothing.

On a CPU a look costs less than one small operation. For another device the host would have to wait, so it never looks
there, and the work is done.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def can_look(device: torch.device) -> bool:
    """Whether the host can look at numbers without waiting for their device."""
    return device.type == "cpu"


def seen_true(flag: Tensor) -> bool:
    """Whether the host sees, without waiting, that a flag is true."""
    return can_look(flag.device) and bool(flag)


def values_seen(values: Tensor) -> list[float] | float | None:
    """Values of a tensor as Python numbers, or None if the host would have to wait for them."""
    return values.tolist() if can_look(values.device) else None


def between(values: Tensor, least: float, most: float) -> Tensor:
    """Whether each value lies between two numbers, which its dtype must represent, without being one of them."""
    numbers = values_seen(values)
    if isinstance(numbers, list) and all(least < number < most for number in numbers):
        return torch.ones_like(values, dtype=torch.bool)
    return (values > least) & (values < most)


def seen(device: torch.device, flags: Callable[[], Tensor]) -> bool:
    """Whether the host sees, without waiting, that all flags are true.

    Args:
        device: device of the flags
        flags: computes the flags; not called if the host cannot look at them
    """
    if not can_look(device):
        return False
    found = flags()
    return bool(found if found.numel() == 1 else found.all())
