"""The arithmetic of an iteration with triangular factors, and the time that it takes at the speed of the library.

In a block with N elements, an axis of length n has k = N / n columns. With a triangular factor ``Q`` it costs, where a
multiplication and an addition count as two:

* ``P g = Qᵀ Q g``: two triangular products of ``n² k`` FLOPs each, at every step;
* ``a = Q δg``: one more;
* ``b = Q⁻ᵀ δθ``: triangular equations, ``n² k``;
* ``S = x yᵀ + y xᵀ``: the upper half of two products, ``2 n² k``;
* ``triu(S) Q``: the product of two triangular matrices, ``n³ / 3``; for vectors (k = 1) O(n²), which is left out;
* ``δθ``: N normal numbers; then ``θ + δθ``, ``δg``, ``a − b``, ``a + b``, and a norm and a difference of n² elements.

The library has no product of triangular matrices. It is taken to run at the speed of its whole product of the same
shape, so that a triangular one takes half of that time, and a product of two triangles a sixth. Together with both
gradients this is the floor: what code that calls this library could take at best. Everything above it is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from ..groups import Group


@dataclass(frozen=True)
class Part:
    """A call of the library: FLOPs of the arithmetic that it stands for, and the share of its time that counts.

    Args:
        name: formula
        of_update: whether only updates of ``Q`` need it
        flops: FLOPs of the arithmetic
        share: share of the time of the call
        call: the call
    """

    name: str
    of_update: bool
    flops: float
    share: float
    call: Callable[[], object]


def parts(groups: Iterable[Group], dtype: torch.dtype, device: str) -> Iterator[Part]:
    """All calls for groups that hold one block each."""
    for group in groups:
        numel = math.prod(group.dims)
        v = torch.randn(numel, dtype=dtype, device=device)
        yield Part("δθ", True, 0, 1, partial(torch.randn, numel, dtype=dtype, device=device))
        yield Part("θ + δθ, δg, a − b, a + b", True, 4 * numel, 4, partial(torch.add, v, v))
        for n in group.dims:
            yield from _of_axis(n, numel // n, dtype, device)


def _of_axis(n: int, k: int, dtype: torch.dtype, device: str) -> Iterator[Part]:
    Q = (torch.eye(n) + torch.randn(n, n).triu_(1) / n).to(device, dtype)
    v = torch.randn(n, k).to(device, dtype)
    w = v.flip(0)
    square = n * n * k
    yield Part("Qᵀ Q g", False, 2 * square, 1, partial(torch.mm, Q, v))
    yield Part("Q δg", True, square, 1 / 2, partial(torch.mm, Q, v))
    yield Part("Q⁻ᵀ δθ", True, square, 1, _solution(Q, v))
    yield Part("x yᵀ + y xᵀ", True, 2 * square, 1, partial(torch.mm, v, w.mT))
    if k > 1:
        yield Part("triu(S) Q", True, n**3 / 3, 1 / 6, partial(torch.mm, Q, Q))
    yield Part("max |S|", True, n * n / 2, 1 / 2, Q.aminmax)
    yield Part("Q − …", True, n * n / 2, 1 / 2, partial(torch.sub, Q, Q))


def _solution(Q: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
    """Solution of ``Qᵀ b = v``: for large matrices from the right, which is the faster of the two on a CPU."""
    if min(v.shape) > 64:
        return partial(torch.linalg.solve_triangular, Q, v.mT, upper=True, left=False)
    return partial(torch.linalg.solve_triangular, Q.mT, v, upper=False)
