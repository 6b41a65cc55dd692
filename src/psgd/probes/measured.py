"""Measurements of a step: the result of a probe's evaluation, and the arrays that ``Q`` is fitted to."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

#: function from the position of a parameter to standard normal numbers of the shape and dtype of its ``as_real``
Noise = Callable[[int], Tensor]


@dataclass
class Evaluation:
    """Loss and gradients at the current parameters, and the measured pairs by position of their parameter."""

    loss: Any
    grads: list[Tensor | None]
    pairs: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(eq=False)
class Average:
    """Averaged gradients of the blocks of a bucket, or the gradients themselves.

    Args:
        pack: function that returns an array ``(B, *shape)`` for each group of ``Q``; it is called when the arrays are
            first needed
        weight: divisor of each block, such as the sum of the weights of an average, or None
        averaged: whether the arrays are an average, and not the gradients themselves
        lengths: length of each block of the arrays, if it is known
    """

    pack: Callable[[], list[Tensor]]
    weight: Tensor | None
    averaged: bool = True
    lengths: Tensor | None = None

    @cached_property
    def arrays(self) -> list[Tensor]:
        """Arrays ``(B, *shape)``, one for each group of ``Q``."""
        return self.pack()

    def unbiased(self) -> Iterator[Tensor]:
        """``m / weight``: an average that is unbiased from the first step on, or limited gradients."""
        if self.weight is None:
            yield from self.arrays
            return
        for m, w in zip(self.arrays, self.weight.split([len(m) for m in self.arrays]), strict=True):
            yield m / w.view(-1, *[1] * (m.ndim - 1))


@dataclass
class Measured:
    """Measurements of one step for the blocks of a bucket: arrays ``(B, *shape)``, one for each group of ``Q``.

    Args:
        average: averaged gradients
        gradients: function that returns the gradients, with the divisors that limit them
        pairs: ``[δθ, δg]`` for each group, created on demand; the caller owns them
        noise: standard normal numbers for each group, created on demand
        sign: −1 for a loss that is maximised, else 1
        chores: result of ``Probe.chores`` for this update
        outs: function that returns for each group the tensor to write ``P g`` to, or None
        support: function that returns for each group the slices with a nonzero gradient: for each axis an array
            ``(B, n)`` of ones and zeros, or None for the group if all its slices have one
        start: whether a ``Q`` that is still the identity is first scaled to the size that its first pair shows
    """

    average: Average
    gradients: Callable[[], Average]
    pairs: Iterator[list[Tensor]]
    noise: Iterator[Tensor]
    sign: float
    chores: Hashable
    outs: Callable[[], list[Tensor | None]]
    support: Callable[[], list[list[Tensor] | None]]
    start: bool = False
