"""Whether a step can be taken at all, as flags on the devices: the host never reads them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..ops.parameters import Flags
from ..probes.closures import is_finite

__all__ = ["Flags", "agree", "loss_is_finite", "rate_is_valid"]


def loss_is_finite(loss: Any) -> list[Tensor]:
    """A flag, if there is anything to say."""
    if isinstance(loss, Tensor):
        return [torch.isfinite(loss.detach()).all()]
    if not is_finite(loss):
        return [torch.zeros((), dtype=torch.bool, device="cpu")]
    return []


def rate_is_valid(lr: Any) -> list[Tensor]:
    """A flag for a learning rate that lives on a device: whether it is a finite number of at least 0."""
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        return [(torch.isfinite(lr) & (lr >= 0)).reshape(())]
    return []


def agree(flags: Sequence[Tensor], devices: Collection[torch.device]) -> dict[torch.device, Tensor]:
    """Whether all flags are true, for every device. With one device nothing has to be sent."""
    local: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for flag in flags:
        local[flag.device].append(flag)
    each = [reduce(torch.logical_and, here) for here in local.values()]
    if len(each) == 1 and list(local) == list(devices):
        return dict(zip(local, each, strict=True))
    return {
        device: torch.stack([flag.to(device) for flag in each]).all()
        if each
        else torch.ones((), dtype=torch.bool, device=device)
        for device in devices
    }
