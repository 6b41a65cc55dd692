"""Limits of gradients and steps, each derived from the lengths that those of the same block had before."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from ..ops.look import between

#: factor by which the length of the longest recent gradient fades in a step
FADING = 0.99
#: factor by which older steps count less in the average of their lengths
FORGETTING = 0.98


def of_gradients(
    lengths: Tensor, longest: Tensor, most: float, ok: Tensor, look: bool = False
) -> tuple[Tensor | None, Tensor]:
    """Factor for each block that makes its gradient at most ``most`` times as long as the longest recent one.

    The length of the longest recent gradient fades slowly, and rises by at most the same factor in a step. So an
    outlier of any size changes the averages by little, and if gradients stay long, they are no longer shortened after a
    few steps.

    Args:
        lengths: length of the gradient of each block
        longest: length of the longest recent one; zero before the first
        most: largest ratio
        ok: whether the step is taken
        look: whether the host may look at the lengths; there are no factors then if nothing is shortened

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
    """Factor for each block that makes its step at most ``most`` times as long as they have been on average.

    A step that is shortened to twice the average of ``n`` steps raises that average by a factor of ``1 + 1/n``, where
    ``n`` is at most 50. So lengths grow at most in proportion to the number of steps at first, and later by two percent
    in a step: enough for a ``P`` that is still too small, and too slow to explode where ``P`` is wrong.

    Steps too short to move anything are not counted. Nor are those of a gradient that had to be limited: it is an
    outlier, or the loss has changed its scale, and ``P`` has not followed yet.

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
    new = count == 0
    factor = (most * total / (count * lengths)).clamp_(max=1).masked_fill_(new, float(fitted))
    counted = ok & between(lengths, torch.finfo(lengths.dtype).eps ** 2, torch.inf)
    if not fitted:
        counted = counted & ~new
    if gradient is not None:
        counted = counted & (gradient == 1)
    total = torch.where(counted, FORGETTING * total + lengths * factor, total)
    return factor, total, torch.where(counted, FORGETTING * count + 1, count)
