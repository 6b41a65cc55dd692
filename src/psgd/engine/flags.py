"""Flags that decide whether a step is taken; they stay on the devices, so that the host never waits for a GPU."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..ops.look import seen_true, values_seen
from ..ops.parameters import Flags
from ..probes.closures import is_finite

__all__ = ["Flags", "agree", "are_finite", "count_skipped_", "loss_is_finite", "rate_is_valid"]


def loss_is_finite(loss: Any) -> list[Tensor]:
    """Flag whether the loss is finite, as a list with one element; empty if the host can see that it is finite."""
    if isinstance(loss, Tensor):
        number = values_seen(loss.detach())
        if isinstance(number, float) and math.isfinite(number):
            return []
        return [torch.isfinite(loss.detach()).all()]
    if not is_finite(loss):
        return [torch.zeros((), dtype=torch.bool, device="cpu")]
    return []


def rate_is_valid(lr: Any) -> list[Tensor]:
    """Flag whether a learning rate on a GPU is finite and at least 0; empty for others, which the host has checked."""
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        return [(torch.isfinite(lr) & (lr >= 0)).reshape(())]
    return []


def are_finite(lengths: Tensor) -> list[Tensor]:
    """Flag whether all lengths are finite, as a list with one element; empty if the host can see that they are."""
    numbers = values_seen(lengths)
    if isinstance(numbers, list) and all(map(math.isfinite, numbers)):
        return []
    return [lengths.amax() < torch.inf]


def count_skipped_(counts: Mapping[torch.device, Tensor], ok: Flags) -> None:
    """Add one to the number of skipped steps on each device whose flag is false."""
    for device, count in counts.items():
        if not seen_true(ok[device]):
            count += ~ok[device]


def agree(flags: Sequence[Tensor], devices: Collection[torch.device]) -> dict[torch.device, Tensor]:
    """Logical AND of all flags, as one flag on every device; with a single device nothing is copied."""
    if not flags:
        return {device: torch.ones((), dtype=torch.bool, device=device) for device in devices}
    local: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for flag in flags:
        local[flag.device].append(flag)
    each = [reduce(torch.logical_and, here) for here in local.values()]
    if len(each) == 1 and list(local) == list(devices):
        return dict(zip(local, each, strict=True))
    return {device: torch.stack([flag.to(device) for flag in each]).all() for device in devices}
