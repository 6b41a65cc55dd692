"""Measurements of a step: copies what the step will change, compares afterwards, and fetches all numbers at once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..blocks import Block
from ..criteria import IN_EXPECTATION, log_length, misfit
from ..engine.stack import Stack, per_block
from ..groups import Group
from ..groups.condition import change, condition
from ..ops.distributed import local
from ..ops.real import as_real
from ..optimizer import PSGD
from ..probes import Evaluation
from ..probes.noise import Noise

#: for each stack a tensor with a number for each block; for the condition, for each factor and block
Numbers = list[Tensor]
#: numbers by the name of the metric
OfBlocks = dict[str, Numbers]


class Fit:
    """Measurement of the fit of ``Q`` in one step: its residual before, and how far it moved.

    Args:
        optimizer: the optimizer during a step, when nothing has moved yet
        step: number of the step
        evaluation: result of its probe
        grads: whole gradients
    """

    def __init__(self, optimizer: PSGD, step: int, evaluation: Evaluation, grads: Mapping[int, Tensor]) -> None:
        self.optimizer = optimizer
        self.step = step
        self.stacks = optimizer.stacks
        self.before = [_copy(stack.group) for stack in self.stacks]
        self.of_average = optimizer.probe.of_average
        # The average that will be whitened does not yet contain this gradient.
        self.residual = [] if self.of_average else [self._residual(stack, evaluation, grads) for stack in self.stacks]

    def finish(self) -> OfBlocks:
        """Numbers of the blocks, after the step."""
        if self.of_average:
            pairs = zip(self.stacks, self.before, strict=True)
            self.residual = [whitening_residual(self.optimizer, stack, Q, self.step) for stack, Q in pairs]
        moved = [change(stack.group, Q) for stack, Q in zip(self.stacks, self.before, strict=True)]
        return {"residual": self.residual, "q_step": moved}

    def _residual(self, stack: Stack, evaluation: Evaluation, grads: Mapping[int, Tensor]) -> Tensor:
        if self.optimizer.probe.whitens:
            return residual_of_whitening(self.optimizer, stack, stack.group, stack.pack(grads), self.step)
        found = {i: evaluation.pairs[i] for i in stack.params() if i in evaluation.pairs}
        if not found:
            return torch.full((len(stack.blocks),), torch.nan, device=stack.device)
        dtheta, dgrad = (stack.pack({i: pair[k] for i, pair in found.items()}) for k in range(2))
        return _misfit(self.optimizer, stack, stack.group, dtheta, dgrad)


class Move:
    """Measurement of how far parameters move in one step."""

    def __init__(self, optimizer: PSGD) -> None:
        self.stacks = optimizer.stacks
        self.params = optimizer.parameters()
        positions = [i for stack in self.stacks for i in stack.positions]
        self.before = {i: as_real(local(self.params[i].detach())).clone() for i in positions}

    def finish(self) -> Numbers:
        """Root mean square of the step of each block, after the step; for divided parameters of this rank's part."""
        return [torch.stack([self._rms(block.params) for block in stack.blocks]) for stack in self.stacks]

    def _rms(self, positions: Sequence[int]) -> Tensor:
        squares: list[Tensor] = []
        count = 0
        for i in positions:
            old = self.before[i]
            dtype = torch.promote_types(old.dtype, torch.float32)
            step = as_real(local(self.params[i].detach())).to(dtype) - old
            squares.append(torch.linalg.vector_norm(step).square())
            count += step.numel()
        return (torch.stack(squares).sum() / count).sqrt()


def arranged(found: OfBlocks, then: Sequence[Sequence[Block]], now: Sequence[Stack]) -> OfBlocks:
    """Rearrange numbers of blocks to the present stacks, after blocks were stacked again.

    Args:
        found: for each metric and each earlier stack a number for each block
        then: blocks of each earlier stack
        now: present stacks of the optimizer; blocks without a number get NaN
    """
    result: OfBlocks = {}
    for metric, numbers in found.items():
        each = {
            block.params: number
            for blocks, values in zip(then, numbers, strict=True)
            for block, number in zip(blocks, values.unbind(), strict=True)
        }
        result[metric] = [
            torch.stack([each.get(b.params, torch.full((), torch.nan, device=stack.device)) for b in stack.blocks])
            for stack in now
        ]
    return result


def whitening_residual(optimizer: PSGD, stack: Stack, Q: Group, step: int) -> Tensor:
    """Residual of whitening the averages in the state; NaN if there are none."""
    if not (optimizer.probe.whitens and stack.average):
        return torch.full((len(stack.blocks),), torch.nan, device=stack.device)
    mean, weight = stack.average["momentum"], stack.average["momentum_weight"]
    g = mean / per_block(weight.clamp_min(torch.finfo(weight.dtype).tiny), mean)
    return residual_of_whitening(optimizer, stack, Q, g, step)


def residual_of_whitening(optimizer: PSGD, stack: Stack, Q: Group, g: Tensor, step: int) -> Tensor:
    """Misfit of the pair ``(v, g)``; in inverse-free coordinates with ``E‖v‖²`` for ``v``, as in the update there."""
    if Q.whitens and optimizer.criterion in IN_EXPECTATION:
        numel = stack.blocks[0].numel
        found = (2 * log_length(Q.a(g.to(stack.like.dtype))) - math.log(numel)).abs()
        return torch.where(torch.isfinite(found), found, torch.nan)
    draw = Noise(step)
    noise = [draw(g[0], 0, block.params[0]) for block in stack.blocks]
    return _misfit(optimizer, stack, Q, torch.stack(noise), g)


def _misfit(optimizer: PSGD, stack: Stack, Q: Group, dtheta: Tensor, dgrad: Tensor) -> Tensor:
    """Misfit of a pair as the criterion sees it: with the sign of a loss that is maximised, and damped."""
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    params = optimizer.parameters()
    if any(group["maximize"] for group in optimizer.param_groups):
        signs = [-1.0 if group_of[id(params[block.params[0]])]["maximize"] else 1.0 for block in stack.blocks]
        dgrad = dgrad * per_block(torch.tensor(signs, dtype=dgrad.dtype, device=dgrad.device), dgrad)
    dgrad, informative = optimizer.probe.damp(dtheta, dgrad)
    found = misfit(optimizer.criterion, Q, dtheta.to(stack.like.dtype), dgrad.to(stack.like.dtype))
    return torch.where(informative & torch.isfinite(found), found, torch.nan)


def conditions(optimizer: PSGD) -> Numbers:
    """Condition of each factor and block, for each stack."""
    return [torch.stack([condition(factor) for factor in stack.group.factors]) for stack in optimizer.stacks]


def skipped(optimizer: PSGD) -> Tensor:
    """Number of steps skipped so far; every device counts all of them."""
    count: Tensor = optimizer.state[optimizer.parameters()[0]]["skipped"]
    return count.clone()


def fetch(values: Sequence[Any]) -> list[list[float]]:
    """Numbers and tensors as lists, by one transfer from each device."""
    flat = [
        (v if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.float64, device="cpu")).detach().reshape(-1)
        for v in values
    ]
    by_device: defaultdict[torch.device, list[int]] = defaultdict(list)
    for k, v in enumerate(flat):
        by_device[v.device].append(k)
    lists: list[list[float]] = [[] for _ in flat]
    for device, mine in by_device.items():
        dtype = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
        fetched = iter(torch.cat([flat[k].to(dtype) for k in mine]).tolist())
        for k in mine:
            lists[k] = [next(fetched) for _ in range(flat[k].numel())]
    return lists


def _copy(group: Group) -> Group:
    return group.bind({name: buffer.clone() for name, buffer in group.buffers().items()})
