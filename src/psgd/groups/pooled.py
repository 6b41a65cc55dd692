"""Fitting many inverse-free groups at once: factors of one size are handled together, whatever blocks they belong to.

A network has hundreds of factors and few sizes. Sums over the elements of a block are computed group by group; what
follows are products of n × n matrices, for all factors of a size at once, and numbers for each factor, for all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..normalize import Normalization
from ..ops.factors import scaled
from ..ops.streams import at_once
from ..tangent import Tangent, largest
from .all_factors import AllFactors, Target, power_to_one
from .axes import along, gram_, low, low_dtype, multiply_axes, multiply_axis, product_, seen_along
from .base import Groups, Preconditioned, Scaled, joined
from .near_symmetric import NearSymmetric, norm_
from .pool import Pool, put_back_

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
        self.factors = AllFactors(self.groups, self.counts)
        self.pools, self.wide = self.factors.pools, self.factors.wide

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
        self.factors.tidy_(usable)
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
            bound = norm_(squares.flatten(0, 1)).largest.view(2, -1).sum(0)
            S = squares[0].sub_(squares[1])
            frobenius = torch.linalg.vector_norm(S.flatten(1), dim=1, dtype=self.wide)
        else:
            S = squares[0].sub_(squares[1])
            bound, square, _ = norm_(S)
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
            rescale: also multiply ``P`` of blocks whose ``P g`` is of quite another size than one, see ``power_to_one``

        Returns:
            ``P g / weight`` with ``P`` from before the step, which the step needs anyway
        """
        for pool in self.pools:
            pool.fetch()
        usable, noise = self._numbers(self._at_once(self._length, gs, sizes=gs), damping, ok, weight)
        # The damping is the only term of a tangent that is not a product of few columns.
        thin = {pool: low(pool.Q) for pool in self.pools if pool.thin and not damping}
        whole = [pool for pool in self.pools if pool not in thin]
        Ps = [pool.P() for pool in whole]
        whitened = self._precondition(gs, whole, Ps, thin, weight, outs or [None] * len(gs))
        gs.clear()
        tangents = [torch.empty_like(P, dtype=P.dtype if P.ndim == 3 else self.wide) for P in Ps]
        if damping:
            norms = joined(self._at_once(self._length, Ps, sizes=Ps)).log_()
            variance = self.factors.sum_of_others(norms).mul_(2).exp_().mul_(noise.index_select(0, self.factors.block))
            mine = variance.split([len(P) for P in Ps])
            self._at_once(self._damp_, mine, self.pools, Ps, tangents, sizes=Ps)
        Ps.clear()  # as large as the tangents: gone before more is needed
        length = self._see_(whitened, whole, tangents, add=damping > 0)
        targets, drawn = self.factors.targets(support or [None] * len(self.groups))
        usable = usable & (drawn > 0)
        formed = dict(zip(whole, tangents, strict=True))
        tasks = [
            partial(self._descend_thin_, lr, usable, pool, target, whitened, thin[pool])
            if pool in thin
            else partial(self._descend_white_, lr, usable, pool, target, whitened, formed[pool])
            for pool, target in zip(self.pools, targets, strict=True)
        ]
        finite = at_once(tasks, [pool.Q for pool in self.pools], self.device)
        for large in (tasks, tangents, formed, thin):  # gone before more is needed
            large.clear()
        if tidy or rescale:
            self.factors.tidy_(
                usable,
                joined(finite),
                power_to_one(length, self.factors.root_numel.square(), drawn) if rescale else None,
            )
        put_back_(self.pools)
        return Preconditioned(whitened, length)

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
        rms = rms / self.factors.root_numel
        # What is outside is a gradient that vanished or exploded: following it, P would be of no use afterwards.
        eps = torch.finfo(self.wide).eps
        return ok & (rms > eps**2) & (rms < eps**-2), (rms * damping).square_()

    def _precondition(
        self,
        gs: Sequence[Tensor],
        whole: Sequence[Pool],
        Ps: Sequence[Tensor],
        thin: Mapping[Pool, Tensor],
        weight: Tensor | None,
        outs: Sequence[Tensor | None],
    ) -> list[Scaled]:
        """``P g / weight``, with ``P`` of some pools, and with the rounded ``Q`` and ``Qᵀ`` of the others."""
        of = {key: part for pool, P in zip(whole, Ps, strict=True) for key, part in pool.parts(P).items()}
        roots = {key: part for pool, Q in thin.items() for key, part in pool.parts(Q).items()}

        def multiply(k: int, g: Tensor, w: Tensor | None, out: Tensor | None) -> Scaled:
            group = self.groups[k]
            mine = {axis: of[k, axis] for axis in range(len(group.dims)) if (k, axis) in of}
            if w is not None:  # divides the smallest array there is
                smallest = min(mine, key=lambda axis: mine[axis].numel(), default=None)
                if smallest is None:
                    g = g / along(w.to(g.dtype), g)
                else:
                    mine[smallest] = mine[smallest] / along(w.to(g.dtype), mine[smallest])
            matrices = [(P, axis) for axis, P in mine.items() if axis != group.scale_axis]
            twice = [(roots[k, axis], axis) for axis in range(len(group.dims)) if axis not in mine]
            v = multiply_axes(matrices, g.reshape(len(g), *group.dims), None if twice else out)
            for Q, axis in twice:
                into = torch.empty_like(v) if out is None else out
                v = multiply_axis(Q.mT, multiply_axis(Q, v.to(Q.dtype), axis), axis, into)
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

    def _see_(self, whitened: Sequence[Scaled], pools: Sequence[Pool], tangents: Sequence[Tensor], add: bool) -> Tensor:
        """``a aᵀ``, or add it to the tangents of some pools, for whitened ``a = scale · v`` seen along an axis.

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

        of = {key: part for pool, S in zip(pools, tangents, strict=True) for key, part in pool.parts(S).items()}
        # Lengths of rows take no memory, and little of the device: they go beside the products.
        sizes = [whitened[g].v if S.ndim == 3 else S for (g, _), S in of.items()]
        tasks = [partial(see_, g, axis, S) for (g, axis), S in of.items()]
        seen = dict(zip(of, at_once(tasks, sizes, self.device), strict=True))
        for g, a in enumerate(whitened):
            axis = self.groups[g].scale_axis
            if axis is not None and (rows := seen[g, axis]) is not None:
                a.slices = along(rows, a.v, axis)
        # The lengths of its slices have the same length as an array.
        shortest = [a.v if a.slices is None else a.slices for a in whitened]
        return joined(self._at_once(self._length, shortest, sizes=shortest))

    def _descend_white_(
        self, lr: float | Tensor, usable: Tensor, pool: Pool, target: Target, whitened: Sequence[Scaled], S: Tensor
    ) -> Tensor:
        """Move the factors of a pool along ``S − target``; return whether that is finite, for each factor."""
        norm, square, direction = norm_(S)
        if direction is not None:
            for (g, _), rows in pool.rows.items():
                if len(self.groups[g].dims) == 2:
                    whitened[g].direction = direction[rows]
        frobenius = square.add_(target.square).sqrt_()
        pool.diagonal(S).sub_(target.diagonal)
        return pool.step_(S, norm + target.norm, frobenius, lr, usable)

    def _descend_thin_(
        self,
        lr: float | Tensor,
        usable: Tensor,
        pool: Pool,
        target: Target,
        whitened: Sequence[Scaled],
        rounded: Tensor,
    ) -> Tensor:
        """Move the factors of a pool along ``a aᵀ − target`` without forming it, see ``move_along_``.

        The norms of ``a aᵀ`` are those of the smaller matrix ``aᵀ a``.
        """
        each = [seen_along(whitened[g].v, axis, whitened[g].scale) for g, axis in pool.members]
        norms = []
        for a in each:
            gram = a.new_empty(len(a), a.shape[2], a.shape[2], dtype=self.dtype)
            product_(a.mT, a, gram)
            norms.append(norm_(gram))
        norm, square = (joined([getattr(norm, name) for norm in norms]) for name in ("largest", "square"))
        frobenius = square.add_(target.square).sqrt_()
        return pool.step_along_(each, rounded, target.diagonal, norm + target.norm, frobenius, lr, usable)

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
