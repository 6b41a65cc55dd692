"""Updates of many tensors at once that a flag on the device can call off: the host never looks at it.

Torch's fused kernel for SGD, ``p ← p − lr (d + decay p)`` or nothing, reads and writes each tensor once, also where the
flag says that what it reads is not finite. A running average is the same with other signs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def subtract_(targets: list[Tensor], steps: list[Tensor], decay: float, usable: Mapping[torch.device, Tensor]) -> None:
    """``target ← target − (step + decay · target)`` for all pairs, where ``usable``; the steps may be overwritten.

    One call moves all tensors: an interrupt or a failure finds all of them moved, or none.
    """
    if not targets:
        return
    if can_fuse(targets, steps):
        _fused_(targets, steps, 1.0, decay, usable[targets[0].device])
        return
    if decay:
        torch._foreach_add_(steps, [t.to(s.dtype) for t, s in zip(targets, steps, strict=True)], alpha=decay)
    for step in steps:
        step.masked_fill_(~usable[step.device], 0)
    torch._foreach_sub_(targets, steps)


def average_(means: list[Tensor], values: list[Tensor], weight: float, usable: Tensor) -> None:
    """``mean ← mean + weight (value − mean)`` for all pairs that ``can_fuse``, where ``usable``."""
    _fused_(means, values, -weight, -1.0, usable)


def can_fuse(targets: list[Tensor], values: list[Tensor]) -> bool:
    """The kernel wants one dtype and device, and takes the elements in the order in which they lie in memory."""
    dtype, device = targets[0].dtype, targets[0].device
    both = [*targets, *values]
    kinds = {(t.dtype, t.is_contiguous()) for t in both}
    # On a CPU the kernel is wrong in half precision (torch 2.13).
    known = device.type == "cuda" or (device.type == "cpu" and dtype in (torch.float32, torch.float64))
    return known and kinds == {(dtype, True)} and {t.device for t in both} == {device}


def _fused_(targets: list[Tensor], values: list[Tensor], lr: float, decay: float, usable: Tensor) -> None:
    torch._fused_sgd_(
        targets,
        values,
        [],
        weight_decay=decay,
        momentum=0.0,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
        grad_scale=None,
        found_inf=(~usable).to(torch.float32),
    )
