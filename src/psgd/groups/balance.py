"""Balancing: scale moves between the factors of a block until all are of one size, so that none over- or underflows."""

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
    """Exponents of powers of two to multiply factors with; their sum over a block is zero, so ``P`` keeps every bit.

    Args:
        logs: logarithm to base two of the size of each factor
        usable: whether a factor may be scaled
        mean: for each factor the mean over the factors of its block
        total: for each factor the sum over the factors of its block
        is_first: one for the first factor of each block, which takes what rounding leaves, and zero for the others
    """
    powers = torch.where(usable, (mean(logs) - logs).round_(), torch.zeros_like(logs))
    return powers - is_first * total(powers)


def scale_all_(factors: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
    """Multiply each tensor with its scale.

    One call scales all of them: an interrupt finds all scaled, or none, and not a ``P`` that is off by a power of two.
    """
    torch._foreach_mul_(list(factors), list(scales))
