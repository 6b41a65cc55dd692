"""Factor of the learning rate of each block, which grows while steps are too short."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..groups.base import Scaled, dots
from ..probes import Average

#: largest factor of a learning rate
MOST = 1e6
#: ratio of the speed at which the factor falls after steps that are too long to that at which it grows otherwise
CAUTION = 3


def adapted(factor: Tensor, slope: Tensor, square: Tensor, rate: float, ok: Tensor) -> Tensor:
    """``factor · exp(rate · s)``, at least 1, in which ``s`` compares the slope after the last step with that before.

    The last step went along ``−P m``. If the new gradient ``g`` still descends in this direction, ``gᵀP m`` is
    positive, and a longer step would have reached a lower loss. If the step went past the minimum along its direction,
    ``gᵀP m`` is negative. The comparison ``s = gᵀP m / mᵀP m``, limited to [−1, 1], needs no loss, and the noise of a
    new mini-batch has no part in its mean, as it is independent of ``m``.

    For a quadratic function with ``P = H⁻¹`` and a momentum of 0.9, ``s`` is about ``(1 − lr · factor) / 2`` on
    average, so the rule leads to Newton's step.

    The factor is never smaller than 1. With noise, the longest step that still descends becomes ever shorter near a
    minimum, and a rule that followed it would stop before a constant learning rate does.

    A negative ``s`` counts ``CAUTION`` times. If gradients are mostly noise, ``s`` is as often negative as positive,
    and with equal weights the bound at 1 would turn these fluctuations into a factor above 1.

    Args:
        factor: factor of each block; the zero before the first step counts as one
        slope: ``gᵀP m`` of each block
        square: ``mᵀP m`` of each block
        rate: change of the logarithm of the factor in a step with ``s = 1``
        ok: whether the step is taken
    """
    old = factor.clamp(min=1)
    s = (slope / square).clamp(-1, 1)
    s = torch.where(s < 0, CAUTION * s, s)
    new = (old * (rate * s).exp()).clamp(1, MOST)
    return torch.where(ok & (square > 0) & s.isfinite(), new, old)


def slope(Pg: Sequence[Scaled], gs: Sequence[Tensor], m: Average, beta: float) -> Tensor:
    """``gᵀP m₀`` of each block, where ``m₀`` is the unbiased average before this step; zero in the first step.

    The average before the step is not kept. Its product follows from the average after the step, which before the
    division by weights is ``m = β m₀ + (1 − β) g``.

    Args:
        Pg: ``P g``
        gs: gradients, which ``m`` already includes
        m: averaged gradients after this step
        beta: momentum
    """
    assert m.weight is not None
    weight = m.weight - (1 - beta)  # β times the weight of m₀
    return torch.where(weight > 0.5 * beta * (1 - beta), (dots(Pg, m.arrays) - (1 - beta) * dots(Pg, gs)) / weight, 0.0)
