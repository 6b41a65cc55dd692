"""Stacks: blocks of one shape with their ``Q`` and averages, in arrays with a leading dimension B."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cached_property
from typing import overload

import torch
from torch import Tensor

from ..blocks import Block
from ..groups import Group
from ..ops import parameters

#: names of the tensors that hold an average of gradients
AVERAGE = ("momentum", "momentum_weight")
#: names of the tensors with one number for each block, from which limits and the factor of the learning rate follow
LENGTHS = ("grad_length", "step_total", "step_count", "lr_factor")
#: names of all tensors with one number for each block
NUMBERS = (*LENGTHS, AVERAGE[1])


class Stack:
    """Blocks of one shape with their ``Q`` and, if there is momentum, the running average of their gradients.

    Args:
        blocks: the B blocks
        group: their ``Q``
        average: the average of gradients, and the sum of its weights: ``{"momentum": …, "momentum_weight": …}``;
            empty without momentum
        lengths: for each block the length of its longest recent gradient (``grad_length``), the sum of the lengths of
            its steps and their number (``step_total``, ``step_count``), and the factor of its learning rate
            (``lr_factor``); all are zero before the first step
        dtype: dtype of gradients, averages and steps; ``Q`` may be less precise
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        group: Group,
        average: Mapping[str, Tensor],
        lengths: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> None:
        self.blocks = list(blocks)
        self.group = group
        self.average = dict(average)
        self.lengths = dict(lengths)
        self.dtype = dtype
        self.like = next(iter(group.buffers().values()))
        #: last argument of ``same_layout``, and its parts
        self._parts: tuple[Tensor, list[Tensor]] | None = None

    @cached_property
    def positions(self) -> list[int]:
        return [i for block in self.blocks for i in block.params]

    @cached_property
    def plain(self) -> bool:
        """Whether each block is one real parameter in its own shape."""
        return all(block.views == block.shapes and len(block.params) == 1 for block in self.blocks)

    @cached_property
    def single(self) -> bool:
        """Whether each block is one parameter, viewed with any shape."""
        return all(len(block.params) == 1 for block in self.blocks)

    @property
    def device(self) -> torch.device:
        return self.like.device

    def params(self) -> Iterator[int]:
        for block in self.blocks:
            yield from block.params

    def having(self, given: Container[int]) -> list[int]:
        """Rows of the blocks with at least one parameter in ``given``."""
        if self.single:
            return [row for row, i in enumerate(self.positions) if i in given]
        return [row for row, block in enumerate(self.blocks) if any(i in given for i in block.params)]

    def buffers(self) -> dict[str, Tensor]:
        return {**self.group.buffers(), **self.average, **self.lengths}

    def number(self, name: str) -> Tensor:
        """Tensor with one number for each block, by its name."""
        return self.lengths[name] if name in self.lengths else self.average[name]

    def bind(self, buffers: dict[str, Tensor], blocks: Sequence[Block] | None = None) -> Stack:
        """Stack with other buffers and, if given, other blocks."""
        average, lengths = ({name: buffers[name] for name in names} for names in (self.average, self.lengths))
        return Stack(blocks or self.blocks, self.group.bind(buffers), average, lengths, self.dtype)

    def changing(self, fits: bool) -> dict[str, Tensor]:
        """Buffers that a step changes; those of ``Q`` are among them only if ``fits``."""
        buffers = self.buffers()
        return buffers if fits else {**self.average, **self.lengths}

    def pack(self, tensors: Mapping[int, Tensor]) -> Tensor:
        """Array ``(B, *shape)`` of the blocks, packed from tensors by position; a missing tensor counts as zero."""
        packed = []
        for block in self.blocks:
            parts = [
                tensors[i] if i in tensors else torch.zeros(shape, dtype=self.dtype, device=self.device)
                for i, shape in zip(block.params, block.shapes, strict=True)
            ]
            packed.append(block.pack(parts).to(self.dtype))
        return packed[0].unsqueeze(0) if len(packed) == 1 else torch.stack(packed)

    def unpack(self, stacked: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Position of each parameter with its part of ``stacked``."""
        if self.plain:
            yield from zip(self.positions, stacked.unbind(), strict=True)
            return
        for block, part in zip(self.blocks, stacked.unbind(), strict=True):
            yield from zip(block.params, block.unpack(part), strict=True)

    def select(self, chosen: Sequence[int], rows: Tensor) -> Stack:
        """Stack with copies of some of the blocks, or this stack itself if all are chosen.

        Args:
            chosen: rows of the blocks
            rows: the same rows as a tensor on the device
        """
        if len(chosen) == len(self.blocks):
            return self
        copies = {name: buffer.index_select(0, rows) for name, buffer in self.buffers().items()}
        return self.bind(copies, [self.blocks[row] for row in chosen])

    def nbytes(self) -> int:
        """Number of bytes of the state of all blocks."""
        return sum(buffer.nbytes for buffer in self.buffers().values())

    @staticmethod
    def new_averages(count: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Averages before the first gradient, for ``count`` blocks of one shape: zeros with a weight of zero."""
        return {
            "momentum": torch.zeros(count, *shape, dtype=dtype, device=device),
            "momentum_weight": torch.zeros(count, dtype=dtype, device=device),
        }

    @staticmethod
    def new_lengths(count: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Numbers of ``LENGTHS`` before the first step, for ``count`` blocks: zeros."""
        return {name: torch.zeros(count, dtype=dtype, device=device) for name in LENGTHS}

    def start_average(self) -> None:
        self.average = self.new_averages(len(self.blocks), self.blocks[0].shape, self.dtype, self.device)

    def same_layout(self, stacked: Tensor, tensors: Mapping[int, Tensor]) -> tuple[list[Tensor], list[Tensor]] | None:
        """Parts of ``stacked`` and the tensors that belong to them, if these need not be packed; else None.

        Parts without a tensor are left out. All tensors have the dtype and device of the parameters.
        """
        if not self.plain:
            return None
        if self._parts is None or self._parts[0] is not stacked:
            self._parts = (stacked, list(stacked.unbind()))
        parts = self._parts[1]
        found = [tensors.get(i) for i in self.positions]
        values = [value for value in found if value is not None]
        if len(values) < len(found):
            parts = [part for part, value in zip(parts, found, strict=True) if value is not None]
        if not parts or (parameters.can_fuse(parts[:1], values[:1]) and all(v.is_contiguous() for v in values)):
            return parts, values
        return None


@overload
def per_block(value: Tensor, like: Tensor) -> Tensor: ...
@overload
def per_block(value: float | Tensor, like: Tensor) -> float | Tensor: ...
def per_block(value: float | Tensor, like: Tensor) -> float | Tensor:
    """View one number for each block as ``(B, 1, …, 1)``, so that it multiplies arrays of the stack."""
    return value.reshape(-1, *[1] * (like.ndim - 1)) if isinstance(value, Tensor) and value.ndim else value
