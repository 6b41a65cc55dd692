"""Step of the parameters: ``θ ← θ − (rate · d + decay · θ)``, for all buckets at once."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops import parameters
from ..ops.parameters import Flags
from ..ops.real import as_real
from . import flags
from .bucket import Bucket
from .direction import Direction

Options = Mapping[str, Any]


class Motion:
    """Directions of all buckets, and the rate of each block: ``lr · limit · pace / divisor``, limited by ``max_norm``.

    Args:
        buckets: all buckets of a step
        directions: direction of each bucket
        groups: param groups
        total_length: function from the length of this rank's directions to the length of the directions of all ranks
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        directions: Sequence[Direction],
        groups: Sequence[Options],
        total_length: Callable[[Tensor], Tensor],
    ) -> None:
        self.buckets, self.directions = buckets, directions
        mine = [groups[bucket.group] for bucket in buckets]
        lengths = [direction.length for direction in directions]
        rates = [direction.limit for direction in directions]
        if any(group["max_norm"] is not None for group in groups):
            total = total_length(_length([length * rate for length, rate in zip(lengths, rates, strict=True)]))
            for k, own in enumerate(mine):
                if own["max_norm"] is not None:
                    factor = (own["max_norm"] / total.to(rates[k].device)).clamp(max=1)
                    rates[k] = rates[k] * factor.to(rates[k].dtype)
        for k, (own, direction) in enumerate(zip(mine, directions, strict=True)):
            lr = own["lr"].detach().reshape(()) if isinstance(own["lr"], Tensor) else own["lr"]
            rates[k] = rates[k] * (-lr if own["maximize"] else lr)
            if direction.pace is not None:
                rates[k] = rates[k] * direction.pace
            if direction.divisor is not None:
                rates[k] = rates[k] / direction.divisor
        #: rates of the blocks of each bucket
        self.rates = rates
        #: weight decay of one step for each param group
        self.decays = [decay(group) for group in groups]

    def is_finite(self) -> list[Tensor]:
        """Flags that tell whether the lengths of all directions are finite."""
        return [flag for direction in self.directions for flag in flags.are_finite(direction.length)]

    def steps(self) -> Iterator[tuple[int, Tensor]]:
        """``rate · d`` for each parameter, with its position; this may overwrite the directions."""
        for bucket, direction, rates in zip(self.buckets, self.directions, self.rates, strict=True):
            for stack, d, rate in zip(bucket.stacks, direction.arrays, bucket.split(rates), strict=True):
                yield from stack.unpack(d.times(rate, stack.blocks[0].shape, bucket.dtype))

    def apply_(self, params: Sequence[Tensor], group_of: Sequence[int], given: Container[int], ok: Flags) -> None:
        """Move all parameters that have gradients if ``ok``, and none of them otherwise.

        Args:
            params: all parameters
            group_of: index of the param group of each parameter
            given: positions of the parameters that have gradients
            ok: flag for each device
        """
        if all(direction.buffer is not None for direction in self.directions):
            for bucket, direction, rates in zip(self.buckets, self.directions, self.rates, strict=True):
                _subtract_by_table_(bucket, direction, rates, self.decays[bucket.group], ok[bucket.device])
            return
        steps = [(i, step) for i, step in self.steps() if i in given]
        thetas = [as_real(params[i]) for i, _ in steps]
        parameters.subtract_(thetas, [step for _, step in steps], [self.decays[group_of[i]] for i, _ in steps], ok)


def decay(group: Options) -> float | Tensor:
    """Decoupled weight decay of one step, ``lr · weight_decay``."""
    if not group["weight_decay"]:
        return 0.0
    lr = group["lr"]
    return group["weight_decay"] * (lr.detach().reshape(()) if isinstance(lr, Tensor) else lr)


def _subtract_by_table_(bucket: Bucket, direction: Direction, rates: Tensor, decay: float | Tensor, ok: Tensor) -> None:
    assert bucket.table is not None
    assert direction.buffer is not None
    one = bucket.ones[:1].to(direction.buffer.dtype)
    scales = [d.scale.flatten() for d in direction.arrays if d.scale is not None]
    each = torch.ones_like(rates) * decay
    bucket.table.subtract_(direction.buffer, torch.cat([one, *scales]), rates.contiguous(), each, ok)


def _length(parts: Sequence[Tensor]) -> Tensor:
    """Length of the vector that all blocks form together, from the lengths of the blocks."""
    if not parts:
        return torch.zeros((), device="cpu")
    each = [part.norm() for part in parts]
    wide = max((length.dtype for length in each), key=lambda dtype: torch.finfo(dtype).bits)
    return torch.stack([length.to(each[0].device, wide) for length in each]).norm()
