"""Random numbers as a pure function of a seed, a step and a position.

So a resumed run is exact to the bit, the ranks of a distributed run agree without communication, the result does not
depend on how blocks are stacked, and other users of random numbers are not affected.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


class Noise:
    """Standard normal numbers of one step, from private generators that are seeded anew for every draw."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, like: Tensor, seed: int, position: int) -> Tensor:
        generator = self._generators.get(like.device)
        if generator is None:
            generator = self._generators[like.device] = torch.Generator(like.device)
        generator.manual_seed(mix(seed, self.step, position))
        return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)


def mix(*words: int) -> int:
    """Hash integers to 63 bits by the finaliser of the SplitMix64 generator, so that similar inputs are unrelated."""
    h = 0
    for word in words:
        h = (h + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _MASK
        h ^= h >> 31
    return h >> 1
