"""Whether a step can be used at all, kept as flags on the devices: the host never looks at them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .real import real

Flags = Mapping[torch.device, Tensor]


def finite(loss: Any, grads: Iterable[Tensor]) -> list[Tensor]:
    """Flags that are true where loss and gradients are finite."""
    alike: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for grad in grads:
        alike[grad.device, grad.dtype].append(real(grad))
    flags = [torch.isfinite(torch.stack(_largest_of_each(same))).all() for same in alike.values()]
    if isinstance(loss, Tensor):
        flags.append(torch.isfinite(loss.detach()).all())
    elif isinstance(loss, (int, float)) and not math.isfinite(loss):
        flags.append(torch.zeros((), dtype=torch.bool, device="cpu"))
    return flags


def _largest_of_each(tensors: list[Tensor]) -> tuple[Tensor, ...] | list[Tensor]:
    """The largest absolute values of tensors: finite exactly where all of their elements are."""
    if tensors[0].device.type == "cpu":
        return [torch.maximum(t.amax(), -t.amin()) for t in tensors]
    return torch._foreach_norm(tensors, torch.inf)  # a single kernel for all


def agree(flags: Sequence[Tensor], devices: Iterable[torch.device]) -> dict[torch.device, Tensor]:
    """Whether all flags are true, told to every device. With one device nothing has to be sent."""
    local: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for flag in flags:
        local[flag.device].append(flag)
    each = [torch.stack(here).all() for here in local.values()]
    return {
        device: torch.stack([flag.to(device) for flag in each]).all()
        if each
        else torch.ones((), dtype=torch.bool, device=device)
        for device in devices
    }
