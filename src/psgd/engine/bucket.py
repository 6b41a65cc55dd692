"""Stacks on one device and of one precision, handled together: a number for each block is computed once for all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..groups.inverse_free import InverseFree
from ..groups.near_symmetric import NearSymmetric
from ..groups.pooled import Pools
from ..ops import parameters as guarded
from ..ops.addresses import Addressed, Addresses
from ..ops.factors import MOST
from ..ops.real import real
from ..ops.streams import sent
from ..ops.tensor_table import Table
from ..ops.triton import ready
from .stack import Stack, per_block


@dataclass
class Direction:
    """Preconditioned gradients of a stack, ``scale · v``, arrays ``(B, *dims)``."""

    v: Tensor
    scale: Tensor | None

    @classmethod
    def of(cls, stack: Stack, g: Tensor, keep: bool = False, out: Tensor | None = None) -> tuple[Direction, Tensor]:
        """That of gradients, and its length for each block."""
        direction = cls(*stack.group.precondition_parts(g.to(stack.like.dtype), keep, out))
        return direction, direction.length()

    def length(self) -> Tensor:
        """For each block; not finite where an element is not, or where its square overflows."""
        dtype = torch.promote_types(self.v.dtype, torch.float32)
        if self.scale is None:
            return torch.linalg.vector_norm(self.v.flatten(1), dim=1, dtype=dtype)
        axes = [i for i in range(1, self.v.ndim) if self.scale.shape[i] == 1]
        rows = torch.linalg.vector_norm(self.v, dim=axes, keepdim=True, dtype=dtype)
        return torch.linalg.vector_norm((rows * self.scale).flatten(1), dim=1)

    def step(self, rate: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Times a number for each block: one pass over the parameters."""
        factor = per_block(rate, self.v)
        if self.scale is not None:
            factor = factor * self.scale
        if self.v.dtype == dtype:
            return self.v.mul_(factor).view(len(self.v), *shape)
        return torch.mul(self.v, factor, out=torch.empty_like(self.v, dtype=dtype)).view(len(self.v), *shape)


@dataclass
class Heading:
    """Where the blocks of a fleet go.

    Args:
        directions: of the stacks
        length: of the direction of each block
        divisor: for each block what its direction is still to be divided by, if anything; the length was already
        buffer: the one that all directions lie in, if they do
    """

    directions: list[Direction]
    length: Tensor
    divisor: Tensor | None
    buffer: Tensor | None


class Fleet:
    """Stacks that take their steps together.

    Args:
        stacks: on one device, with one dtype of ``Q`` and one of steps
        group_of: the param group of each of their blocks
    """

    def __init__(self, stacks: Sequence[Stack], group_of: Sequence[int]) -> None:
        self.stacks = list(stacks)
        self.group_of = list(group_of)
        self.counts = [len(stack.blocks) for stack in self.stacks]
        self.device, self.dtype = self.stacks[0].device, self.stacks[0].dtype
        #: what ``aim`` found
        self.table: Table | None = None

    @cached_property
    def pools(self) -> Pools | None:
        """What fits all ``Q`` at once, where they are inverse-free."""
        groups = [stack.group for stack in self.stacks]
        free = [group for group in groups if isinstance(group, InverseFree)]
        return Pools(free) if len(free) == len(groups) else None

    @cached_property
    def matrices(self) -> list[NearSymmetric]:
        """The inverse-free factors."""
        return [f for stack in self.stacks for f in stack.group.factors if isinstance(f, NearSymmetric)]

    @cached_property
    def positions(self) -> list[int]:
        """Of all parameters."""
        return [i for stack in self.stacks for i in stack.positions]

    @cached_property
    def _starts(self) -> list[int]:
        """Where in a buffer the directions of each stack begin, and where the buffer ends."""
        sizes = [len(stack.blocks) * stack.blocks[0].numel for stack in self.stacks]
        return list(accumulate((-(-size // 128) * 128 for size in sizes), initial=0))

    def room(self) -> tuple[Tensor | None, list[Tensor | None]]:
        """A buffer for the directions of all stacks, and the part of each; only where one kernel then moves all."""
        if self.table is None:
            return None, [None] * len(self.stacks)
        buffer = torch.empty(self._starts[-1], dtype=self.stacks[0].like.dtype, device=self.device)
        return buffer, [*self._parts(buffer)]

    def _parts(self, buffer: Tensor) -> Iterator[Tensor]:
        """The part of each stack."""
        for stack, start in zip(self.stacks, self._starts, strict=False):
            shape = (len(stack.blocks), *stack.group.dims)
            yield buffer[start : start + math.prod(shape)].view(shape)

    def pack(self, tensors: Mapping[int, Tensor] | Addressed) -> list[Tensor]:
        """The blocks of the given parameters, stack by stack."""
        if not isinstance(tensors, Addressed):
            return [stack.pack(tensors) for stack in self.stacks]
        assert self.table is not None
        buffer = torch.empty(self._starts[-1], dtype=self.table.dtype, device=self.device)
        self.table.gather(tensors.of[self], buffer)
        parts = zip(self.stacks, self._parts(buffer), strict=True)
        return [part.view(len(part), *stack.blocks[0].shape).to(self.dtype) for stack, part in parts]

    def aim(self, params: Sequence[Tensor]) -> None:
        """Find what kernels that go through all parameters need, if they can; anew where they lie elsewhere now."""
        if not all(ready(self.device, kernel) for kernel in Table.kernels):
            return
        thetas = [real(params[i]) for i in self.positions]
        same = self.table is not None and [theta.data_ptr() for theta in thetas] == self.table.pointers
        if not same or not all(theta.is_contiguous() for theta in thetas):
            # While someone records a CUDA graph, nothing can be sent to the device.
            self.table = None if torch.cuda.is_current_stream_capturing() else self._new_table(thetas)

    def can_read(self, tensors: Mapping[int, Tensor]) -> bool:
        """Whether kernels can: each has as many numbers of the same dtype as its parameter, on the same device."""
        assert self.table is not None
        kind = (self.table.dtype, self.device)
        each = zip([tensors[i] for i in self.positions], self.table.numels, strict=True)
        return all(t.numel() == numel and (t.dtype, t.device) == kind for t, numel in each)

    def _new_table(self, thetas: Sequence[Tensor]) -> Table | None:
        free = all(isinstance(stack.group, InverseFree) and stack.single for stack in self.stacks)
        alike = {(theta.device, theta.dtype, theta.is_contiguous()) for theta in thetas}
        small = all(theta.numel() < MOST for theta in thetas)
        if not (free and small and alike == {(self.device, thetas[0].dtype, True)}):
            return None
        starts, scales, used = [], [], 1  # the first scale is one
        for stack, start in zip(self.stacks, self._starts, strict=False):
            assert isinstance(stack.group, InverseFree)
            dims, long, numel = stack.group.dims, stack.group.long, stack.blocks[0].numel
            n, after = (1, numel) if long is None else (dims[long], math.prod(dims[long + 1 :]))
            for row in range(len(stack.blocks)):
                starts.append(start + row * numel)
                scales.append((0 if long is None else used + row * n, n, after))
            used += 0 if long is None else n * len(stack.blocks)
        return Table(thetas, starts, scales)

    def subtract_(self, heading: Heading, rate: Tensor, decay: float | Tensor, usable: Tensor) -> None:
        """Move all parameters, see ``aim``: ``θ ← θ − rate · direction − decay · θ``."""
        assert self.table is not None
        assert heading.buffer is not None
        one = self._ones[:1].to(heading.buffer.dtype)
        scales = [direction.scale.flatten() for direction in heading.directions if direction.scale is not None]
        each = torch.ones_like(rate) * decay
        self.table.subtract_(heading.buffer, torch.cat([one, *scales]), rate.contiguous(), each, usable)

    @cached_property
    def numel(self) -> Tensor:
        """Of each block."""
        sizes = [float(stack.blocks[0].numel) for stack in self.stacks for _ in stack.blocks]
        return sent(torch.tensor(sizes, dtype=self.dtype, device="cpu"), self.device)

    @cached_property
    def _ones(self) -> Tensor:
        return torch.ones(max(self.counts), dtype=self.dtype, device=self.device)

    @cached_property
    def _masks(self) -> Tensor:
        """For each param group, which blocks are in it."""
        of = torch.tensor(self.group_of, device="cpu")
        return sent(of == of.unique()[:, None], self.device)

    def number(self, groups: Sequence[Mapping[str, Any]], key: str, instead_of_none: float = 0.0) -> float | Tensor:
        """An option: one number where all blocks agree, else one for each, shape ``(B,)``."""
        mine = sorted(set(self.group_of))
        values = [instead_of_none if groups[g][key] is None else groups[g][key] for g in mine]
        first = values[0]
        # A tensor is only equal to itself: looking at its value would make the host wait.
        tensors = any(isinstance(value, Tensor) for value in values)
        if all(value is first or (not tensors and value == first) for value in values):
            return first.detach().reshape(()) if isinstance(first, Tensor) else first
        each = self.numel
        for mask, value in zip(self._masks, values, strict=True):
            each = torch.where(mask, value.detach().to(each).reshape(()) if isinstance(value, Tensor) else value, each)
        return each

    def split(self, each: float | Tensor) -> list[Any]:
        """A number for each block, as parts for the stacks."""
        if isinstance(each, Tensor) and each.ndim:
            return list(each.split(self.counts))
        return [each] * len(self.stacks)

    def average_(self, grads: Mapping[int, Tensor] | Addressed, momentum: float | Tensor, usable: Tensor) -> None:
        """Take gradients into the averages of the stacks that have one."""
        if isinstance(grads, Addressed):
            self._average_addressed_(grads.of[self], momentum, usable)
            return
        fused: tuple[list[Tensor], list[Tensor]] = ([], [])
        for stack, decay in zip(self.stacks, self.split(momentum), strict=True):
            if not stack.average:
                continue
            mean, weight = stack.average["momentum"], stack.average["momentum_weight"]
            pairs = None if isinstance(decay, Tensor) else stack.same_layout(mean, grads)
            if pairs is not None:
                fused[0].extend([*pairs[0], weight])
                fused[1].extend([*pairs[1], self._ones[: len(weight)]])
                continue
            # Where gradients are not usable, the average of the average with itself is what it was.
            rest = 1 - decay * torch.ones_like(weight)
            mean.lerp_(torch.where(usable, stack.pack(grads), mean), per_block(rest, mean))
            weight.copy_(torch.where(usable, torch.lerp(weight, torch.ones_like(weight), rest), weight))
        if fused[0]:
            assert not isinstance(momentum, Tensor)
            guarded.average_(*fused, 1 - momentum, usable)

    @property
    def averaging(self) -> bool | None:
        """Whether the gradients of blocks are averaged; None where those of some are."""
        each = {bool(stack.average) for stack in self.stacks}
        return each.pop() if len(each) == 1 else None

    @cached_property
    def _means(self) -> Addresses:
        """Of the averages."""
        return Addresses(len(self.positions), self.device)

    def aim_at_averages(self) -> None:
        """Find them, where all blocks have one, before a recording needs to know where they are."""
        if self.averaging:
            means = [stack.average["momentum"] for stack in self.stacks]
            rows = [(mean.data_ptr(), mean.nbytes, mean.nbytes // len(mean)) for mean in means]
            self._means.point([start + offset for start, end, size in rows for offset in range(0, end, size)])

    def _average_addressed_(self, grads: Addresses, momentum: float | Tensor, usable: Tensor) -> None:
        if not self.averaging:
            return
        assert self.table is not None
        rest = 1 - momentum * torch.ones_like(self.numel)
        self.table.average_(grads, self._means, self.dtype, rest, usable)
        each = [stack.average["momentum_weight"] for stack in self.stacks]
        weights = torch.cat(each)
        new = torch.where(usable, torch.lerp(weights, torch.ones_like(weights), rest), weights)
        torch._foreach_copy_(each, list(new.split(self.counts)))

    def averages(self, grads: Mapping[int, Tensor] | Addressed) -> tuple[list[Tensor], Tensor | None]:
        """The averages of the stacks, or the gradients themselves; and for each block what divides them.

        That is the sum of the weights of an average, so that it is unbiased from the first step on.
        """
        if self.averaging is False:
            return self.pack(grads), None
        if self.averaging:
            gs = [stack.average["momentum"] for stack in self.stacks]
        else:
            assert not isinstance(grads, Addressed)
            gs = [stack.average["momentum"] if stack.average else stack.pack(grads) for stack in self.stacks]
        weights = [
            stack.average["momentum_weight"] if stack.average else self._ones[: len(stack.blocks)]
            for stack in self.stacks
        ]
        # Before the first usable gradient both are zero.
        return gs, torch.cat(weights).clamp_min_(torch.finfo(self.dtype).tiny)

    def nbytes(self) -> int:
        """Of what is kept for the blocks."""
        return sum(buffer.nbytes for stack in self.stacks for buffer in stack.buffers().values())

    def shorter(self, groups: Sequence[Mapping[str, Any]], length: Tensor) -> Tensor:
        """How much preconditioned gradients of some length have to be shortened for ``max_rms``."""
        max_rms = self.number(groups, "max_rms")
        if isinstance(max_rms, Tensor) or max_rms < math.inf:
            return (max_rms * self.numel.sqrt() / length).clamp_(max=1)
        return torch.ones_like(length)

    def shortest(self, groups: Sequence[Mapping[str, Any]], total: Tensor) -> Tensor:
        """How much those of all fleets, of some length together, have to be shortened for ``max_norm``."""
        limit = self.number(groups, "max_norm", math.inf)
        return (limit / total.to(self.device)).clamp(max=1).to(self.dtype)
