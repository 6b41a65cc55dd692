"""Parameters of many shapes, wherever they lie in memory: one kernel goes through all of them at memory speed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .factors import CHUNK
from .streams import sent
from .triton import DTYPES, jit, multiple, tl, trial, wide


class Addresses:
    """Device array of tensor addresses that a recorded graph reads; the array itself stays at one address."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.place = torch.zeros(count, dtype=torch.int64, device=device)
        self._last: list[int] = []
        #: whether 16 bytes can be read at once at all addresses
        self.aligned = False

    def point(self, addresses: list[int]) -> None:
        """Replace the addresses, without making the host wait."""
        if addresses != self._last:
            self.place.copy_(sent(torch.tensor(addresses, dtype=torch.int64, device="cpu"), self.place.device))
            self._last = addresses
            self.aligned = all(address % 16 == 0 for address in addresses)


class TensorTable:
    """Addresses of the parameters, and the positions of their directions in one buffer.

    Args:
        thetas: contiguous parameters of one dtype
        starts: for each parameter the position in the buffer where its direction begins
        scales: for each parameter the position of its first scale among all scales, and how ``broadcast`` finds the
            others from there
        axes: for each parameter and each axis of its preconditioner the position of its first slice among all slices,
            and how ``broadcast`` finds that of an element from there
    """

    #: names of the kernels that must have been compiled
    kernels = ("lengths", "average", "subtract")

    def __init__(
        self,
        thetas: Sequence[Tensor],
        starts: Sequence[int],
        scales: Sequence[tuple[int, int, int]],
        axes: Sequence[Sequence[tuple[int, int, int]]],
    ) -> None:
        self.pointers = [theta.data_ptr() for theta in thetas]
        self.dtype = thetas[0].dtype
        self.numels = numels = [theta.numel() for theta in thetas]
        #: whether 16 bytes can be read at once of tensors that begin at a multiple of 16, and whether θ does
        self.even = all(number % 16 == 0 for number in (*numels, *starts))
        self.aligned = all(pointer % 16 == 0 for pointer in self.pointers)
        blocks = [(*where, *scale) for *where, scale in zip(self.pointers, numels, starts, scales, strict=True)]
        chunks = [(b, c) for b, numel in enumerate(numels) for c in range(-(-numel // CHUNK))]
        device = thetas[0].device
        self.blocks = sent(torch.tensor(blocks, dtype=torch.int64, device="cpu"), device)
        self.chunks = sent(torch.tensor(chunks, dtype=torch.int32, device="cpu"), device)
        ends = list(accumulate((-(-numel // CHUNK) for numel in numels), initial=0))
        #: for each parameter its first chunk, and that of the next parameter
        self.ends = sent(torch.tensor(ends, dtype=torch.int32, device="cpu"), device)
        most = max(map(len, axes))
        padded = [[*each, *[(0, 0, 1)] * (most - len(each))] for each in axes]
        self.axes = sent(torch.tensor(padded, dtype=torch.int64, device="cpu"), device)
        owners = torch.empty(sum(n for each in axes for _, n, _ in each), dtype=torch.int64, device="cpu")
        for b, each in enumerate(axes):
            for first, n, _ in each:
                owners[first : first + n] = b
        #: for each slice the index of its parameter
        self.owners = sent(owners, device)
        smallest = [numel // max(n for _, n, _ in each) for numel, each in zip(numels, axes, strict=True)]
        #: for each parameter the number of elements of its smallest slices
        self.smallest = sent(torch.tensor(smallest, dtype=torch.int32, device="cpu"), device)

    def subtract_(self, v: Tensor, scale: Tensor, rate: Tensor, decay: Tensor, usable: Tensor) -> None:
        """``θ ← θ − (rate · scale · v + decay · θ)`` if ``usable``; in one launch, so for all parameters or for none.

        Args:
            v: buffer of all directions
            scale: all scales
            rate: one number for each parameter
            decay: one number for each parameter
            usable: one flag
        """
        even = self.even and self.aligned and v.data_ptr() % 16 == 0
        self._launch(_subtract, v, scale, rate, decay, usable, even, DTYPES[self.dtype], wide(self.dtype, v.dtype))

    def lengths(self, sources: Addresses, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Length of each of some tensors, each like its parameter, and for each whether it may have slices of zeros.

        A length is not finite if an element is not, or if its square overflows. Sums are always in the same order.
        """
        even = self.even and sources.aligned
        device = self.blocks.device
        sums = torch.empty(len(self.chunks), dtype=dtype, device=device)
        zeros = torch.zeros(len(self.blocks), dtype=torch.int32, device=device)
        self._launch(_squares, sources.place, sums, zeros, even, DTYPES[self.dtype], wide(dtype))
        return self._roots(sums), zeros >= self.smallest

    def _roots(self, sums: Tensor) -> Tensor:
        """Root of the sum of each parameter, from the sums of its chunks."""
        lengths = sums.new_empty(len(self.blocks))
        with torch.cuda.device(sums.device):
            _lengths[(len(self.blocks),)](self.ends, sums, lengths, 1024)
        return lengths

    def support(self, sources: Addresses, has_zeros: Tensor) -> Tensor:
        """For each slice of some tensors, each like its parameter, one if it has an element other than zero, or zero.

        Args:
            sources: addresses of the tensors
            has_zeros: result of ``lengths``; tensors with too few zeros for a slice are not read again

        Returns:
            float32, for each tensor and axis all slices
        """
        even = self.even and sources.aligned
        flags = (~has_zeros).to(torch.float32).index_select(0, self.owners)
        axes = self.axes.shape[1]
        self._launch(
            _support, sources.place, has_zeros.view(torch.uint8), self.axes, flags, axes, even, DTYPES[self.dtype]
        )
        return flags

    def gather(self, sources: Addresses, out: Tensor) -> None:
        """Copy tensors, each like its parameter, to a buffer like that of the directions."""
        even = self.even and sources.aligned and out.data_ptr() % 16 == 0
        self._launch(_gather, sources.place, out, even, DTYPES[self.dtype])

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
        self._launch(_average, sources.place, means.place, weight, factor, usable, sums, even, *dtypes)
        return self._roots(sums)

    def _launch(self, kernel: Any, *arguments: Any) -> None:
        """Launch a kernel with one program for each chunk."""
        with torch.cuda.device(self.blocks.device):
            kernel[(len(self.chunks),)](self.blocks, self.chunks, *arguments, CHUNK)


@jit
def _subtract(  # type: ignore[no-untyped-def]
    blocks,
    chunks,
    v,
    scale,
    rate,
    decay,
    usable,
    aligned: tl.constexpr,
    dtype: tl.constexpr,
    compute: tl.constexpr,
    chunk: tl.constexpr,
):
    b, i, inside = _chunk(blocks, chunks, aligned, chunk)
    inside = inside & (tl.load(usable) != 0)
    block = blocks + 6 * b
    theta = _pointer(block, dtype, aligned)
    x = tl.load(v + _start(block, aligned) + i, mask=inside).to(compute)
    t = tl.load(theta + i, mask=inside).to(compute)
    scale += tl.load(block + 3)
    n = tl.load(block + 4).to(tl.int32)
    if n > 1:
        s = tl.load(scale + _position(i, tl.load(block + 1), n, tl.load(block + 5).to(tl.int32)), mask=inside)
    else:
        s = tl.load(scale + i * 0)
    d = x * (s.to(compute) * tl.load(rate + b).to(compute)) + t * tl.load(decay + b).to(compute)
    tl.store(theta + i, (t - d).to(dtype), mask=inside)


@jit
def _chunk(blocks, chunks, aligned: tl.constexpr, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """Block that a program handles, its positions there, and whether they are within the block."""
    pid = tl.program_id(0).to(tl.int64)
    b = tl.load(chunks + 2 * pid)
    i = tl.load(chunks + 2 * pid + 1) * chunk + tl.arange(0, chunk)
    return b, i, i < multiple(tl.load(blocks + 6 * b + 1).to(tl.int32), aligned)


@jit
def _pointer(place, dtype: tl.constexpr, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointer to numbers, from the address that is stored at a place."""
    pointer = tl.load(place).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if aligned else pointer


@jit
def _start(block, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
    """Position in a buffer where a block begins."""
    return multiple(tl.load(block + 2), aligned)


@jit
def _position(i, numel, n, after):  # type: ignore[no-untyped-def]
    """``(i // after) % n``, by one division if that is enough."""
    if after == 1:
        at = i % n
    else:
        at = i // after
        if after * n < numel:
            at = at % n
    return at


@jit
def _squares(  # type: ignore[no-untyped-def]
    blocks,
    chunks,
    sources,
    sums,
    zeros,
    aligned: tl.constexpr,
    dtype: tl.constexpr,
    compute: tl.constexpr,
    chunk: tl.constexpr,
):
    b, i, inside = _chunk(blocks, chunks, aligned, chunk)
    x = tl.load(_pointer(sources + b, dtype, aligned) + i, mask=inside, other=0).to(compute)
    tl.store(sums + tl.program_id(0), tl.sum(x * x, 0))
    count = tl.sum(tl.where(inside & (x == 0), 1, 0), 0)
    if count > 0:
        tl.atomic_add(zeros + b, count)  # whole numbers: in any order the same


@jit
def _lengths(ends, sums, lengths, width: tl.constexpr):  # type: ignore[no-untyped-def]
    b = tl.program_id(0)
    end = tl.load(ends + b + 1)
    total = tl.zeros([width], dtype=sums.dtype.element_ty)
    for start in range(tl.load(ends + b), end, width):
        k = start + tl.arange(0, width)
        total += tl.load(sums + k, mask=k < end, other=0)
    tl.store(lengths + b, tl.sqrt(tl.sum(total, 0)))


@jit
def _near(start, after, n, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """``(i // after) % n`` for positions ``i`` from ``start`` on: many, for which a division of each costs too much."""
    first = start // after
    steps = _quotient(start - first * after + tl.arange(0, chunk), after, chunk)
    at = first % n + steps
    return at - n * _quotient(at, n, chunk)


@jit
def _quotient(t, by, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """``t // by`` for ``t < by + chunk``: the product with the reciprocal is exact enough for numbers as small."""
    if by > chunk:  # noqa: SIM108
        quotient = (t >= by).to(tl.int32)
    else:
        quotient = ((t.to(tl.float32) + 0.5) * (1.0 / by)).to(tl.int32)
    return quotient


@jit
def _support(  # type: ignore[no-untyped-def]
    blocks,
    chunks,
    sources,
    has_zeros,
    axes,
    flags,
    count: tl.constexpr,
    aligned: tl.constexpr,
    dtype: tl.constexpr,
    chunk: tl.constexpr,
):
    b, i, inside = _chunk(blocks, chunks, aligned, chunk)
    if tl.load(has_zeros + b) != 0:
        x = tl.load(_pointer(sources + b, dtype, aligned) + i, mask=inside, other=0)
        start = tl.load(chunks + 2 * tl.program_id(0).to(tl.int64) + 1) * chunk
        for k in tl.static_range(count):
            axis = axes + 3 * (count * b + k)
            n = tl.load(axis + 1).to(tl.int32)
            if n > 0:
                at = tl.load(axis) + _near(start, tl.load(axis + 2).to(tl.int32), n, chunk)
                # Whoever else writes there writes the same. Nearly always somebody has, and many writes would queue up.
                new = (x != 0) & (tl.load(flags + at, mask=inside, other=1.0) == 0)
                tl.store(flags + at, 1.0, mask=new)


@jit
def _gather(  # type: ignore[no-untyped-def]
    blocks, chunks, sources, out, aligned: tl.constexpr, dtype: tl.constexpr, chunk: tl.constexpr
):
    b, i, inside = _chunk(blocks, chunks, aligned, chunk)
    x = tl.load(_pointer(sources + b, dtype, aligned) + i, mask=inside)
    tl.store(out + _start(blocks + 6 * b, aligned) + i, x, mask=inside)


@jit
def _average(  # type: ignore[no-untyped-def]
    blocks,
    chunks,
    sources,
    means,
    weight,
    factor,
    usable,
    sums,
    aligned: tl.constexpr,
    dtype: tl.constexpr,
    mean_dtype: tl.constexpr,
    compute: tl.constexpr,
    chunk: tl.constexpr,
):
    b, i, inside = _chunk(blocks, chunks, aligned, chunk)
    inside = inside & (tl.load(usable) != 0)
    mean = _pointer(means + b, mean_dtype, aligned)
    w = tl.load(weight + b).to(compute)
    x = tl.load(_pointer(sources + b, dtype, aligned) + i, mask=inside, other=0).to(compute)
    x = x * tl.load(factor + b).to(compute)
    m = tl.load(mean + i, mask=inside, other=0).to(compute)
    # Interpolate from the nearer end, so that a weight of one gives the source itself.
    new = tl.where(w < 0.5, m + w * (x - m), x - (1 - w) * (x - m))
    tl.store(mean + i, new.to(mean_dtype), mask=inside)
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(inside, new * new, 0.0), 0))


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
    table, here, _ = _small(device)
    table.support(here, table.lengths(here, torch.float32)[1])


@trial("average")
def _try_average(device: torch.device, dtype: torch.dtype, low: torch.dtype) -> None:
    table, here, zero = _small(device)
    table.average_(here, here, torch.float32, zero, zero, zero > 0)


def _small(device: torch.device) -> tuple[TensorTable, Addresses, Tensor]:
    """Table, addresses and a zero for one parameter that is freed at once: kernels must be told not to touch it."""
    theta = torch.ones(256, device=device)
    here = Addresses(1, device)
    here.point([theta.data_ptr()])
    axes = [(0, 16, 16), (16, 16, 1)]  # as many as a matrix has
    return TensorTable([theta], [0], [(0, 1, 256)], [axes]), here, torch.zeros(1, device=device)
