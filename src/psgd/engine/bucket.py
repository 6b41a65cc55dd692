"""Stacks of one param group, device and precision: what takes its steps together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..groups.base import Groups, Preconditioned, Structure, dots, joined
from ..normalize import Normalization
from ..ops.real import as_real
from ..ops.streams import sent
from ..ops.tensor_table import Addresses, TensorTable
from ..ops.triton import ready
from ..probes import Average
from . import limits, pace
from .direction import Direction, Room
from .numbers import Numbers, write_
from .stack import Stack
from .tables import new_table
from .tensors import Tensors

if TYPE_CHECKING:
    from .part import Division


#: largest root mean square of a slice, relative to that of its block
SLICE = 3.0
#: largest spectral norm of a block with a diagonal factor, relative to that of white noise of its size
SPECTRUM = 2.0


class Bucket:
    """Stacks that take their steps together.

    All blocks belong to one param group, so every option is one number here, and what one group is told cannot change
    the steps of another.

    Args:
        stacks: on one device, with one dtype of ``Q``, one of steps and one of parameters
        group: index of their param group
        structure: what ``Q`` is
        normalize: how steps of ``Q`` are normalised
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
        #: table of the parameters for kernels that go through all of them, see ``find_table``
        self.table: TensorTable | None = None
        #: blocks with and without a gradient, at the last step in which some had none
        self.division: Division | None = None

    @cached_property
    def Q(self) -> Groups:
        """All ``Q`` of the blocks, fitted and applied as the structure does best."""
        return self.structure.together([stack.group for stack in self.stacks], self.normalize)

    @cached_property
    def positions(self) -> list[int]:
        """Positions of all parameters."""
        return [i for stack in self.stacks for i in stack.positions]

    def updating(self, fits: bool) -> AbstractContextManager[None]:
        """Context in which averages, and ``Q`` if it is fitted, change for the blocks that have a gradient."""
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
        """Number of each block under a name of the state."""
        parts = [stack.number(name) for stack in self.stacks]
        found = self._numbers.get(name)
        if found is None or found.parts[0] is not parts[0]:  # averages may begin at any step
            found = self._numbers[name] = Numbers(parts)
        return found

    def average_(self, grads: Tensors, momentum: float, limit: Tensor | None, ok: Tensor) -> Average:
        """``m ← β m + (1 − β) g`` for limited gradients; without momentum the gradients themselves.

        The result is divided by the sum of the weights, so that it is unbiased from the first step on; gradients
        without momentum are divided by what limits them.
        """
        if not self.averaging:
            return self.limited(grads, limit)
        lengths = grads.average_(self, 1 - momentum, limit, ok)
        # Before the first usable gradient both are zero.
        weight = self.numbers("momentum_weight").read().clamp_min(torch.finfo(self.dtype).tiny)
        return Average(lambda: [stack.average["momentum"] for stack in self.stacks], weight, lengths=lengths)

    def limited(self, grads: Tensors, limit: Tensor | None) -> Average:
        """Gradients themselves, to be divided by what limits them."""
        return Average(lambda: list(grads.pack(self)), None if limit is None else 1 / limit, averaged=False)

    def precondition(self, m: Average, keep: bool, room: Room) -> Preconditioned:
        """``P m`` for averaged gradients.

        Args:
            m: averaged gradients
            keep: whether ``Q`` will be used again before it changes
            room: where the result is to be
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
        """``P m`` with its limits and the buffer it lies in.

        Args:
            d: ``P m``
            options: those of the param group. ``max_rms`` is the largest root mean square of a block; that of a slice
                along an axis with a diagonal factor, such as the row of an embedding, may be ``SLICE`` times as large,
                and the spectral norm of such a block ``SPECTRUM`` times that of white noise.
                ``clip_steps`` is the largest ratio of a length to the average of those before, see ``limits.of_steps``.
            gradient: factor that limited the gradient of each block, or None
            fitted: whether ``Q`` was updated in this step
            ok: whether the step is taken
            room: where the result was to be
            pace: factor of the learning rate of each block, or None
        """
        buffer, length = room.buffer, d.length.to(self.dtype)
        max_rms, clip_steps = options["max_rms"], options["clip_steps"]
        if max_rms < math.inf:
            length = self._limit_slices_(d, length, SLICE * max_rms)
        if buffer is not None and any(
            part.data_ptr() != a.v.data_ptr() for part, a in zip(self.parts_of(buffer), d.arrays, strict=True)
        ):
            buffer = None  # a group that ignored where the result was to be
        limit = self.limit_rms(length, max_rms)
        if max_rms < math.inf:
            limit = self._limit_spectra(d, limit, SPECTRUM * max_rms)
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
            options: those of the param group
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
        """Direction in which blocks that rest have a length of zero; here all move."""
        return direction

    def _limit_slices_(self, d: Preconditioned, length: Tensor, most: float) -> Tensor:
        """Shorten slices, see ``Scaled.limit_slices_``; return the new length of each block."""
        if all(a.slices is None for a in d.arrays):
            return length
        divisors = [None] * len(d.arrays) if d.divisor is None else self.split(d.divisor)
        new = [a.limit_slices_(most, divisor) for a, divisor in zip(d.arrays, divisors, strict=True)]
        each = zip(new, self.split(length), divisors, strict=True)
        return joined(
            [
                old if limited is None else (limited if by is None else limited / by).to(self.dtype)
                for limited, old, by in each
            ]
        )

    def _limit_spectra(self, d: Preconditioned, limit: Tensor, most: float) -> Tensor:
        """Limit also the spectral norms of blocks with a diagonal factor, to ``most`` times that of white noise.

        What a dense factor whitens has hardly any direction that is longer than in noise. A diagonal one leaves those
        that many slices have in common: a step of the same size is then several times as long along them, and a
        learning rate that is good for dense factors is too large.
        """
        axes = [stack.group.scale_axis for stack in self.stacks]
        if all(axis is None for axis in axes):
            return limit
        divisors = [None] * len(d.arrays) if d.divisor is None else self.split(d.divisor)
        parts = self.split(limit)
        for k, (stack, axis, a, divisor) in enumerate(zip(self.stacks, axes, d.arrays, divisors, strict=True)):
            norm = None if axis is None else a.spectral_norm(axis)
            if axis is not None and norm is not None:
                norm = norm.to(self.dtype) if divisor is None else norm.to(self.dtype) / divisor
                n = stack.group.dims[axis]
                white = n**0.5 + (stack.blocks[0].numel / n) ** 0.5
                parts[k] = torch.minimum(parts[k], most * white / norm)
        return joined(parts)

    def _limit_steps_(self, length: Tensor, most: float, gradient: Tensor | None, fitted: bool, ok: Tensor) -> Tensor:
        """Factor that limits the step of each block, see ``limits.of_steps``."""
        total, count = self.numbers("step_total"), self.numbers("step_count")
        limit, *new = limits.of_steps(length, total.read(), count.read(), most, ok, gradient, fitted)
        write_(*zip((total, count), new, strict=True))
        return limit

    def limit_rms(self, length: Tensor, max_rms: float) -> Tensor:
        """Factor that shortens directions of some length to ``max_rms``, for each block."""
        if max_rms < math.inf:
            return (max_rms * self.root_numel / length).clamp_(max=1)
        return torch.ones_like(length)

    def split(self, each: Tensor) -> list[Tensor]:
        """A number for each block, as parts for the stacks."""
        return [each] if len(self.counts) == 1 else list(each.split_with_sizes(self.counts))

    @cached_property
    def numel(self) -> Tensor:
        """Number of elements of each block."""
        sizes = [float(stack.blocks[0].numel) for stack in self.stacks for _ in stack.blocks]
        return sent(torch.tensor(sizes, dtype=self.dtype, device="cpu"), self.device)

    @cached_property
    def root_numel(self) -> Tensor:
        """Root of the number of elements of each block."""
        return self.numel.sqrt()

    @cached_property
    def ones(self) -> Tensor:
        """As many ones as there are blocks."""
        return torch.ones(sum(self.counts), dtype=self.dtype, device=self.device)

    def nbytes(self) -> int:
        """Bytes of what is kept for the blocks."""
        return sum(stack.nbytes() for stack in self.stacks)

    # For kernels that go through all parameters.

    @cached_property
    def starts(self) -> list[int]:
        """Positions in a buffer at which the directions of each stack begin, and the size of the buffer."""
        sizes = [len(stack.blocks) * stack.blocks[0].numel for stack in self.stacks]
        return list(accumulate((-(-size // 128) * 128 for size in sizes), initial=0))

    def parts_of(self, buffer: Tensor) -> Iterator[Tensor]:
        """Part of each stack, ``(B, *dims)``."""
        for stack, start in zip(self.stacks, self.starts, strict=False):
            shape = (len(stack.blocks), *stack.group.dims)
            yield buffer[start : start + math.prod(shape)].view(shape)

    @property
    def has_kernels(self) -> bool:
        """Whether kernels can go through all parameters, as they must in a recording."""
        return all(ready(self.device, kernel) for kernel in TensorTable.kernels) and self.single and self.Q.recordable

    def find_table(self, like: Sequence[Tensor] | Mapping[int, Tensor], moves: bool) -> None:
        """Make the table of parameters that kernels read, if they can; anew when parameters lie elsewhere now.

        Args:
            like: by position the parameters, or tensors like them if others move these
            moves: whether kernels move the parameters
        """
        if not self.has_kernels:
            return
        thetas = [as_real(like[i]) for i in self.positions]
        if self.table is None or not self.table.describes(thetas):
            # While someone records a CUDA graph, nothing can be sent to the device.
            self.table = None if torch.cuda.is_current_stream_capturing() else new_table(self, thetas, moves)

    def can_read(self, tensors: Mapping[int, Tensor]) -> bool:
        """Whether kernels can read tensors: as many numbers of the same dtype as each parameter, on the same device."""
        assert self.table is not None
        kind = (self.table.dtype, self.device)
        each = zip([tensors[i] for i in self.positions], self.table.numels, strict=True)
        return all(t.numel() == numel and (t.dtype, t.device) == kind for t, numel in each)

    @cached_property
    def mean_addresses(self) -> Addresses:
        """Addresses of the averages."""
        return Addresses(len(self.positions), self.device)

    def find_averages(self) -> None:
        """Find the averages, if there are any, before a recording needs their addresses."""
        if self.averaging:
            means = [stack.average["momentum"] for stack in self.stacks]
            rows = [(mean.data_ptr(), mean.nbytes, mean.nbytes // len(mean)) for mean in means]
            self.mean_addresses.point([start + offset for start, end, size in rows for offset in range(0, end, size)])
