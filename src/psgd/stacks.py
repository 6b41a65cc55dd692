"""Blocks of one shape, handled together: what the optimizer keeps for them, with a leading dimension B."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .blocks import Block
from .criteria import Criterion
from .groups import Group
from .normalize import Normalization
from .probes import Probe

#: names of what is kept for an average of gradients
AVERAGE = ("momentum", "momentum_weight")


class Stack:
    """Equal-shape blocks with their ``Q`` and, where it is used, the running average of their gradients.

    Args:
        blocks: the B blocks
        group: their ``Q``
        average: the average of gradients, and the sum of its weights: ``{"momentum": …, "momentum_weight": …}``, or
            empty
    """

    def __init__(self, blocks: Sequence[Block], group: Group, average: Mapping[str, Tensor]) -> None:
        self.blocks = list(blocks)
        self.group = group
        self.average = dict(average)
        #: for each block the views of all buffers that were given out as its state
        self.views: list[dict[str, Tensor]] = []
        self.like = next(iter(group.buffers().values()))

    @property
    def device(self) -> torch.device:
        return self.like.device

    def params(self) -> Iterator[int]:
        for block in self.blocks:
            yield from block.params

    def having(self, given: Container[int]) -> list[int]:
        """The blocks of which at least one parameter is given."""
        return [b for b, block in enumerate(self.blocks) if any(i in given for i in block.params)]

    def buffers(self) -> dict[str, Tensor]:
        return {**self.group.buffers(), **self.average}

    def pack(self, tensors: Mapping[int, Tensor]) -> Tensor:
        """Stack the blocks of the given parameters, by position; parameters left out count as zero."""
        packed = []
        for block in self.blocks:
            parts = [
                tensors[i] if i in tensors else torch.zeros(shape, dtype=self.like.dtype, device=self.device)
                for i, shape in zip(block.params, block.shapes, strict=True)
            ]
            packed.append(block.pack(parts).to(self.like.dtype))
        return packed[0].unsqueeze(0) if len(packed) == 1 else torch.stack(packed)

    def unpack(self, stacked: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Positions of the parameters, and their parts as views of ``stacked``."""
        for block, part in zip(self.blocks, stacked.unbind(), strict=True):
            yield from zip(block.params, block.unpack(part), strict=True)

    def select(self, chosen: Sequence[int]) -> Stack:
        """A stack of some of the blocks; all of them is this stack itself, fewer are copies (see ``put_back_``)."""
        if len(chosen) == len(self.blocks):
            return self
        part = {name: torch.stack([buffer[i] for i in chosen]) for name, buffer in self.buffers().items()}
        return Stack(
            [self.blocks[i] for i in chosen], self.group.bind(part), {name: part[name] for name in self.average}
        )

    def put_back_(self, chosen: Sequence[int], part: Stack) -> None:
        if part is self:
            return
        theirs = part.buffers()
        for name, buffer in self.buffers().items():
            for row, i in enumerate(chosen):
                buffer[i].copy_(theirs[name][row])

    def fit_(
        self,
        probe: Probe,
        criterion: Criterion,
        normalize: Normalization,
        lr: float | Tensor,
        pair: list[Tensor],
        usable: Tensor,
    ) -> None:
        """Move ``Q`` one step along what the ``pair [δθ, δg]`` says, and empty that list."""
        pair[1], informative = probe.damp(*pair)
        # Popped, they belong to the criterion alone, which lets go of each as soon as it is done with it.
        tangent = criterion(self.group, pair.pop(0), pair.pop(0))
        self.group.descend_(tangent, lr, normalize, usable & informative)

    @staticmethod
    def new_average(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """The average of no gradients, for one block."""
        return {
            "momentum": torch.zeros(*shape, dtype=dtype, device=device),
            "momentum_weight": torch.zeros((), dtype=dtype, device=device),
        }

    def start_average(self) -> None:
        new = self.new_average(self.blocks[0].shape, self.like.dtype, self.device)
        count = len(self.blocks)
        self.average = {name: value.expand(count, *value.shape).clone() for name, value in new.items()}

    def average_(self, grad: Tensor, momentum: float | Tensor, usable: Tensor) -> Tensor:
        """Take ``grad`` into the exponential average, and return the average.

        The sum of the weights is kept along, so the average is unbiased from the first step on.
        """
        mean, weight = self.average["momentum"], self.average["momentum_weight"]
        decay = momentum if isinstance(momentum, Tensor) else torch.full_like(weight, momentum)
        keep = per_block(decay, grad)
        mean.copy_(torch.where(usable, keep * mean + (1 - keep) * grad, mean))
        weight.copy_(torch.where(usable, decay * weight + (1 - decay), weight))
        # Before the first usable gradient both are zero.
        return mean / per_block(weight.clamp_min(torch.finfo(weight.dtype).tiny), grad)


def per_block(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A number for each block, ready to be multiplied with arrays of the stack."""
    return value.reshape(-1, *[1] * (like.ndim - 1)) if isinstance(value, Tensor) and value.ndim else value
