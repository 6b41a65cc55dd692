"""Limits of gradients and steps, each relative to earlier gradients or steps of the same block."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from ..ops.look import between

#: factor by which the remembered length of the longest gradient decays in a step
FADING = 0.99
#: factor by which the weight of earlier steps decays in the average length of steps
FORGETTING = 0.98


def of_gradients(
    lengths: Tensor, longest: Tensor, most: float, ok: Tensor, look: bool = False
) -> tuple[Tensor | None, Tensor]:
    """Factor for each block that makes its gradient at most ``most`` times as long as the longest recent one.

    The remembered length of the longest gradient decays slowly, and rises by at most a factor of ``most`` in a step. An
    outlier of any size therefore changes the averages by little, and if gradients stay long, they are no longer
    shortened after a few steps.

    Args:
        lengths: length of the gradient of each block
        longest: length of the longest recent gradient of each block; zero before the first
        most: largest ratio
        ok: whether the step is taken
        look: whether the host may read the lengths; it then returns None instead of factors that are all one

    Returns:
        the factors or None, and the new length of the longest recent gradient
    """
    bound, factor, positive = most * longest, None, False
    if look and all(map(operator.le, numbers := lengths.tolist(), bound.tolist())):
        positive = all(numbers)
    else:
        factor = bound.div_(lengths).clamp_(max=1).masked_fill_(longest == 0, 1)
        lengths = lengths * factor
    new = torch.maximum(longest * FADING, lengths)
    return factor, new if positive and bool(ok) else torch.where(ok & (lengths > 0), new, longest)


def of_steps(
    lengths: Tensor,
    total: Tensor,
    count: Tensor,
    most: float,
    ok: Tensor,
    gradient: Tensor | None = None,
    fitted: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Factor for each block that makes its step at most ``most`` times as long as its average earlier step.

    A step that is shortened to twice the average of ``n`` steps raises that average by a factor of ``1 + 1/n``, where
    ``n`` is at most 50. Lengths therefore grow at most in proportion to the number of steps at first, and later by two
    percent in a step. This is fast enough for a ``P`` that is still too small, and too slow to explode if ``P`` is
    wrong.

    Steps too short to move anything are not counted. Steps whose gradient had to be limited are not counted either:
    such a gradient is an outlier, or the loss has changed its scale and ``P`` has not followed yet.

    Args:
        lengths: length of the step of each block
        total: sum of the lengths of earlier steps, which decay by ``FORGETTING`` in a step
        count: number of these steps, which decays likewise
        most: largest ratio
        ok: whether the step is taken
        gradient: factor that limited the gradient of each block, or None
        fitted: whether ``Q`` was updated in this step. A block does not move before ``Q`` is first updated: until
            then ``P`` is the identity, and steps have an arbitrary size.

    Returns:
        the factors, and the new sum and number
    """
    new = count == 0
    factor = (most * total / (count * lengths)).clamp_(max=1).masked_fill_(new, float(fitted))
    counted = ok & between(lengths, torch.finfo(lengths.dtype).eps ** 2, torch.inf)
    if not fitted:
        counted = counted & ~new
    if gradient is not None:
        counted = counted & (gradient == 1)
    total = torch.where(counted, FORGETTING * total + lengths * factor, total)
    return factor, total, torch.where(counted, FORGETTING * count + 1, count)
