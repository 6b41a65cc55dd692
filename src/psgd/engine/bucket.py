"""Buckets: stacks of one param group, device and precision, which take their steps together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..groups.base import Groups, Preconditioned, Structure, dots
from ..normalize import Normalization
from ..ops.real import as_real
from ..ops.streams import sent
from ..ops.tensor_table import Addresses, TensorTable
from ..ops.triton import ready
from ..probes import Average
from . import diagonal, limits, pace
from .direction import Direction, Room
from .numbers import Numbers, write_
from .stack import Stack
from .tables import new_table
from .tensors import Tensors

if TYPE_CHECKING:
    from .part import Division


class Bucket:
    """Stacks that take their steps together.

    All blocks belong to one param group, so every option is one number here, and the options of one group cannot
    change the steps of another.

    Args:
        stacks: stacks on one device, with the same dtype of ``Q``, of steps and of parameters
        group: index of their param group
        structure: structure of ``Q``
        normalize: normalisation of the steps of ``Q``, or None for the default of the structure
    """

    def __init__(
        self,
        stacks: Sequence[Stack],
        group: int,
        structure: Structure,
        normalize: Normalization | None,
    ) -> None:
        self.stacks = list(stacks)
        self.group = group
        self.structure, self.normalize = structure, normalize
        self.counts = [len(stack.blocks) for stack in self.stacks]
        self.device, self.dtype = self.stacks[0].device, self.stacks[0].dtype
        self._numbers: dict[str, Numbers] = {}
        #: table of the parameters for kernels that process all of them in one launch, see ``find_table``
        self.table: TensorTable | None = None
        #: blocks with and without a gradient, from the last step in which some blocks had no gradient
        self.division: Division | None = None

    @cached_property
    def Q(self) -> Groups:
        """All ``Q`` of the blocks; the structure decides how they are batched."""
        return self.structure.together([stack.group for stack in self.stacks], self.normalize)

    @cached_property
    def positions(self) -> list[int]:
        """Positions of all parameters."""
        return [i for stack in self.stacks for i in stack.positions]

    def updating(self, fits: bool) -> AbstractContextManager[None]:
        """Context in which averages, and ``Q`` if ``fits``, change only for the blocks that have a gradient."""
        return nullcontext()

    @property
    def averaging(self) -> bool:
        """Whether gradients are averaged."""
        return bool(self.stacks[0].average)

    @cached_property
    def single(self) -> bool:
        """Whether each block is one parameter."""
        return all(stack.single for stack in self.stacks)

    def limit_(self, lengths: Tensor, most: float, ok: Tensor, look: bool) -> Tensor | None:
        """Factor that limits the gradient of each block, see ``limits.of_gradients``; None if nothing is limited."""
        if most == math.inf:
            return None
        longest = self.numbers("grad_length")
        factor, new = limits.of_gradients(lengths, longest.read(), most, ok, look)
        write_((longest, new))
        return factor

    def numbers(self, name: str) -> Numbers:
        """Numbers of the state with this name, one for each block."""
        parts = [stack.number(name) for stack in self.stacks]
        found = self._numbers.get(name)
        if found is None or found.parts[0] is not parts[0]:  # momentum may be switched on at any step
            found = self._numbers[name] = Numbers(parts)
        return found

    def average_(self, grads: Tensors, momentum: float, limit: Tensor | None, ok: Tensor) -> Average:
        """``m ← β m + (1 − β) g`` for limited gradients; without momentum the gradients themselves.

        The result carries a divisor for each block. For an average it is the sum of the weights, which makes the
        average unbiased from the first step on. For gradients without momentum it is ``1 / limit``.
        """
        if not self.averaging:
            return self.limited(grads, limit)
        lengths = grads.average_(self, 1 - momentum, limit, ok)
        # Before the first usable gradient, the average and its weight are zero.
        weight = self.numbers("momentum_weight").read().clamp_min(torch.finfo(self.dtype).tiny)
        return Average(lambda: [stack.average["momentum"] for stack in self.stacks], weight, lengths=lengths)

    def limited(self, grads: Tensors, limit: Tensor | None) -> Average:
        """Gradients without averaging, with the divisor ``1 / limit``."""
        return Average(lambda: list(grads.pack(self)), None if limit is None else 1 / limit, averaged=False)

    def precondition(self, m: Average, keep: bool, room: Room) -> Preconditioned:
        """``P m`` for averaged gradients.

        Args:
            m: averaged gradients
            keep: whether ``Q`` will be used again before it changes
            room: buffer for the result
        """
        d = self.Q.precondition(m.arrays, keep, room.outs())
        if m.weight is None:
            return d
        return Preconditioned(d.arrays, d.length.to(self.dtype) / m.weight, m.weight)

    def direction(
        self,
        d: Preconditioned,
        options: Mapping[str, Any],
        gradient: Tensor | None,
        fitted: bool,
        ok: Tensor,
        room: Room,
        pace: Tensor | None = None,
    ) -> Direction:
        """``P m`` with the limits of each block, and the buffer that holds it.

        Args:
            d: ``P m``
            options: options of the param group. ``max_rms`` bounds the root mean square of a block. Blocks with a
                diagonal factor have further limits that depend on it, see ``diagonal``.
                ``clip_steps`` bounds the ratio of a length to the average of earlier ones, see ``limits.of_steps``.
            gradient: factor that limited the gradient of each block, or None
            fitted: whether ``Q`` was updated in this step
            ok: whether the step is taken
            room: buffer that was offered for the result
            pace: factor of the learning rate of each block, or None
        """
        buffer, length = room.buffer, d.length.to(self.dtype)
        max_rms, clip_steps = options["max_rms"], options["clip_steps"]
        spectra: Tensor | None = None
        if max_rms < math.inf:
            length, spectra = diagonal.limit_(self, d, length, max_rms)
        if buffer is not None and any(
            part.data_ptr() != a.v.data_ptr() for part, a in zip(self.parts_of(buffer), d.arrays, strict=True)
        ):
            buffer = None  # a group did not write its result to the buffer
        limit = self.limit_rms(length, max_rms)
        if spectra is not None:
            limit = torch.minimum(limit, spectra)
        if clip_steps < math.inf:
            limit = limit * self._limit_steps_(length * limit, clip_steps, gradient, fitted, ok)
        return self.of_moving_blocks(Direction(d.arrays, length, d.divisor, limit=limit, pace=pace, buffer=buffer))

    def pace_(
        self,
        d: Preconditioned,
        m: Average,
        grads: Tensors,
        options: Mapping[str, Any],
        gradient: Tensor | None,
        ok: Tensor,
    ) -> Tensor:
        """Factor of the learning rate of each block, see ``pace.adapted``.

        Args:
            d: ``P m``
            m: averaged gradients
            grads: gradients
            options: options of the param group
            gradient: factor that limited the gradient of each block, or None
            ok: whether the step is taken
        """
        factor = self.numbers("lr_factor")
        gs = list(self.limited(grads, gradient).unbiased())
        Pg = self.Q.precondition(gs, options["update_every"] > 1).arrays
        slope = pace.slope(Pg, gs, m, options["momentum"])
        assert m.weight is not None
        square = dots(d.arrays, m.arrays) / m.weight**2
        moved = ok & (options["lr"] > 0)  # a step of length zero says nothing about longer ones
        new = pace.adapted(factor.read(), slope, square, options["adapt_lr"], moved)
        write_((factor, new))
        return new

    def of_moving_blocks(self, direction: Direction) -> Direction:
        """Direction in which blocks without a gradient have a length of zero; here all blocks have one."""
        return direction

    def _limit_steps_(self, length: Tensor, most: float, gradient: Tensor | None, fitted: bool, ok: Tensor) -> Tensor:
        """Factor that limits the step of each block, see ``limits.of_steps``."""
        total, count = self.numbers("step_total"), self.numbers("step_count")
        limit, *new = limits.of_steps(length, total.read(), count.read(), most, ok, gradient, fitted)
        write_(*zip((total, count), new, strict=True))
        return limit

    def limit_rms(self, length: Tensor, max_rms: float) -> Tensor:
        """``min(1, max_rms √numel / length)`` for each block: bounds the root mean square of a direction."""
        if max_rms < math.inf:
            return (max_rms * self.root_numel / length).clamp_(max=1)
        return torch.ones_like(length)

    def split(self, each: Tensor) -> list[Tensor]:
        """Split an array with one number for each block into one part for each stack."""
        return [each] if len(self.counts) == 1 else list(each.split_with_sizes(self.counts))

    @cached_property
    def numel(self) -> Tensor:
        """Number of elements of each block."""
        sizes = [float(stack.blocks[0].numel) for stack in self.stacks for _ in stack.blocks]
        return sent(torch.tensor(sizes, dtype=self.dtype, device="cpu"), self.device)

    @cached_property
    def root_numel(self) -> Tensor:
        """Square root of the number of elements of each block."""
        return self.numel.sqrt()

    @cached_property
    def ones(self) -> Tensor:
        """Array of ones, one for each block."""
        return torch.ones(sum(self.counts), dtype=self.dtype, device=self.device)

    def nbytes(self) -> int:
        """Number of bytes of the state of all blocks."""
        return sum(stack.nbytes() for stack in self.stacks)

    # Tables for kernels that process all parameters in one launch.

    @cached_property
    def starts(self) -> list[int]:
        """Offset of the directions of each stack in a common buffer, followed by the size of the buffer."""
        sizes = [len(stack.blocks) * stack.blocks[0].numel for stack in self.stacks]
        return list(accumulate((-(-size // 128) * 128 for size in sizes), initial=0))

    def parts_of(self, buffer: Tensor) -> Iterator[Tensor]:
        """Part of a buffer for each stack, viewed as ``(B, *dims)``."""
        for stack, start in zip(self.stacks, self.starts, strict=False):
            shape = (len(stack.blocks), *stack.group.dims)
            yield buffer[start : start + math.prod(shape)].view(shape)

    @property
    def has_kernels(self) -> bool:
        """Whether kernels can process all parameters in one launch, as a captured step requires."""
        return all(ready(self.device, kernel) for kernel in TensorTable.kernels) and self.single and self.Q.recordable

    def find_table(self, like: Sequence[Tensor] | Mapping[int, Tensor], moves: bool) -> None:
        """Build the table of parameters that kernels read, if they can; rebuild it if parameters moved in memory.

        Args:
            like: parameters by position, or tensors of the same kind if the kernels do not move the parameters
            moves: whether kernels move the parameters
        """
        if not self.has_kernels:
            return
        thetas = [as_real(like[i]) for i in self.positions]
        if self.table is None or not self.table.describes(thetas):
            # While the user captures a CUDA graph, the host cannot copy a table to the device.
            self.table = None if torch.cuda.is_current_stream_capturing() else new_table(self, thetas, moves)

    def can_read(self, tensors: Mapping[int, Tensor]) -> bool:
        """Whether kernels can read tensors: each has the number of elements, dtype and device of its parameter."""
        assert self.table is not None
        kind = (self.table.dtype, self.device)
        each = zip([tensors[i] for i in self.positions], self.table.numels, strict=True)
        return all(t.numel() == numel and (t.dtype, t.device) == kind for t, numel in each)

    @cached_property
    def mean_addresses(self) -> Addresses:
        """Device array with the address of the average of each block."""
        return Addresses(len(self.positions), self.device)

    def find_averages(self) -> None:
        """Write the addresses of the averages, if there are any, to the array that a captured step reads."""
        if self.averaging:
            means = [stack.average["momentum"] for stack in self.stacks]
            rows = [(mean.data_ptr(), mean.nbytes, mean.nbytes // len(mean)) for mean in means]
            self.mean_addresses.point([start + offset for start, end, size in rows for offset in range(0, end, size)])
