"""Looks of the host at flags, to leave out work that would change nothing.

On a CPU a look costs less than one small operation. For another device the host would have to wait, so it never looks
there, and the work is done.
"""

from __future__ import annotations

import torch
from torch import Tensor


def can_look(device: torch.device) -> bool:
    """Whether the host can look at numbers without waiting for their device."""
    return device.type == "cpu"


def seen(flags: Tensor) -> bool:
    """Whether the host sees, without waiting, that all flags are true."""
    return can_look(flags.device) and bool(flags.all())
