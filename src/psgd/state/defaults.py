"""Step size of ``Q`` and how often it is updated, where PSGD chooses them: by structure, probe, shapes and device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import torch

from ..blocks import Placed
from ..groups import Structure

#: numbers of a param group that mean another one too, and what that one then is unless it is given
FOLLOWING = (("precond_lr", "precond_boost", 1.0), ("update_every", "update_anneal", 0))

#: number of samples whose gradient costs as much as the updates of ``Q`` on a CPU do on average
SAMPLES = 128
#: fewest and most steps between two updates of ``Q`` on a CPU; if it is fitted to curvature, the fewest, or one
RARELY = (10, 50)
#: FLOPs of an update from which on it lasts longer on a CPU than all else that an optimizer does in a step
MUCH = 2e8
#: number of steps after which updates are as rare as that
ANNEAL = 100


class Given(NamedTuple):
    """Numbers for ``Q`` that were given to the optimizer; None for those that it chooses."""

    precond_lr: float | None
    precond_boost: float | None
    update_every: int | None
    update_anneal: int | None

    def fill(
        self, group: MutableMapping[str, Any], structure: Structure, whitening: bool, blocks: Sequence[Placed]
    ) -> None:
        """Add to a new param group the numbers that it does not have: those that were given, or that are chosen."""
        for name, follower, value in FOLLOWING:
            if name in group and getattr(self, follower) is None:
                group.setdefault(follower, value)
        for name, number in self.resolve(structure, whitening, blocks).items():
            group.setdefault(name, number)

    def resolve(self, structure: Structure, whitening: bool, blocks: Sequence[Placed] = ()) -> dict[str, float]:
        """Numbers for the blocks of a param group.

        Args:
            structure: structure of ``Q``
            whitening: whether ``Q`` is fitted to gradients themselves
            blocks: all blocks of the group, with dtype and device
        """
        size = max((block.numel for block, *_ in blocks), default=1)
        usual = {
            "precond_lr": structure.precond_lr(whitening, size),
            "precond_boost": structure.precond_boost(whitening) if self.precond_lr is None else 1.0,
            "update_every": 1,
            "update_anneal": 0,
        }
        if self.update_every is None and blocks and all(device.type == "cpu" for *_, device in blocks):
            usual |= _on_cpu(structure, whitening, blocks)
        return {name: usual[name] if number is None else number for name, number in self._asdict().items()}


def _on_cpu(structure: Structure, whitening: bool, blocks: Sequence[Placed]) -> dict[str, int]:
    """Rare updates on a CPU, so that they cost on average about as much as gradients of ``SAMPLES`` samples.

    A gradient costs three products with each parameter and sample. Inverse-free factors whiten without random numbers,
    and ``P`` of gradients changes slowly: there updates at every step gain nothing on networks, and double the time of
    a step even if axes are short. Curvature is worth an update at every step, or at one of ten if axes are long. Small
    models, such as functions of few numbers, have no mini-batches of samples to compare with.
    """
    shapes = Counter(block.shape for block, *_ in blocks)
    groups = {shape: structure.init(shape, dtype=torch.float32, device="meta") for shape in shapes}
    if not all(group.whitens for group in groups.values()):
        return {}
    of_updates = sum(count * sum(groups[shape].flops(update_every=1)) for shape, count in shapes.items())
    of_gradient = sum(count * math.prod(shape) for shape, count in shapes.items()) * 6 * SAMPLES
    every, (least, most) = int(of_updates / of_gradient), RARELY
    costs_much = every >= least and of_updates >= MUCH
    if not (whitening or costs_much):
        return {}
    return {"update_every": min(every, most) if costs_much and whitening else least, "update_anneal": ANNEAL}
