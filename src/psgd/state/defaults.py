"""Defaults of the step size of ``Q`` and of how often it is updated, by structure, probe, shapes and device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import torch

from ..blocks import Placed
from ..groups import Structure

#: options of a param group that imply a value of another one: ``(option, other option, implied value)``
FOLLOWING = (("precond_lr", "precond_boost", 1.0), ("update_every", "update_anneal", 0))

#: number of samples whose gradients cost as much as an average step spends on updates of ``Q`` on a CPU
SAMPLES = 128
#: smallest and largest default of ``update_every`` on a CPU; if ``Q`` is fitted to curvature, it is the smallest, or 1
RARELY = (10, 50)
#: FLOPs above which an update on a CPU lasts longer than everything else that an optimizer does in a step
MUCH = 2e8
#: default of ``update_anneal`` on a CPU: number of steps after which updates have become that rare
ANNEAL = 100


class Given(NamedTuple):
    """Options for ``Q`` that the user gave to the optimizer; None for those that it chooses itself."""

    precond_lr: float | None
    precond_boost: float | None
    update_every: int | None
    update_anneal: int | None

    def fill(
        self, group: MutableMapping[str, Any], structure: Structure, whitening: bool, blocks: Sequence[Placed]
    ) -> None:
        """Add the options that a new param group lacks: the values given to the optimizer, or else the defaults."""
        for name, follower, value in FOLLOWING:
            if name in group and getattr(self, follower) is None:
                group.setdefault(follower, value)
        for name, number in self.resolve(structure, whitening, blocks).items():
            group.setdefault(name, number)

    def resolve(self, structure: Structure, whitening: bool, blocks: Sequence[Placed] = ()) -> dict[str, float]:
        """Options for the blocks of a param group.

        Args:
            structure: structure of ``Q``
            whitening: whether ``Q`` is fitted to gradients instead of pairs
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
    """Rare updates on a CPU, so that they cost on average about as much as the gradients of ``SAMPLES`` samples.

    The gradient of a sample costs three products with each parameter. Inverse-free factors whiten without random
    numbers, and ``P`` changes slowly: updates at every step gain nothing on networks, and double the time of a step
    even if axes are short. A ``Q`` that is fitted to curvature is updated at every step, or every ten steps if axes are
    long. The bound ``MUCH`` is for small models, such as functions of a few numbers: they have no mini-batches to
    compare the cost with.
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
