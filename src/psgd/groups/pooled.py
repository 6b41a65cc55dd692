"""Fitting many inverse-free groups at once: factors of one size are handled together, whatever blocks they belong to.

A network has hundreds of factors and few sizes. Sums over the elements of a block are computed group by group; what
follows are products of n × n matrices, for all factors of a size at once, and numbers for each factor, for all at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..normalize import Normalization
from ..ops.factors import scaled
from ..ops.streams import at_once, sent
from ..tangent import Tangent, largest
from .axes import along, gram_, low_dtype, multiply_axes, product_
from .base import Groups, Preconditioned, Scaled, joined
from .near_symmetric import NearSymmetric, move_, norm_, safe, turn_
from .pool import Pool, factor_tensor

if TYPE_CHECKING:
    from .inverse_free import InverseFree

T = TypeVar("T")


class Pooled(Groups):
    """Inverse-free groups, fitted together.

    Args:
        groups: stacks of blocks on one device and with one dtype
        normalize: None, as inverse-free factors normalise their steps in their own way
    """

    groups: list[InverseFree]  # type: ignore[assignment]
    whitens = True
    recordable = True

    def __init__(self, groups: Sequence[InverseFree], normalize: Normalization | None = None) -> None:
        super().__init__(groups)
        pools: dict[tuple[bool, int], Pool] = {}
        for g, group in enumerate(self.groups):
            for axis, (n, factor) in enumerate(zip(group.dims, group.factors, strict=True)):
                dense = isinstance(factor, NearSymmetric)
                pools.setdefault((dense, n), Pool(dense)).members[g, axis] = factor_tensor(factor)
        # The largest first: of branches that run beside each other, the first has the memory of what came before.
        self.pools = sorted(pools.values(), key=lambda pool: -sum(Q.nbytes for Q in pool.members.values()))
        stop = 0
        for pool in self.pools:
            stop = pool.join(stop)
        like = self.pools[0].Q
        #: dtype of the numbers for each factor
        self.wide = torch.promote_types(like.dtype, torch.float32)

        counts = self.counts
        numels = [math.prod(group.dims) for group in self.groups]
        starts = [sum(counts[:g]) for g in range(len(counts))]
        blocks, columns, sizes, firsts, most = [], [], [], [], []
        for pool in self.pools:
            for g, axis in pool.members:
                n = self.groups[g].dims[axis]
                blocks += [starts[g] + b for b in range(counts[g])]
                columns += [numels[g] / n] * counts[g]
                sizes += [float(n)] * counts[g]
                firsts += [float(axis == 0)] * counts[g]
                most += [math.log2(self.groups[g].limit(like.dtype))] * counts[g]

        def on_device(values: Sequence[float], dtype: torch.dtype = self.wide) -> Tensor:
            return sent(torch.tensor(values, dtype=dtype, device="cpu"), like.device)

        #: for each factor: its block, what it sees, whether it is the first of its block
        self.block = on_device(blocks, torch.int64)
        self.columns, self.sizes, self.first = map(on_device, (columns, sizes, firsts))
        #: the logarithm of how large it may get
        self.most = on_device(most)
        self.numel = on_device(
            [float(numel) for numel, count in zip(numels, counts, strict=True) for _ in range(count)]
        )
        #: sums over the factors of a block, with and without the factor itself
        self.sum = (self.block[:, None] == self.block).to(self.wide)
        self.others = self.sum - torch.eye(len(blocks), dtype=self.wide, device=like.device)

    def descend_(self, tangents: Iterable[tuple[Tangent, Tensor]], lr: float | Tensor, ok: Tensor) -> None:
        """``Q_i ← (I − lr / L · S_i) Q_i`` for every factor, where ``L`` bounds ``‖a aᵀ‖ + ‖b bᵀ‖`` and so ``‖S_i‖``.

        As the size of the step is not normalised by ``S`` itself, it vanishes with ``S``: on a fixed Hessian ``Q``
        converges. Criteria without such a difference are normalised by ``‖S_i‖``.

        ``Q`` is turned back to symmetry every time: a pair shows a factor one direction, and where many steps in such
        directions have turned ``Q``, the next one moves ``P`` elsewhere.

        Args:
            tangents: for each group its tangent, which is used up, and for each of its blocks whether it says anything
            lr: step size: one number, or one for each of all blocks
            ok: whether there is a step at all
        """
        measured = list(tangents)
        is_difference = measured[0][0].is_difference
        if any(tangent.is_difference != is_difference for tangent, _ in measured):
            rates = lr.split(self.counts) if isinstance(lr, Tensor) and lr.ndim else [lr] * len(measured)
            for group, rate in zip(self.groups, rates, strict=True):
                Pooled([group]).descend_([measured.pop(0)], rate, ok)
            return
        usable = ok & joined([informative for _, informative in measured])
        for pool in self.pools:
            pool.fetch()
        sides = [_sides(measured.pop(0)[0], group) for group in self.groups]
        # They will be squared: keep them within the range of the number format.
        size = torch.maximum(*(joined([largest(v) for v in side]) for side in zip(*sides, strict=True)))
        fine = torch.isfinite(size) & (size > 0)
        for pair, each in zip(sides, torch.where(fine, size, 1.0).split(self.counts), strict=True):
            for v in pair:
                v.div_(along(each, v))
        usable = (usable & fine)[self.block]
        for pool in self.pools:
            self._descend_pairs_(sides, is_difference, lr, usable, pool)
        self._tidy_(usable)
        for pool in self.pools:
            pool.put_back_()

    def _descend_pairs_(
        self,
        sides: Sequence[tuple[Tensor, Tensor]],
        is_difference: bool,
        lr: float | Tensor,
        usable: Tensor,
        pool: Pool,
    ) -> None:
        """Move the factors of a pool along ``S = p pᵀ − m mᵀ``."""
        dtype = pool.Q.dtype if pool.dense else self.wide
        squares = torch.empty((2, *pool.Q.shape), dtype=dtype, device=pool.Q.device)
        for (g, axis), rows in pool.rows.items():
            for k, v in enumerate(sides[g]):
                gram_(v, axis, squares[k, rows])
        if not pool.dense:
            squares.square_()
        if is_difference:
            bound = norm_(squares.flatten(0, 1))[0].view(2, -1).sum(0)
            S = squares[0].sub_(squares[1])
            frobenius = torch.linalg.vector_norm(S.flatten(1), dim=1, dtype=self.wide)
        else:
            S = squares[0].sub_(squares[1])
            bound, square = norm_(S)
            bound.masked_fill_(bound == 0, torch.inf)  # no step
            frobenius = square.sqrt_()
        self._step_(pool, S, bound, frobenius, lr, usable, room=squares[1])

    def whiten_(
        self,
        gs: list[Tensor],
        lr: float | Tensor,
        damping: float,
        ok: Tensor,
        weight: Tensor | None = None,
        tidy: bool = True,
        outs: Sequence[Tensor | None] | None = None,
    ) -> Preconditioned:
        """One step of every ``Q`` towards whitening ``g``, or ``g / weight``.

        It is the step of criterion 3 for the pair ``(v, g + ε v)``, ``v ~ N(0, I)``, in expectation over ``v``. There
        ``b bᵀ`` is a multiple of the identity and the damping, ``ε = damping · rms(g)``, a multiple of ``P_i²``, so no
        random number is drawn.

        Args:
            gs: an array ``(B, *dims)`` for each group; the list is emptied, as they may be copies
            lr: one number, or one for each of all blocks
            damping: relative to the size of ``g``; where it is zero, one of three products of n × n matrices is saved
            ok: whether there is a step at all; blocks whose gradient is useless keep their ``Q`` anyway
            weight: for each of all blocks
            tidy: also do what need not be done at every step: turn ``Q`` back to symmetry, and balance the factors
            outs: for each group where the result is to be, or None

        Returns:
            ``P g / weight`` with ``P`` from before the step, which the step needs anyway
        """
        for pool in self.pools:
            pool.fetch()
        lengths = self._at_once(self._length, gs, sizes=gs)
        usable, noise = self._numbers(lengths, damping, ok, weight)
        Ps = [pool.P() for pool in self.pools]
        whitened = self._precondition(gs, Ps, weight, outs or [None] * len(gs))
        gs.clear()
        tangents = [torch.empty_like(P, dtype=P.dtype if P.ndim == 3 else self.wide) for P in Ps]
        if damping:
            norms = torch.cat(self._at_once(self._length, Ps, sizes=Ps)).log_()
            variance = (self.others @ norms).mul_(2).exp_().mul_(noise[self.block])
            self._at_once(partial(self._damp_, variance), self.pools, Ps, tangents, sizes=Ps)
        Ps.clear()  # as large as the tangents: gone before more is needed
        length = self._see_(whitened, tangents, add=damping > 0)
        descend_ = partial(self._descend_white_, lr, usable)
        overflown = torch.cat(self._at_once(descend_, self.pools, tangents, sizes=tangents))
        tangents.clear()
        if tidy:
            self._tidy_(usable, overflown)
        for pool in self.pools:
            pool.put_back_()
        return Preconditioned(whitened, length)

    def _at_once(self, function: Callable[..., T], *arguments: Sequence[Any], sizes: Sequence[Tensor]) -> list[T]:
        """For each of the arguments; the sizes are those of some tensors."""
        tasks = [partial(function, *each) for each in zip(*arguments, strict=True)]
        return at_once(tasks, [v.numel() for v in sizes], self.sizes.device)

    def _length(self, v: Tensor) -> Tensor:
        """Of each array of a stack."""
        return torch.linalg.vector_norm(v.flatten(1), dim=1, dtype=self.wide)

    def _numbers(
        self, lengths: Sequence[Tensor], damping: float, usable: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """For each factor whether there is a step, and for each block the variance of the noise that damps it."""
        rms = torch.cat(list(lengths))
        if weight is not None:
            rms = rms / weight
        rms = rms / self.numel.sqrt()
        # What is outside is a gradient that vanished or exploded: following it, P would be of no use afterwards.
        eps = torch.finfo(self.wide).eps
        usable = (usable & (rms > eps**2) & (rms < eps**-2))[self.block]
        return usable, (rms * damping).square_()

    def _precondition(
        self, gs: Sequence[Tensor], Ps: Sequence[Tensor], weight: Tensor | None, outs: Sequence[Tensor | None]
    ) -> list[Scaled]:
        of = {key: P[rows] for pool, P in zip(self.pools, Ps, strict=True) for key, rows in pool.rows.items()}

        def multiply(k: int, g: Tensor, w: Tensor | None, out: Tensor | None) -> Scaled:
            group = self.groups[k]
            mine = [of[k, axis] for axis in range(len(group.dims))]
            long = group.scale_axis
            if w is not None:  # divides the smallest array there is
                smallest = min(range(len(mine)), key=lambda axis: mine[axis].numel())
                mine[smallest] = mine[smallest] / along(w.to(g.dtype), mine[smallest])
            matrices = [(P, axis) for axis, P in enumerate(mine) if axis != long]
            v = multiply_axes(matrices, g.reshape(len(g), *group.dims), out)
            return Scaled(v, None if long is None else along(mine[long], v, long))

        weights = [None] * len(gs) if weight is None else weight.split([len(g) for g in gs])
        return self._at_once(multiply, range(len(gs)), gs, weights, outs, sizes=gs)

    def _damp_(self, variance: Tensor, pool: Pool, P: Tensor, S: Tensor) -> None:
        """What white noise on ``g`` adds to ``a aᵀ``: its variance, times ``P_i²`` and ``‖P_j‖²`` of the other factors.

        Becomes ``S``; a dense ``P`` may be overwritten.
        """
        mine = variance[pool.span]
        if pool.dense:
            deviation = mine.sqrt().to(P.dtype).view(-1, 1, 1)
            rounded = low_dtype(P) != P.dtype
            noise = scaled(P, deviation, torch.empty_like(P, dtype=low_dtype(P)) if rounded else P)
            product_(noise, noise, S)
        else:
            torch.mul(P.to(self.wide).square(), mine[:, None], out=S)

    def _see_(self, whitened: Sequence[Scaled], tangents: Sequence[Tensor], add: bool) -> Tensor:
        """``a aᵀ``, or add it to the tangents, for whitened ``a = scale · v`` seen along every axis.

        Returns:
            ``‖a‖`` for each block
        """

        def see_(g: int, axis: int, S: Tensor) -> Tensor | None:
            v, scale = whitened[g].v, whitened[g].scale
            if S.ndim == 3:
                gram_(v, axis, S, scale, add=add)
                return None
            rows = torch.empty_like(S)
            gram_(v, axis, rows, scale)
            if add:
                S.addcmul_(rows, rows)
            else:
                torch.square(rows, out=S)
            return rows

        keys = [key for pool in self.pools for key in pool.rows]
        parts = [S[rows] for pool, S in zip(self.pools, tangents, strict=True) for rows in pool.rows.values()]
        # Lengths of rows take no memory, and little of the device: they go beside the products.
        sizes = [whitened[g].v if S.ndim == 3 else S for (g, _), S in zip(keys, parts, strict=True)]
        seen = dict(zip(keys, self._at_once(see_, *zip(*keys, strict=True), parts, sizes=sizes), strict=True))
        shortest = [
            # The lengths of its rows have the same length as an array.
            next((rows for axis in range(a.v.ndim - 1) if (rows := seen[g, axis]) is not None), a.v)
            for g, a in enumerate(whitened)
        ]
        return torch.cat(self._at_once(self._length, shortest, sizes=shortest))

    def _descend_white_(self, lr: float | Tensor, usable: Tensor, pool: Pool, S: Tensor) -> Tensor:
        """Move the factors of a pool along ``S``, less what a whitened gradient has; say where it overflows."""
        columns, sizes = self.columns[pool.span], self.sizes[pool.span]
        norm, square = norm_(S)
        frobenius = torch.addcmul(square, sizes, columns.square()).sqrt_()
        pool.diagonal(S).sub_(columns[:, None])
        return self._step_(pool, S, norm + columns, frobenius, lr, usable)

    def _step_(
        self,
        pool: Pool,
        S: Tensor,
        bound: Tensor,
        frobenius: Tensor,
        lr: float | Tensor,
        usable: Tensor,
        room: Tensor | None = None,
    ) -> Tensor:
        """``Q ← Q − lr / bound · S Q``; ``S`` is used up, and there may be room for the product.

        Returns:
            where there is no step as the tangent overflows, so large is ``Q``
        """
        usable = usable[pool.span]
        if isinstance(lr, Tensor) and lr.ndim:
            lr = lr[self.block[pool.span]]
        # The second bound is safe whatever the first has missed: overshooting never stretches a direction of Q.
        bound = torch.maximum(bound, frobenius * safe(lr))
        step = torch.where(usable & torch.isfinite(bound), lr / bound, 0.0)
        if pool.dense:
            move_(pool.Q, S, step, room)
        else:
            pool.Q.mul_(1 - S.mul_(step[:, None]).masked_fill_((step == 0)[:, None], 0))
        return usable & ~torch.isfinite(bound)

    def _tidy_(self, usable: Tensor, overflown: Tensor | None = None) -> None:
        """Turn factors back to symmetry, and move scale between those of a block until all are of one size.

        Only those with a step are. The scales are powers of two, as in ``Group``. What is over the limit, or so large
        that there could be no step, is made smaller.
        """
        for pool in self.pools:
            if pool.dense:
                turn_(pool.Q, usable[pool.span])
        sizes = torch.cat([pool.diagonal(pool.Q).amax(1).to(self.wide) for pool in self.pools])
        # What someone has put there need not be finite; it must not spread to other blocks, as zero times it would.
        logs = sizes.nan_to_num_(nan=1.0, posinf=1.0).clamp_min_(torch.finfo(self.wide).tiny).log2_()
        powers = torch.where(usable, ((self.sum @ logs) / self.sum.sum(1) - logs).round_(), 0.0)
        powers.sub_(self.first * (self.sum @ powers))
        powers.sub_((logs + powers - self.most).clamp_min_(0).ceil_())
        if overflown is not None:
            powers.sub_(8 * overflown)
        scales = powers.exp2_()
        for pool in self.pools:
            each = along(scales[pool.span].to(pool.Q.dtype), pool.Q)
            if pool.Q.dtype == torch.bfloat16:  # torch's own product runs at a third of the speed of memory there
                scaled(pool.Q, each, pool.Q)
            else:
                pool.Q.mul_(each)

    @cached_property
    def _matrices(self) -> list[NearSymmetric]:
        return [f for group in self.groups for f in group.factors if isinstance(f, NearSymmetric)]

    def keeps_P(self) -> bool:
        return all(factor.keeps_P() for factor in self._matrices)

    def forget_P(self) -> None:
        for factor in self._matrices:
            factor.forget_P()

    def confirm_P(self) -> None:
        for factor in self._matrices:
            factor.confirm_P()


def _sides(tangent: Tangent, group: InverseFree) -> tuple[Tensor, Tensor]:
    """``p`` and ``m`` with ``S ∝ p pᵀ − m mᵀ``, as the group sees them. The tangent is used up."""
    x, y = (v.reshape(len(v), *group.dims) for v in (tangent.x, tangent.y))
    if tangent.is_difference:
        y.mul_(0.5)
    else:
        # x yᵀ + y xᵀ = (p pᵀ − m mᵀ) / 2 for p, m = x ± y, best conditioned where x and y are of one size
        sizes = largest(x), largest(y)
        moves = (sizes[0] > 0) & (sizes[1] > 0)  # where one half is zero, so is S, and both become zero
        x, y = (v / along(torch.where(moves, size, torch.inf), v) for v, size in zip((x, y), sizes, strict=True))
    return x + y, y.sub_(x)
