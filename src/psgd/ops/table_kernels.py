"""Triton kernels of ``TensorTable``: each program handles one chunk of a parameter, which it finds by its address.

``blocks`` has six numbers for each parameter: its address, its number of elements, the offset of its direction in the
buffer, and three numbers ``(first, n, after)`` for its scales. ``chunks`` has two numbers for each program: the index
of its parameter, and the index of the chunk. With ``aligned``, addresses and sizes are multiples of 16.
"""

from __future__ import annotations

from .triton import jit, multiple, tl


@jit
def subtract(  # type: ignore[no-untyped-def]
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
    b, i, inside = _chunk(blocks, chunks, tl.program_id(0), aligned, chunk)
    inside = inside & (tl.load(usable) != 0)
    block = blocks + 6 * b
    theta = _pointer(block, dtype, aligned)
    x = tl.load(v + _start(block, aligned) + i, mask=inside).to(compute)
    t = tl.load(theta + i, mask=inside).to(compute)
    scale += tl.load(block + 3)
    n = tl.load(block + 4).to(tl.int32)
    if n > 1:
        start = tl.load(chunks + 2 * tl.program_id(0).to(tl.int64) + 1) * chunk
        s = tl.load(scale + _near(start, tl.load(block + 5).to(tl.int32), n, chunk), mask=inside)
    else:
        s = tl.load(scale + i * 0)
    d = x * (s.to(compute) * tl.load(rate + b).to(compute)) + t * tl.load(decay + b).to(compute)
    tl.store(theta + i, (t - d).to(dtype), mask=inside)


@jit
def _chunk(blocks, chunks, k, aligned: tl.constexpr, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """Index of the parameter to which the chunk ``k`` of all belongs, its positions there, and which are inside."""
    k = k.to(tl.int64)
    b = tl.load(chunks + 2 * k)
    i = tl.load(chunks + 2 * k + 1) * chunk + tl.arange(0, chunk)
    return b, i, i < multiple(tl.load(blocks + 6 * b + 1).to(tl.int32), aligned)


@jit
def _pointer(place, dtype: tl.constexpr, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointer to the elements of a tensor, from the address stored at ``place``."""
    pointer = tl.load(place).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if aligned else pointer


@jit
def _start(block, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offset of a parameter in a buffer."""
    return multiple(tl.load(block + 2), aligned)


@jit
def squares(  # type: ignore[no-untyped-def]
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
    b, i, inside = _chunk(blocks, chunks, tl.program_id(0), aligned, chunk)
    x = tl.load(_pointer(sources + b, dtype, aligned) + i, mask=inside, other=0).to(compute)
    tl.store(sums + tl.program_id(0), tl.sum(x * x, 0))
    count = tl.sum(tl.where(inside & (x == 0), 1, 0), 0)
    if count > 0:
        tl.atomic_add(zeros + b, count)  # integers: the sum does not depend on the order


@jit
def lengths(ends, sums, lengths, width: tl.constexpr):  # type: ignore[no-untyped-def]
    b = tl.program_id(0)
    end = tl.load(ends + b + 1)
    total = tl.zeros([width], dtype=sums.dtype.element_ty)
    for start in range(tl.load(ends + b), end, width):
        k = start + tl.arange(0, width)
        total += tl.load(sums + k, mask=k < end, other=0)
    tl.store(lengths + b, tl.sqrt(tl.sum(total, 0)))


@jit
def _near(start, after, n, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """``(i // after) % n`` for the ``chunk`` positions from ``start`` on, without an integer division of each."""
    first = start // after
    steps = _quotient(start - first * after + tl.arange(0, chunk), after, chunk)
    at = first % n + steps
    return at - n * _quotient(at, n, chunk)


@jit
def _quotient(t, by, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """``t // by`` for ``t < by + chunk``: multiplying by the reciprocal is exact enough for such small numbers."""
    if by > chunk:  # noqa: SIM108
        quotient = (t >= by).to(tl.int32)
    else:
        quotient = ((t.to(tl.float32) + 0.5) * (1.0 / by)).to(tl.int32)
    return quotient


@jit
def support(  # type: ignore[no-untyped-def]
    blocks,
    chunks,
    sources,
    has_zeros,
    axes,
    flags,
    total,
    count: tl.constexpr,
    each: tl.constexpr,
    aligned: tl.constexpr,
    dtype: tl.constexpr,
    chunk: tl.constexpr,
):
    # Most tensors have no zeros, and then a program only finds that out: one for each chunk would cost more than that.
    for k in range(tl.program_id(0) * each, min(tl.program_id(0) * each + each, total)):
        b, i, inside = _chunk(blocks, chunks, k, aligned, chunk)
        if tl.load(has_zeros + b) != 0:
            x = tl.load(_pointer(sources + b, dtype, aligned) + i, mask=inside, other=0)
            start = tl.load(chunks + 2 * k + 1) * chunk
            for j in tl.static_range(count):
                axis = axes + 3 * (count * b + j)
                n = tl.load(axis + 1).to(tl.int32)
                if n > 0:
                    at = tl.load(axis) + _near(start, tl.load(axis + 2).to(tl.int32), n, chunk)
                    # All writes to a flag write the same value. Most flags are set already; writing again costs time.
                    new = (x != 0) & (tl.load(flags + at, mask=inside, other=1.0) == 0)
                    tl.store(flags + at, 1.0, mask=new)


@jit
def gather(  # type: ignore[no-untyped-def]
    blocks, chunks, sources, out, aligned: tl.constexpr, dtype: tl.constexpr, chunk: tl.constexpr
):
    b, i, inside = _chunk(blocks, chunks, tl.program_id(0), aligned, chunk)
    x = tl.load(_pointer(sources + b, dtype, aligned) + i, mask=inside)
    tl.store(out + _start(blocks + 6 * b, aligned) + i, x, mask=inside)


@jit
def average(  # type: ignore[no-untyped-def]
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
    b, i, inside = _chunk(blocks, chunks, tl.program_id(0), aligned, chunk)
    inside = inside & (tl.load(usable) != 0)
    mean = _pointer(means + b, mean_dtype, aligned)
    w = tl.load(weight + b).to(compute)
    x = tl.load(_pointer(sources + b, dtype, aligned) + i, mask=inside, other=0).to(compute)
    x = x * tl.load(factor + b).to(compute)
    m = tl.load(mean + i, mask=inside, other=0).to(compute)
    # Interpolate from the nearer end, so that a weight of one gives exactly the source.
    new = tl.where(w < 0.5, m + w * (x - m), x - (1 - w) * (x - m))
    tl.store(mean + i, new.to(mean_dtype), mask=inside)
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(inside, new * new, 0.0), 0))
