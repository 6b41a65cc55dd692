"""Construction of stacks from the tensors of blocks, and the layout of stacks in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..blocks import Block
from ..engine.stack import AVERAGE, LENGTHS, NUMBERS, Stack
from ..groups import Group


def stack_of(
    blocks: Sequence[Block],
    states: Sequence[dict[str, Tensor]],
    template: Group,
    dtype: torch.dtype,
    device: torch.device,
    averaging: bool,
) -> Stack:
    """Stack of blocks of one shape.

    Args:
        blocks: blocks of one shape
        states: state of each block
        template: group of one such block
        dtype: dtype of averages and steps
        device: device of the state
        averaging: whether gradients are averaged; missing averages start at zero
    """
    names = [*template.buffers(), *LENGTHS]
    if averaging:
        names += AVERAGE
        add_averages(states, blocks[0].shape, dtype, device)
    buffers = {
        name: _alone(states[0][name]) if len(states) == 1 else torch.stack([state[name] for state in states])
        for name in names
    }
    average = {name: buffers[name] for name in AVERAGE if averaging}
    return Stack(blocks, template.bind(buffers), average, {name: buffers[name] for name in LENGTHS}, dtype)


def _alone(row: Tensor) -> Tensor:
    """Stack of one block: a view of its tensor, or a copy if that is a view of a larger stack.

    A view would keep all of the larger stack in memory.
    """
    part = row.untyped_storage().nbytes() > row.nbytes
    return row[None].clone(memory_format=torch.contiguous_format) if part else row[None].contiguous()


def add_rows(states: Sequence[dict[str, Tensor]], buffers: Mapping[str, Tensor]) -> None:
    """Set the entries of each state to views of its rows of the buffers."""
    for name, buffer in buffers.items():
        for state, row in zip(states, buffer.unbind(), strict=True):
            state[name] = row


def add_averages(
    states: Sequence[dict[str, Tensor]], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    """Add an average of zero, with a weight of zero, to each state that has no average; all blocks have one shape."""
    new = [state for state in states if "momentum" not in state]
    if new:
        add_rows(new, Stack.new_averages(len(new), shape, dtype, device))


def side_by_side(stacks: Sequence[Stack], key: Callable[[Stack], Hashable]) -> list[Stack]:
    """Copy tensors that one operation handles together to adjacent memory, for all stacks with the same key.

    These tensors are the factors of one size, and the numbers of each name in ``NUMBERS``.
    """
    alike: defaultdict[tuple[Any, ...], list[tuple[int, str, Tensor]]] = defaultdict(list)
    for k, stack in enumerate(stacks):
        for name, buffer in stack.group.buffers().items():
            alike[stack.group.kind(name), buffer.shape[1:], buffer.dtype, key(stack)].append((k, name, buffer))
        for name, buffer in stack.buffers().items():
            if name in NUMBERS:
                alike[name, key(stack)].append((k, name, buffer))
    moved = [stack.buffers() for stack in stacks]
    for same in alike.values():
        if len(same) > 1:
            buffers = [buffer for _, _, buffer in same]
            joined = torch.cat(buffers).split([len(buffer) for buffer in buffers])
            for (k, name, _), part in zip(same, joined, strict=True):
                moved[k][name] = part
    return [stack.bind(buffers) for stack, buffers in zip(stacks, moved, strict=True)]
