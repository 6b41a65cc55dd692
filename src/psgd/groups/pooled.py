"""Fitting many inverse-free groups at once: factors of one size are handled together, whatever blocks they belong to.

A network has hundreds of factors and few sizes. Sums over the elements of a block are computed group by group; what
follows are products of n × n matrices, for all factors of a size at once, and numbers for each factor, for all at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..normalize import Normalization
from ..ops.factors import scaled
from ..ops.streams import at_once, sent
from ..tangent import Tangent, largest
from .axes import along, gram_, low_dtype, multiply_axes, product_
from .balance import balancing_powers, scale_all_
from .base import Groups, Preconditioned, Scaled, joined
from .near_symmetric import NearSymmetric, norm_, turn_
from .pool import Pool, factor_tensor, put_back_

if TYPE_CHECKING:
    from .inverse_free import InverseFree

T = TypeVar("T")

#: ratio by which the size of ``P g`` may be off before ``P`` is multiplied instead of fitted
OFF = 16.0


class _Target(NamedTuple):
    """``E[b bᵀ]`` of the factors of a pool, which is diagonal."""

    #: ``(N, n)`` or ``(N, 1)``
    diagonal: Tensor
    #: its largest element, ``(N,)``
    norm: Tensor
    #: sum of its squares, ``(N,)``
    square: Tensor


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
        members: dict[tuple[int, int], dict[tuple[int, int], Tensor]] = {}
        for g, group in enumerate(self.groups):
            for axis, factor in enumerate(group.factors):
                tensor = factor_tensor(factor)
                members.setdefault((tensor.ndim, tensor.shape[1]), {})[g, axis] = tensor
        # The largest first: of branches that run beside each other, the first has the memory of what came before.
        self.pools = sorted(map(Pool, members.values()), key=lambda pool: -pool.Q.nbytes)
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
        #: for each factor, pool by pool: its block, whether it is the first of that, the logarithm of its largest size
        self.block = joined([pool.block for pool in self.pools])
        self.first = on_device([x for pool in self.pools for x in each(pool, lambda _, axis: float(axis == 0))])
        limits = [math.log2(group.limit(like.dtype)) for group in self.groups]
        self.most = on_device([x for pool in self.pools for x in each(pool, lambda g, _: limits[g])])
        #: root of the number of elements of each block
        self.root_numel = on_device(
            [n for n, count in zip(numels, self.counts, strict=True) for _ in range(count)]
        ).sqrt()
        self._zero = torch.zeros(1, dtype=self.wide, device=like.device)
        self._one = torch.ones(1, dtype=self.wide, device=like.device)
        #: for each factor the number of factors of its block, and the positions of the others, see ``_sum_of_others``
        self.rank = on_device([x for pool in self.pools for x in each(pool, lambda g, _: len(self.groups[g].dims))])
        self.others = sent(self._positions_of_others(), like.device)
        #: position of the first factor of each block
        self.first_of_block = sent(self._positions_of_firsts(), like.device)

    def _rows(self) -> dict[tuple[int, int], slice]:
        """Positions, pool by pool, of the factors of each group and axis."""
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
        """For each factor the positions, pool by pool, of the other factors of its block.

        Where a block has fewer factors than another one, the position after the last factor stands for those it lacks.
        """
        rows = self._rows()
        count, most = len(self.block), max(len(group.dims) for group in self.groups)
        others = torch.full((count, most - 1), count, dtype=torch.int64, device="cpu")
        for (g, axis), mine in rows.items():
            rest = [rows[g, other] for other in range(len(self.groups[g].dims)) if other != axis]
            for column, theirs in enumerate(rest):
                others[mine, column] = torch.arange(theirs.start, theirs.stop, device="cpu")
        return others

    def _sum_of_others(self, x: Tensor) -> Tensor:
        """For a number of each factor the sum over the other factors of its block.

        Factors of other blocks have no part in it, not even one of zero: what is not finite stays in its block.
        """
        return torch.cat([x, self._zero])[self.others].sum(1)

    def _sum(self, x: Tensor) -> Tensor:
        """For a number of each factor the sum over all factors of its block."""
        return x + self._sum_of_others(x)

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
        usable = usable & fine
        for pool in self.pools:
            self._descend_pairs_(sides, is_difference, lr, usable, pool)
        self._tidy_(usable)
        put_back_(self.pools)

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
        pool.step_(S, bound, frobenius, lr, usable, room=squares[1])

    def whiten_(
        self,
        gs: list[Tensor],
        lr: float | Tensor,
        damping: float,
        ok: Tensor,
        weight: Tensor | None = None,
        tidy: bool = True,
        outs: Sequence[Tensor | None] | None = None,
        support: Sequence[list[Tensor] | None] | None = None,
        rescale: bool = False,
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
            support: for each group and axis ones for slices in which ``v`` is drawn and zeros for those in which it is
                zero, ``(B, n)``; None for a group without zeros
            rescale: also multiply ``P`` of blocks whose ``P g`` is of quite another size than one, see ``_off``

        Returns:
            ``P g / weight`` with ``P`` from before the step, which the step needs anyway
        """
        for pool in self.pools:
            pool.fetch()
        usable, noise = self._numbers(self._at_once(self._length, gs, sizes=gs), damping, ok, weight)
        Ps = [pool.P() for pool in self.pools]
        whitened = self._precondition(gs, Ps, weight, outs or [None] * len(gs))
        gs.clear()
        tangents = [torch.empty_like(P, dtype=P.dtype if P.ndim == 3 else self.wide) for P in Ps]
        if damping:
            norms = joined(self._at_once(self._length, Ps, sizes=Ps)).log_()
            variance = self._sum_of_others(norms).mul_(2).exp_().mul_(noise.index_select(0, self.block))
            mine = variance.split([len(P) for P in Ps])
            self._at_once(self._damp_, mine, self.pools, Ps, tangents, sizes=Ps)
        Ps.clear()  # as large as the tangents: gone before more is needed
        length = self._see_(whitened, tangents, add=damping > 0)
        targets, drawn = self._targets(support or [None] * len(self.groups))
        usable = usable & (drawn > 0)
        descend_ = partial(self._descend_white_, lr, usable)
        finite = self._at_once(descend_, self.pools, tangents, targets, sizes=tangents)
        tangents.clear()
        if tidy or rescale:
            self._tidy_(usable, joined(finite), _off(length / drawn.sqrt()) if rescale else None)
        put_back_(self.pools)
        return Preconditioned(whitened, length)

    def _targets(self, support: Sequence[list[Tensor] | None]) -> tuple[list[_Target], Tensor]:
        """Diagonal of ``E[b bᵀ]`` for each pool, where ``b`` is white in some slices and zero elsewhere.

        Also returns the number of elements of ``b`` that are not zero, for each block.
        """
        if all(slices is None for slices in support):
            each = [_Target(pool.columns[:, None], pool.columns, pool.identity) for pool in self.pools]
            return each, self.root_numel.square()

        def drawn_in(g: int, axis: int) -> Tensor:
            slices = support[g]
            if slices is None:
                return self._one.new_ones(self.counts[g], self.groups[g].dims[axis])
            return slices[axis].to(self.wide)

        drawn = [joined([drawn_in(*member) for member in pool.members]) for pool in self.pools]
        # For each factor its slices, and the columns of a slice: the product over the other axes of the block.
        count = joined([slices.sum(1) for slices in drawn])
        columns = torch.cat([count, self._one])[self.others].prod(1)
        norm, square = columns * (count > 0), columns.square() * count
        sizes = [len(slices) for slices in drawn]
        parts = zip(drawn, columns.split(sizes), norm.split(sizes), square.split(sizes), strict=True)
        targets = [_Target(slices * c[:, None], n, q) for slices, c, n, q in parts]
        return targets, (count * columns).index_select(0, self.first_of_block)

    def _at_once(self, function: Callable[..., T], *arguments: Sequence[Any], sizes: Sequence[Tensor]) -> list[T]:
        """Call a function for each of the arguments; the sizes are those of some tensors."""
        return at_once([partial(function, *each) for each in zip(*arguments, strict=True)], sizes, self.device)

    def _length(self, v: Tensor) -> Tensor:
        """Length of each array of a stack."""
        return torch.linalg.vector_norm(v.flatten(1), dim=1, dtype=self.wide)

    def _numbers(
        self, lengths: Sequence[Tensor], damping: float, ok: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """For each block whether there is a step, and the variance of the noise that damps it."""
        rms = joined(lengths)
        if weight is not None:
            rms = rms / weight
        rms = rms / self.root_numel
        # What is outside is a gradient that vanished or exploded: following it, P would be of no use afterwards.
        eps = torch.finfo(self.wide).eps
        return ok & (rms > eps**2) & (rms < eps**-2), (rms * damping).square_()

    def _precondition(
        self, gs: Sequence[Tensor], Ps: Sequence[Tensor], weight: Tensor | None, outs: Sequence[Tensor | None]
    ) -> list[Scaled]:
        of = {key: part for pool, P in zip(self.pools, Ps, strict=True) for key, part in pool.parts(P).items()}

        def multiply(k: int, g: Tensor, w: Tensor | None, out: Tensor | None) -> Scaled:
            group = self.groups[k]
            mine = [of[k, axis] for axis in range(len(group.dims))]
            if w is not None:  # divides the smallest array there is
                smallest = min(range(len(mine)), key=lambda axis: mine[axis].numel())
                mine[smallest] = mine[smallest] / along(w.to(g.dtype), mine[smallest])
            matrices = [(P, axis) for axis, P in enumerate(mine) if axis != group.scale_axis]
            v = multiply_axes(matrices, g.reshape(len(g), *group.dims), out)
            return Scaled(v, None if group.scale_axis is None else along(mine[group.scale_axis], v, group.scale_axis))

        weights = [None] * len(gs) if weight is None else weight.split(self.counts)
        return self._at_once(multiply, range(len(gs)), gs, weights, outs, sizes=gs)

    def _damp_(self, variance: Tensor, pool: Pool, P: Tensor, S: Tensor) -> None:
        """``S ← variance · P_i²``, which white noise on ``g`` adds to ``a aᵀ``; a dense ``P`` may be overwritten.

        Args:
            variance: for each factor the variance of the noise times ``‖P_j‖²`` of the other factors of its block
            pool: the factors
            P: their ``P``
            S: result
        """
        if pool.dense:
            deviation = variance.sqrt().to(P.dtype).view(-1, 1, 1)
            rounded = low_dtype(P) != P.dtype
            noise = scaled(P, deviation, torch.empty_like(P, dtype=low_dtype(P)) if rounded else P)
            product_(noise, noise, S)
        else:
            torch.mul(P.to(self.wide).square(), variance[:, None], out=S)

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

        of = {key: part for pool, S in zip(self.pools, tangents, strict=True) for key, part in pool.parts(S).items()}
        keys, parts = list(of), list(of.values())
        # Lengths of rows take no memory, and little of the device: they go beside the products.
        sizes = [whitened[g].v if S.ndim == 3 else S for (g, _), S in zip(keys, parts, strict=True)]
        seen = dict(zip(keys, self._at_once(see_, *zip(*keys, strict=True), parts, sizes=sizes), strict=True))
        for g, a in enumerate(whitened):
            axis = self.groups[g].scale_axis
            if axis is not None and (rows := seen[g, axis]) is not None:
                a.slices = along(rows, a.v, axis)
        # The lengths of its slices have the same length as an array.
        shortest = [a.v if a.slices is None else a.slices for a in whitened]
        return joined(self._at_once(self._length, shortest, sizes=shortest))

    def _descend_white_(self, lr: float | Tensor, usable: Tensor, pool: Pool, S: Tensor, target: _Target) -> Tensor:
        """Move the factors of a pool along ``S − target``; return whether that is finite, for each factor."""
        norm, square = norm_(S)
        frobenius = square.add_(target.square).sqrt_()
        pool.diagonal(S).sub_(target.diagonal)
        return pool.step_(S, norm + target.norm, frobenius, lr, usable)

    def _tidy_(self, usable: Tensor, finite: Tensor | None = None, off: Tensor | None = None) -> None:
        """Turn factors back to symmetry, and move scale between those of a block until all are of one size.

        The scales are powers of two, as in ``Group``. Factors over the limit, or so large that their tangent is not
        finite, are made smaller.

        Args:
            usable: for each block whether there was a step; others keep their factors
            finite: for each factor whether its tangent is finite
            off: for each block the power of two by which ``Q`` is to be multiplied, or None
        """
        if off is not None:
            off = torch.where(usable, off, torch.zeros_like(off)).index_select(0, self.block) * self.first
        usable = usable.index_select(0, self.block)
        sizes = [len(pool.Q) for pool in self.pools]
        for pool, mine in zip(self.pools, usable.split(sizes), strict=True):
            if pool.dense:
                turn_(pool.Q, mine)
        largest_of_each = torch.cat([pool.diagonal(pool.Q).amax(1).to(self.wide) for pool in self.pools])
        # What someone has put there need not be finite; it must not spread to other blocks, as zero times it would.
        logs = largest_of_each.nan_to_num_(nan=1.0, posinf=1.0).clamp_min_(torch.finfo(self.wide).tiny).log2_()
        powers = balancing_powers(logs, usable, lambda x: self._sum(x) / self.rank, self._sum, self.first)
        if off is not None:
            powers.add_(off)
        powers.sub_(usable * (logs + powers - self.most).clamp_min_(0).ceil_())
        if finite is not None:
            powers.sub_(8 * (usable & ~finite))
        Qs = [pool.Q for pool in self.pools]
        scales = [along(each.to(Q.dtype), Q) for each, Q in zip(powers.exp2_().split(sizes), Qs, strict=True)]
        # No interrupt can divide a recording, and torch's own product of bfloat16 is three times as slow as memory.
        if self.dtype == torch.bfloat16 and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            for Q, each in zip(Qs, scales, strict=True):
                scaled(Q, each, Q)
        else:
            scale_all_(Qs, scales)

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


def _off(rms: Tensor) -> Tensor:
    """Power of two to multiply ``Q`` with, so that ``P g`` of some root mean square is of size one again.

    It is zero unless ``P g`` is off by more than ``OFF``: as in the first step, or after the loss was multiplied. ``P``
    would need many steps to get there, and slices that seldom have a gradient even more.
    """
    far = (rms > OFF) | (rms < 1 / OFF)
    return torch.where(far & (rms > 0), (-0.5 * rms.log2()).round(), torch.zeros_like(rms))


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
