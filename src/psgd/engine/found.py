"""What a step goes by, once loss and gradients have been evaluated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ..groups.inverse_free import Chores
from ..ops.addresses import Addressed

#: gradients by position, or by addresses
Grads = Mapping[int, Tensor] | Addressed
#: ``(δθ, δg)`` by position, or all ``δθ`` and all ``δg``, by addresses
Pairs = dict[int, tuple[Tensor, Tensor]] | tuple[Addressed, Addressed]


@dataclass
class Found:
    """What a step goes by.

    Args:
        grads: by position
        pairs: ``(δθ, δg)`` by position; whoever needs them may take them out
        moved: positions of the parameters whose ``Q`` is to be updated
        all_due: whether those are all
        noise: random numbers for the parameter at a position
        chores: what else an update does
    """

    grads: dict[int, Tensor]
    pairs: dict[int, tuple[Tensor, Tensor]]
    moved: list[int]
    all_due: bool
    noise: Callable[[int], Tensor]
    chores: Chores
