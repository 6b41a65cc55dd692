"""Stacks on one device and of one precision, handled together: a number for each block is computed once for all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from . import guarded
from .groups.inverse_free import InverseFree
from .groups.whitener import Whitener, sent
from .stacks import Stack, per_block


@dataclass
class Direction:
    """Preconditioned gradients of a stack, ``scale · v``, arrays ``(B, *dims)``."""

    v: Tensor
    scale: Tensor | None

    @classmethod
    def of(cls, stack: Stack, g: Tensor, keep: bool = False) -> Direction:
        return cls(*stack.group.precondition_parts(g.to(stack.like.dtype), keep))

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
        factor = torch.as_tensor(per_block(rate, self.v))
        if self.scale is not None:
            factor = factor * self.scale
        if self.v.dtype == dtype:
            return self.v.mul_(factor).view(len(self.v), *shape)
        return torch.mul(self.v, factor, out=torch.empty_like(self.v, dtype=dtype)).view(len(self.v), *shape)


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

    @cached_property
    def whitener(self) -> Whitener | None:
        """Where ``Q`` can be whitened without random numbers."""
        groups = [stack.group for stack in self.stacks]
        free = [group for group in groups if isinstance(group, InverseFree)]
        return Whitener(free) if len(free) == len(groups) else None

    @cached_property
    def numel(self) -> Tensor:
        """Of each block."""
        sizes = [float(stack.blocks[0].numel) for stack in self.stacks for _ in stack.blocks]
        return sent(torch.tensor(sizes, dtype=self.dtype), self.device)

    @cached_property
    def _ones(self) -> Tensor:
        return torch.ones(max(self.counts), dtype=self.dtype, device=self.device)

    @cached_property
    def _masks(self) -> Tensor:
        """For each param group, which blocks are in it."""
        of = torch.tensor(self.group_of)
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

    def average_(
        self, grads: Mapping[int, Tensor], momentum: float | Tensor, usable: Tensor
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """Take gradients into the averages of the stacks that have one.

        Returns:
            the averages, and for each block what divides them: the sum of their weights, so that they are unbiased from
            the first step on
        """
        if not any(stack.average for stack in self.stacks):
            return [None] * len(self.stacks), None
        fused: tuple[list[Tensor], list[Tensor]] = ([], [])
        means: list[Tensor | None] = []
        weights = []
        for stack, decay in zip(self.stacks, self.split(momentum), strict=True):
            if not stack.average:
                means.append(None)
                weights.append(torch.ones(len(stack.blocks), dtype=self.dtype, device=self.device))
                continue
            mean, weight = stack.average["momentum"], stack.average["momentum_weight"]
            means.append(mean)
            weights.append(weight)
            pairs = None if isinstance(decay, Tensor) else stack.same_layout(mean, grads)
            if pairs is not None:
                fused[0].extend([*pairs[0], weight])
                fused[1].extend([*pairs[1], self._ones[: len(weight)]])
                continue
            # Where gradients are not usable, the average of the average with itself is what it was.
            rest = 1 - decay * torch.ones_like(weight)
            mean.lerp_(torch.where(usable, stack.pack(grads), mean), torch.as_tensor(per_block(rest, mean)))
            weight.copy_(torch.where(usable, torch.lerp(weight, torch.ones_like(weight), rest), weight))
        if fused[0]:
            assert not isinstance(momentum, Tensor)
            guarded.average_(*fused, 1 - momentum, usable)
        # Before the first usable gradient both are zero.
        return means, torch.cat(weights).clamp_min_(torch.finfo(self.dtype).tiny)

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
