"""Updates of many tensors of many shapes, which a flag on the device can cancel without the host reading it.

Torch's fused SGD kernel computes ``p ← p − lr (d + decay p)``. It reads and writes each tensor once, and writes nothing
if its flag ``found_inf`` is set. A running average is the same kernel with other signs. ``tensor_table`` does the same
by Triton kernels, for tensors that are given by their addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .look import seen_true
from .real import as_real

#: flag for each device: whether the step is taken
Flags = Mapping[torch.device, Tensor]


def subtract_(thetas: list[Tensor], steps: list[Tensor], decays: Sequence[float | Tensor], ok: Flags) -> None:
    """``θ ← θ − (step + decay · θ)`` for all tensors if ``ok``; the steps may be overwritten.

    One call moves all tensors, so that an interrupt or a failure finds all of them moved, or none.

    Args:
        thetas: parameters
        steps: step of each parameter, of the same shape
        decays: weight decay of each parameter, which may be a tensor on its device
        ok: flag for each device
    """
    if not thetas:
        return
    decay = decays[0]
    if isinstance(decay, Tensor) or any(isinstance(d, Tensor) or d != decay for d in decays[1:]):
        for theta, step, d in zip(thetas, steps, decays, strict=True):
            if isinstance(d, Tensor):
                step += theta.to(step.dtype) * d
            else:  # rounded once, as in the fused kernel, so that options of other groups change no bit
                step.add_(theta.to(step.dtype), alpha=d)
        decay = 0.0
    if can_fuse(thetas, steps):
        _fused_(thetas, steps, 1.0, decay, ok[thetas[0].device])
        return
    if decay:
        torch._foreach_add_(steps, [t.to(s.dtype) for t, s in zip(thetas, steps, strict=True)], alpha=decay)
    for step in steps:
        step.masked_fill_(~ok[step.device], 0)
    torch._foreach_sub_(thetas, steps)


def average_(means: list[Tensor], values: list[Tensor], weight: float, ok: Tensor) -> None:
    """``mean ← mean + weight (value − mean)`` for all tensors if ``ok``; else every mean keeps its bits."""
    if can_fuse(means, values):
        _fused_(means, values, -weight, -1.0, ok)
        return
    for mean, value in zip(means, values, strict=True):
        # Interpolation between the mean and itself leaves it unchanged.
        mean.lerp_(torch.where(ok, value.to(mean.dtype), mean), weight)


def can_fuse(targets: list[Tensor], values: list[Tensor]) -> bool:
    """Whether the fused kernel applies: it requires one dtype, one device and contiguous tensors."""
    first = targets[0]
    dtype, device = first.dtype, first.device
    # On a CPU the kernel is wrong in half precision (torch 2.13).
    if not (device.type == "cuda" or (device.type == "cpu" and dtype in (torch.float32, torch.float64))):
        return False
    return all(t.dtype == dtype and t.device == device and t.is_contiguous() for t in (*targets, *values))


def _fused_(targets: list[Tensor], values: list[Tensor], lr: float, decay: float, ok: Tensor) -> None:
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
        found_inf=None if seen_true(ok) else (~ok).to(torch.float32),
    )


def all_finite(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Flags that are true if all elements are finite, one for each device and dtype."""
    tensors = [t for t in tensors if t.numel() > 0]  # a rank's part of a small parameter may be empty
    kinds = {(t.device, t.dtype) for t in tensors}
    alike = [tensors] if len(kinds) == 1 else [[t for t in tensors if (t.device, t.dtype) == kind] for kind in kinds]
    # False for infinity, and also for NaN, for which every comparison is false.
    return [torch.stack(_witnesses([as_real(t) for t in same])).abs().amax() < torch.inf for same in alike]


def _witnesses(tensors: list[Tensor]) -> tuple[Tensor, ...] | list[Tensor]:
    """One number for each tensor that is finite if all of its elements are finite.

    On a CPU it is the sum, which costs a tenth of the time of the maximum, and overflows only if a step would too.
    """
    if tensors[0].device.type == "cpu":
        wide = torch.promote_types(tensors[0].dtype, torch.float32)
        return [t.sum(dtype=wide) for t in tensors]
    return torch._foreach_norm(tensors, torch.inf)  # largest absolute values, by one kernel for all tensors
