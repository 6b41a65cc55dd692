"""Numbers of a param group: the values that each may have, and an error that names them."""

from __future__ import annotations

import math
import numbers
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..blocks import Block
from ..groups import Structure

#: block with the dtype and device of its ``Q``
Placed = tuple[Block, torch.dtype, torch.device]

#: largest whole number of an option: what the number of steps, which is an int64, can reach
_MOST = 2**63 - 1


def _number(value: Any) -> bool:
    """Whether a value is a number that torch computes with: no fraction, and no integer that no float can hold."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    if isinstance(value, numbers.Integral):
        return abs(int(value)) <= sys.float_info.max
    return not isinstance(value, numbers.Rational)


def _whole(value: Any, least: int, most: int = _MOST) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and least <= int(value) <= most


def _rate(value: Any) -> bool:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            return False
        if value.device.type != "cpu":  # reading it would make the host wait: `flags.rate_is_valid` checks it there
            return True
        value = value.item()
    return _number(value) and 0 <= value < math.inf


_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (_rate, "a finite number of at least 0, or a tensor with one"),
    "precond_lr": (lambda v: _number(v) and 0 < v < 1, "a number between 0 and 1, both excluded"),
    "precond_boost": (lambda v: _number(v) and 1 <= v < math.inf, "a finite number of at least 1"),
    "momentum": (lambda v: _number(v) and 0 <= v < 1, "a number of at least 0 and less than 1"),
    "weight_decay": (lambda v: _number(v) and 0 <= v < math.inf, "a finite number of at least 0"),
    "update_every": (lambda v: _whole(v, 1), "a whole number of at least 1 and less than 2⁶³"),
    "update_anneal": (lambda v: _whole(v, 0), "a whole number of at least 0 and less than 2⁶³"),
    "max_rms": (lambda v: _number(v) and v > 0, "a positive number, which may be infinite"),
    "max_norm": (lambda v: v is None or (_number(v) and v > 0), "a positive number, or None for no limit"),
    "clip_outliers": (lambda v: _number(v) and v > 1, "a number greater than 1, which may be infinite"),
    "clip_steps": (lambda v: _number(v) and v > 1, "a number greater than 1, which may be infinite"),
    "seed": (lambda v: _whole(v, -(2**63), 2**64 - 1), "a whole number of at least −2⁶³ and less than 2⁶⁴"),
    "maximize": (lambda v: isinstance(v, bool), "True or False"),
}

NAMES = tuple(_RULES)


def check(options: Mapping[str, Any], where: str = "") -> None:
    """Raise ``ValueError`` for the first option whose value is not allowed."""
    for name, (allowed, right) in _RULES.items():
        if name not in options:
            raise ValueError(f"{name}{where}: missing; PSGD wants {right}")
        if not allowed(options[name]):
            raise ValueError(f"{name}={_shown(options[name])}{where}: PSGD wants {right}")


#: for each number of which a param group has one of its own what another one then is, unless that is given too
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


def _shown(value: Any) -> str:
    """Text of a value; of an integer with thousands of digits, which Python does not print, its size."""
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return f"{'−' if value < 0 else ''}2**{value.bit_length() - 1}…"
    return repr(value)
