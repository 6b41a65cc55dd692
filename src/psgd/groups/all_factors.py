"""All factors of the groups of a bucket: pools of factors of one size, and arrays with one number for each factor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..ops.factors import scaled
from ..ops.streams import sent
from .axes import along
from .balance import balancing_powers, scale_all_
from .base import joined
from .near_symmetric import turn_
from .pool import Pool, factor_tensor

if TYPE_CHECKING:
    from .inverse_free import InverseFree

#: ratio by which the size of ``P g`` may differ from one before ``P`` is rescaled at once instead of fitted
OFF = 16.0


class Target(NamedTuple):
    """``E[b bᵀ]`` for each factor of a pool, which is a diagonal matrix."""

    #: its diagonal, ``(N, n)``, or ``(N, 1)`` for multiples of the identity
    diagonal: Tensor
    #: its largest element, ``(N,)``
    norm: Tensor
    #: sum of the squares of its elements, ``(N,)``
    square: Tensor


class AllFactors:
    """Factors of all groups of a bucket, in pools of one kind and size.

    Arrays with one number for each factor are in the order of the pools.

    Args:
        groups: stacks of blocks on one device and with one dtype
        counts: number of blocks of each group
    """

    def __init__(self, groups: Sequence[InverseFree], counts: Sequence[int]) -> None:
        self.groups, self.counts = groups, counts
        members: dict[tuple[int, int, bool], dict[tuple[int, int], Tensor]] = {}
        for g, group in enumerate(self.groups):
            for axis, factor in enumerate(group.factors):
                tensor = factor_tensor(factor)
                members.setdefault((tensor.ndim, tensor.shape[1], group.is_thin(axis)), {})[g, axis] = tensor
        # The largest first: of branches that run in parallel, the first can reuse the memory of earlier kernels.
        pools = [Pool(of_one_kind, thin) for (_, _, thin), of_one_kind in members.items()]
        self.pools = sorted(pools, key=lambda pool: -pool.Q.nbytes)
        like = self.pools[0].Q
        #: dtype of the numbers for each factor
        self.wide = torch.promote_types(like.dtype, torch.float32)

        numels = [math.prod(group.dims) for group in self.groups]
        starts = list(accumulate(self.counts, initial=0))

        def on_device(values: Sequence[float], dtype: torch.dtype = self.wide) -> Tensor:
            return sent(torch.tensor(values, dtype=dtype, device="cpu"), like.device)

        def each(pool: Pool, value: Callable[[int, int], float]) -> list[float]:
            return [x for g, axis in pool.members for x in [value(g, axis)] * self.counts[g]]

        for pool in self.pools:
            blocks = [b for g, _ in pool.members for b in range(starts[g], starts[g + 1])]
            pool.block = on_device(blocks, torch.int64)
            pool.columns = on_device(each(pool, lambda g, axis: numels[g] / self.groups[g].dims[axis]))
            pool.identity = on_device(each(pool, lambda g, axis: numels[g] ** 2 / self.groups[g].dims[axis]))
        #: for each factor: index of its block, whether it is the first of its block, and log₂ of its largest size
        self.block = joined([pool.block for pool in self.pools])
        self.first = on_device([x for pool in self.pools for x in each(pool, lambda _, axis: float(axis == 0))])
        limits = [math.log2(group.limit(like.dtype)) for group in self.groups]
        self.most = on_device([x for pool in self.pools for x in each(pool, lambda g, _: limits[g])])
        #: square root of the number of elements of each block
        self.root_numel = on_device(
            [n for n, count in zip(numels, self.counts, strict=True) for _ in range(count)]
        ).sqrt()
        self._zero = torch.zeros(1, dtype=self.wide, device=like.device)
        self._one = torch.ones(1, dtype=self.wide, device=like.device)
        #: for each factor: number of factors of its block, and positions of the other ones, see ``sum_of_others``
        self.rank = on_device([x for pool in self.pools for x in each(pool, lambda g, _: len(self.groups[g].dims))])
        self.others = sent(self._positions_of_others(), like.device)
        #: position of the first factor of each block
        self.first_of_block = sent(self._positions_of_firsts(), like.device)

    def _rows(self) -> dict[tuple[int, int], slice]:
        """Positions of the factors of each group and axis, in the order of the pools."""
        starts = accumulate((len(pool.Q) for pool in self.pools), initial=0)
        return {
            key: slice(start + part.start, start + part.stop)
            for pool, start in zip(self.pools, starts, strict=False)
            for key, part in pool.rows.items()
        }

    def _positions_of_firsts(self) -> Tensor:
        rows = self._rows()
        firsts = [rows[g, 0] for g in range(len(self.groups))]
        return torch.cat([torch.arange(part.start, part.stop, device="cpu") for part in firsts])

    def _positions_of_others(self) -> Tensor:
        """Positions of the other factors of its block, for each factor.

        Rows of blocks with fewer factors are padded with the position after the last factor.
        """
        rows = self._rows()
        count, most = len(self.block), max(len(group.dims) for group in self.groups)
        others = torch.full((count, most - 1), count, dtype=torch.int64, device="cpu")
        for (g, axis), mine in rows.items():
            rest = [rows[g, other] for other in range(len(self.groups[g].dims)) if other != axis]
            for column, theirs in enumerate(rest):
                others[mine, column] = torch.arange(theirs.start, theirs.stop, device="cpu")
        return others

    def sum_of_others(self, x: Tensor) -> Tensor:
        """Sum over the other factors of its block, for each factor, of an array with one number for each factor.

        Factors of other blocks are not even multiplied by zero, so that NaN and infinity stay in their block.
        """
        return torch.cat([x, self._zero])[self.others].sum(1)

    def _sum(self, x: Tensor) -> Tensor:
        """Sum over all factors of its block, for each factor."""
        return x + self.sum_of_others(x)

    def targets(self, support: Sequence[list[Tensor] | None]) -> tuple[list[Target], Tensor]:
        """Diagonal of ``E[b bᵀ]`` for each pool, where ``b`` is white noise in some slices and zero elsewhere.

        The second result is the number of nonzero elements of ``b`` in each block.
        """
        if all(slices is None for slices in support):
            each = [Target(pool.columns[:, None], pool.columns, pool.identity) for pool in self.pools]
            return each, self.root_numel.square()

        def drawn_in(g: int, axis: int) -> Tensor:
            slices = support[g]
            if slices is None:
                return self._one.new_ones(self.counts[g], self.groups[g].dims[axis])
            return slices[axis].to(self.wide)

        drawn = [joined([drawn_in(*member) for member in pool.members]) for pool in self.pools]
        # The number of slices of each factor, and of columns of a slice: the product over the other axes of the block.
        count = joined([slices.sum(1) for slices in drawn])
        columns = torch.cat([count, self._one])[self.others].prod(1)
        norm, square = columns * (count > 0), columns.square() * count
        sizes = [len(slices) for slices in drawn]
        parts = zip(drawn, columns.split(sizes), norm.split(sizes), square.split(sizes), strict=True)
        targets = [Target(slices * c[:, None], n, q) for slices, c, n, q in parts]
        return targets, (count * columns).index_select(0, self.first_of_block)

    def tidy_(self, usable: Tensor, finite: Tensor | None = None, off: Tensor | None = None) -> None:
        """Turn factors back to symmetry, and move scale between the factors of a block to give all one size.

        The scales are powers of two, as in ``Group``. Factors above the limit, or so large that their tangent is not
        finite, are scaled down.

        Args:
            usable: for each block, whether it took a step; other blocks keep their factors
            finite: for each factor, whether its tangent is finite, or None if all are
            off: for each block, the exponent of the power of two by which ``Q`` is multiplied, or None
        """
        if off is not None:
            off = torch.where(usable, off, torch.zeros_like(off)).index_select(0, self.block) * self.first
        usable = usable.index_select(0, self.block)
        sizes = [len(pool.Q) for pool in self.pools]
        for pool, mine in zip(self.pools, usable.split(sizes), strict=True):
            if pool.dense:
                turn_(pool.Q, mine)
        largest_of_each = torch.cat([pool.diagonal(pool.Q).abs().amax(1).to(self.wide) for pool in self.pools])
        # A user may have written values that are not finite. They must not reach other blocks through products with 0.
        logs = largest_of_each.nan_to_num_(nan=1.0, posinf=1.0).clamp_min_(torch.finfo(self.wide).tiny).log2_()
        powers = balancing_powers(logs, usable, lambda x: self._sum(x) / self.rank, self._sum, self.first)
        if off is not None:
            powers.add_(off)
        powers.sub_(usable * (logs + powers - self.most).clamp_min_(0).ceil_())
        if finite is not None:
            powers.sub_(8 * (usable & ~finite))
        Qs = [pool.Q for pool in self.pools]
        scales = [along(each.to(Q.dtype), Q) for each, Q in zip(powers.exp2_().split(sizes), Qs, strict=True)]
        # A captured graph cannot be interrupted, and torch's own bfloat16 product has a third of the memory's speed.
        if Qs[0].dtype == torch.bfloat16 and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            for Q, each in zip(Qs, scales, strict=True):
                scaled(Q, each, Q)
        else:
            scale_all_(Qs, scales)


def power_to_one(length: Tensor, numel: Tensor, drawn: Tensor) -> Tensor:
    """Exponent of the power of two by which ``Q`` is multiplied to give ``P g`` a root mean square near one.

    The exponent of a block is zero unless ``P g`` is wrong by more than ``OFF``, as in the first step or after the loss
    was rescaled. Fitting would then need many steps, and even more for slices that rarely have a gradient. If only few
    slices have a gradient in this step, ``P g`` counts as too long only relative to all of its elements, and as too
    short only relative to the elements that have a gradient.

    Args:
        length: length of ``P g`` of each block
        numel: number of elements of each block
        drawn: number of elements of each block that have a gradient
    """
    over, under = length / numel.sqrt(), length / drawn.sqrt()
    rms = torch.where(over > OFF, over, under)
    far = ((over > OFF) & (over < torch.inf)) | ((under < 1 / OFF) & (under > 0))
    return torch.where(far, (-0.5 * rms.log2()).round(), torch.zeros_like(rms))
