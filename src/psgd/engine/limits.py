"""Limits of gradients and steps, each derived from the lengths that those of the same block had before."""

from __future__ import annotations

import torch
from torch import Tensor

#: factor by which the length of the longest recent gradient fades in a step, and older steps count less in an average
FADING = 0.99


def of_gradients(lengths: Tensor, longest: Tensor, most: float, ok: Tensor) -> tuple[Tensor, Tensor]:
    """Factor for each block that makes its gradient at most ``most`` times as long as the longest recent one.

    The length of the longest recent gradient fades slowly, and rises by at most the same factor in a step. So an
    outlier of any size changes the averages by little, and if gradients stay long, they are no longer shortened after a
    few steps.

    Args:
        lengths: length of the gradient of each block
        longest: length of the longest recent one; zero before the first
        most: largest ratio
        ok: whether the step is taken

    Returns:
        the factors, and the new length of the longest recent gradient
    """
    factor = (most * longest).div_(lengths).clamp_(max=1).masked_fill_(longest == 0, 1)
    return factor, torch.where(ok & (lengths > 0), torch.maximum(longest * FADING, lengths * factor), longest)


def of_steps(
    lengths: Tensor,
    total: Tensor,
    count: Tensor,
    most: float,
    ok: Tensor,
    gradient: Tensor | None = None,
    fitted: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Factor for each block that makes its step at most ``most`` times as long as they have been on average.

    A step that is shortened to twice the average of ``n`` steps raises that by a factor of ``1 + 1/n``, where ``n`` is
    at most 100. So lengths can grow in proportion to the number of steps at first, and later by one percent in a step,
    which is enough for a ``P`` that is still too small. Where ``P`` is wrong and every step makes it worse, it would
    otherwise double them. Steps too short to move anything are not counted.

    A gradient that had to be limited, too, is an outlier, or the loss is another one now: its step does not count, and
    those before count half. After eight of them the average starts anew.

    Args:
        lengths: length of the step of each block
        total: sum of the lengths of the steps before
        count: number of these; both fade slowly
        most: largest ratio
        ok: whether the step is taken
        gradient: factor that limited the gradient of each block, or None
        fitted: whether ``Q`` was updated in this step. The first step of a block waits for that: before, ``P`` is the
            identity, and steps are of any size.

    Returns:
        the factors, and the new sum and number
    """
    new = count < 0.5
    factor = (most * total / (count * lengths)).clamp_(max=1).masked_fill_(new, float(fitted))
    counted = ok & (lengths > torch.finfo(lengths.dtype).eps ** 2) & (lengths < torch.inf)
    if not fitted:
        counted = counted & ~new
    share = counted.to(lengths.dtype) * (FADING - 1) + 1
    if gradient is not None:
        limited = ok & (gradient < 1)
        counted, share = counted & ~limited, torch.where(limited, 0.5, share)
    total = share * total + torch.where(counted, lengths * factor, 0.0)
    return factor, total, share * count + counted
