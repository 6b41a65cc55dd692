"""Balancing: scale is moved between the factors of a block to give all one size, so that none over- or underflows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def balancing_powers(
    logs: Tensor,
    usable: Tensor,
    mean: Callable[[Tensor], Tensor],
    total: Callable[[Tensor], Tensor],
    is_first: Tensor,
) -> Tensor:
    """Exponents of the powers of two by which factors are scaled.

    The exponents of a block have a sum of zero, so ``P`` keeps every bit.

    Args:
        logs: base-two logarithm of the size of each factor
        usable: whether each factor may be scaled
        mean: function that replaces the number of each factor by the mean over the factors of its block
        total: function that replaces the number of each factor by the sum over the factors of its block
        is_first: one for the first factor of each block, which receives the rounding error, and zero for the others
    """
    powers = torch.where(usable, (mean(logs) - logs).round_(), torch.zeros_like(logs))
    return powers - is_first * total(powers)


def scale_all_(factors: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
    """Multiply each tensor by its scale.

    One call scales all of them, so that an interrupt never leaves a ``P`` that is wrong by a power of two.
    """
    torch._foreach_mul_(list(factors), list(scales))
