"""Tables of parameters of many shapes and addresses, so that one kernel processes all of them at memory speed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from . import table_kernels
from .factors import CHUNK
from .streams import sent
from .triton import DTYPES, trial, wide

#: number of chunks that one program of ``support`` handles
EACH = 8


class Addresses:
    """Device array of tensor addresses that a captured graph reads; the array itself stays at one address."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.place = torch.zeros(count, dtype=torch.int64, device=device)
        self._last: list[int] = []
        #: whether all addresses are multiples of 16, so that kernels can read 16 bytes at once
        self.aligned = False

    def point(self, addresses: list[int]) -> None:
        """Replace the addresses, without making the host wait."""
        if addresses != self._last:
            self.place.copy_(sent(torch.tensor(addresses, dtype=torch.int64, device="cpu"), self.place.device))
            self._last = addresses
            self.aligned = all(address % 16 == 0 for address in addresses)


class TensorTable:
    """Addresses of the parameters, and the offsets of their directions in one buffer.

    Args:
        thetas: contiguous parameters of one dtype, or tensors of the same kind if ``subtract_`` is not used
        starts: offset of the direction of each parameter in the buffer
        scales: ``(first, n, after)`` for each parameter: element ``i`` has the scale at ``first + (i // after) % n`` of
            the array of all scales, see ``factors.broadcast``
        axes: ``(first, n, after)`` for each parameter and each axis of its preconditioner: element ``i`` is in slice
            ``first + (i // after) % n`` of the array of all slices
        moves: whether ``subtract_`` moves the parameters
    """

    #: names of the kernels that must have been compiled
    kernels = ("lengths", "average", "subtract")

    def __init__(
        self,
        thetas: Sequence[Tensor],
        starts: Sequence[int],
        scales: Sequence[tuple[int, int, int]],
        axes: Sequence[Sequence[tuple[int, int, int]]],
        moves: bool = True,
    ) -> None:
        self.moves = moves
        self.pointers = [theta.data_ptr() if moves else 0 for theta in thetas]
        self.dtype = thetas[0].dtype
        self.numels = numels = [theta.numel() for theta in thetas]
        #: whether kernels can read 16 bytes at once from aligned tensors, and whether all parameters are aligned
        self.even = all(number % 16 == 0 for number in (*numels, *starts))
        self.aligned = all(pointer % 16 == 0 for pointer in self.pointers)
        blocks = [(*where, *scale) for *where, scale in zip(self.pointers, numels, starts, scales, strict=True)]
        chunks = [(b, c) for b, numel in enumerate(numels) for c in range(-(-numel // CHUNK))]
        device = thetas[0].device
        self.blocks = sent(torch.tensor(blocks, dtype=torch.int64, device="cpu"), device)
        self.chunks = sent(torch.tensor(chunks, dtype=torch.int32, device="cpu"), device)
        ends = list(accumulate((-(-numel // CHUNK) for numel in numels), initial=0))
        #: index of the first chunk of each parameter, followed by the number of all chunks
        self.ends = sent(torch.tensor(ends, dtype=torch.int32, device="cpu"), device)
        most = max(map(len, axes))
        padded = [[*each, *[(0, 0, 1)] * (most - len(each))] for each in axes]
        self.axes = sent(torch.tensor(padded, dtype=torch.int64, device="cpu"), device)
        owners = torch.empty(sum(n for each in axes for _, n, _ in each), dtype=torch.int64, device="cpu")
        for b, each in enumerate(axes):
            for first, n, _ in each:
                owners[first : first + n] = b
        #: index of the parameter of each slice
        self.owners = sent(owners, device)
        smallest = [numel // max(n for _, n, _ in each) for numel, each in zip(numels, axes, strict=True)]
        #: number of elements of the smallest slices of each parameter
        self.smallest = sent(torch.tensor(smallest, dtype=torch.int32, device="cpu"), device)

    def describes(self, thetas: Sequence[Tensor]) -> bool:
        """Whether the table is valid for tensors: they have its dtype and, if they move, its addresses."""
        if thetas[0].dtype != self.dtype:
            return False
        return not self.moves or (
            [theta.data_ptr() for theta in thetas] == self.pointers and all(theta.is_contiguous() for theta in thetas)
        )

    def subtract_(self, v: Tensor, scale: Tensor, rate: Tensor, decay: Tensor, usable: Tensor) -> None:
        """``θ ← θ − (rate · scale · v + decay · θ)`` if ``usable``, in one launch: for all parameters, or for none.

        Args:
            v: buffer of all directions
            scale: all scales
            rate: one number for each parameter
            decay: one number for each parameter
            usable: one flag
        """
        assert self.moves
        even = self.even and self.aligned and v.data_ptr() % 16 == 0
        self._launch(
            table_kernels.subtract, v, scale, rate, decay, usable, even, DTYPES[self.dtype], wide(self.dtype, v.dtype)
        )

    def lengths(self, sources: Addresses, lengths: Tensor, has_zeros: Tensor) -> None:
        """Compute the lengths of tensors like the parameters, and whether each may have a slice of zeros.

        A length is not finite if an element is not, or if its square overflows. Sums are always in the same order, so
        results are reproducible.

        Args:
            sources: addresses of the tensors
            lengths: output for the lengths
            has_zeros: output for the flags
        """
        even = self.even and sources.aligned
        dtype = lengths.dtype
        sums = lengths.new_empty(len(self.chunks))
        zeros = torch.zeros(len(self.blocks), dtype=torch.int32, device=lengths.device)
        self._launch(table_kernels.squares, sources.place, sums, zeros, even, DTYPES[self.dtype], wide(dtype))
        self._roots(sums, lengths)
        torch.ge(zeros, self.smallest, out=has_zeros)

    def _roots(self, sums: Tensor, lengths: Tensor) -> Tensor:
        """Square root of the sum over the chunks of each parameter."""
        with torch.cuda.device(sums.device):
            table_kernels.lengths[(len(self.blocks),)](self.ends, sums, lengths, 1024)
        return lengths

    def support(self, sources: Addresses, has_zeros: Tensor) -> Tensor:
        """One for each slice that has a nonzero element and zero for each other slice, of tensors like the parameters.

        Args:
            sources: addresses of the tensors
            has_zeros: flags from ``lengths``; tensors with too few zeros to fill a slice are not read again

        Returns:
            float32 array of all slices, at the positions that ``axes`` gives
        """
        even = self.even and sources.aligned
        flags = (~has_zeros).to(torch.float32).index_select(0, self.owners)
        total = len(self.chunks)
        self._launch(
            table_kernels.support,
            sources.place,
            has_zeros.view(torch.uint8),
            self.axes,
            flags,
            total,
            self.axes.shape[1],
            EACH,
            even,
            DTYPES[self.dtype],
            programs=-(-total // EACH),
        )
        return flags

    def gather(self, sources: Addresses, out: Tensor) -> None:
        """Copy tensors like the parameters to a buffer with the offsets of the directions."""
        even = self.even and sources.aligned and out.data_ptr() % 16 == 0
        self._launch(table_kernels.gather, sources.place, out, even, DTYPES[self.dtype])

    def average_(
        self, sources: Addresses, means: Addresses, dtype: torch.dtype, weight: Tensor, factor: Tensor, usable: Tensor
    ) -> Tensor:
        """``mean ← mean + weight · (factor · source − mean)`` for tensors like the parameters, if ``usable``.

        Args:
            sources: addresses of the tensors
            means: addresses of the means, which have the same sizes
            dtype: dtype of the means
            weight: one number for each parameter
            factor: one number for each parameter
            usable: one flag

        Returns:
            length of each new mean; zero if not ``usable``
        """
        even = self.even and sources.aligned and means.aligned
        dtypes = DTYPES[self.dtype], DTYPES[dtype], wide(self.dtype, dtype)
        sums = torch.empty(len(self.chunks), dtype=torch.promote_types(dtype, torch.float32), device=self.blocks.device)
        self._launch(table_kernels.average, sources.place, means.place, weight, factor, usable, sums, even, *dtypes)
        return self._roots(sums, sums.new_empty(len(self.blocks)))

    def _launch(self, kernel: Any, *arguments: Any, programs: int | None = None) -> None:
        """Launch a kernel, by default with one program for each chunk."""
        with torch.cuda.device(self.blocks.device):
            kernel[(programs or len(self.chunks),)](self.blocks, self.chunks, *arguments, CHUNK)


@trial("subtract")
def _try_subtract(device: torch.device, dtype: torch.dtype, low: torch.dtype) -> None:
    table, _, zero = _small(device)
    v = torch.ones(256, dtype=dtype, device=device)
    table.subtract_(v, v, zero, zero, zero > 0)


@trial("gather", early=False)
def _try_gather(device: torch.device, dtype: torch.dtype, low: torch.dtype) -> None:
    table, here, _ = _small(device)
    table.gather(here, torch.empty(256, device=device))


@trial("lengths")
def _try_lengths(device: torch.device, dtype: torch.dtype, low: torch.dtype) -> None:
    table, here, zero = _small(device)
    has_zeros = torch.empty(1, dtype=torch.bool, device=device)
    table.lengths(here, torch.empty_like(zero), has_zeros)
    table.support(here, has_zeros)


@trial("average")
def _try_average(device: torch.device, dtype: torch.dtype, low: torch.dtype) -> None:
    table, here, zero = _small(device)
    table.average_(here, here, torch.float32, zero, zero, zero > 0)


def _small(device: torch.device) -> tuple[TensorTable, Addresses, Tensor]:
    """Table, addresses and a zero for one parameter, which is freed at once, so that kernels must not write to it."""
    theta = torch.ones(256, device=device)
    here = Addresses(1, device)
    here.point([theta.data_ptr()])
    axes = [(0, 16, 16), (16, 16, 1)]  # the two axes of a matrix
    return TensorTable([theta], [0], [(0, 1, 256)], [axes]), here, torch.zeros(1, device=device)
