"""Reads of flags by the host, to skip work that would change nothing.

On a CPU such a read costs less than one small operation. For any other device the host would have to wait, so it never
reads flags there, and always launches the work.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def can_look(device: torch.device) -> bool:
    """Whether the host can read numbers without waiting for their device."""
    return device.type == "cpu"


def seen_true(flag: Tensor) -> bool:
    """Whether the host can tell, without waiting, that a flag is true."""
    return can_look(flag.device) and bool(flag)


def values_seen(values: Tensor) -> list[float] | float | None:
    """Values of a tensor as Python numbers, or None if the host would have to wait for them."""
    return values.tolist() if can_look(values.device) else None


def between(values: Tensor, least: float, most: float) -> Tensor:
    """Whether ``least < value < most`` for each value; the dtype of the values must represent both bounds."""
    numbers = values_seen(values)
    if isinstance(numbers, list) and all(least < number < most for number in numbers):
        return torch.ones_like(values, dtype=torch.bool)
    return (values > least) & (values < most)


def seen(device: torch.device, flags: Callable[[], Tensor]) -> bool:
    """Whether the host can tell, without waiting, that all flags are true.

    Args:
        device: device of the flags
        flags: function that computes the flags; it is not called if the host would have to wait for them
    """
    if not can_look(device):
        return False
    found = flags()
    return bool(found if found.numel() == 1 else found.all())
