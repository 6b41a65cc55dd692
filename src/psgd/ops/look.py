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
