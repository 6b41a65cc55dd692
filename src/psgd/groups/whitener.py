"""Whitening of many inverse-free groups at once, in expectation over the random half of the pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..ops.factors import scaled
from ..ops.look import between
from ..ops.real import shaped
from ..ops.streams import at_once
from .all_factors import AllFactors, Target, power_to_one
from .axes import along, gram_, low, low_dtype, multiply_axes, multiply_axis, product_, seen_along
from .base import Preconditioned, Scaled, joined
from .near_symmetric import NearSymmetric, Norms, norm_
from .pool import Pool, put_back_

T = TypeVar("T")


class Whitener:
    """One step of all factors of a bucket towards whitening gradients.

    Args:
        factors: the factors
    """

    def __init__(self, factors: AllFactors) -> None:
        self.factors, self.groups, self.pools = factors, factors.groups, factors.pools
        self.counts, self.wide = factors.counts, factors.wide
        self.dtype, self.device = self.pools[0].Q.dtype, self.pools[0].Q.device

    def __call__(
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
        lengths: Tensor | None = None,
    ) -> Preconditioned:
        """Take one step of every ``Q`` towards whitening ``g``, or ``g / weight``.

        It is the step of criterion 3 for the pair ``(v, g + ε v)``, ``v ~ N(0, I)``, in expectation over ``v``. In
        expectation, ``b bᵀ`` is a multiple of the identity, and the damping ``ε = damping · rms(g)`` adds a multiple of
        ``P_i²``, so no random number is drawn. The tangent ``a aᵀ`` of a thin factor is formed only with damping.

        Args:
            gs: an array ``(B, *dims)`` for each group; the list is emptied to free memory, as they may be copies
            lr: step size of ``Q``: one number, or one for each block of the bucket
            damping: damping relative to the size of ``g``; zero saves products of n × n matrices
            ok: whether the step is taken; blocks whose gradient vanished or exploded keep their ``Q`` in any case
            weight: divisor of ``g``, for each block of the bucket, or None
            tidy: whether to turn ``Q`` back to symmetry and to balance the factors, which not every step needs
            outs: for each group the tensor to write the result to, or None
            support: for each group and axis an array ``(B, n)`` with ones for slices in which ``v`` is drawn and zeros
                for slices in which it is zero; None for a group in which all of ``v`` is drawn
            rescale: whether to rescale ``P`` of blocks whose ``P g`` is far from size one, see ``power_to_one``
            lengths: length of ``g`` of each block of the bucket, if it is known

        Returns:
            ``P g / weight`` with the ``P`` before the step, which the step computes anyway
        """
        for pool in self.pools:
            pool.fetch()
        if lengths is None:
            lengths = joined(self._at_once(self._length, gs, sizes=gs))
        usable, noise = self._numbers(lengths, damping, ok, weight)
        roots = {pool: low(pool.Q) for pool in self.pools if pool.thin}
        of_support = partial(self.factors.targets, support or [None] * len(self.groups))
        formed = [pool for pool in self.pools if not pool.thin]
        # The targets depend on the gradients but little on the work before: they are found while P is formed.
        tasks: list[Callable[[], Any]] = [of_support, *(pool.P for pool in formed)]
        (targets, drawn), *products = at_once(tasks, [lengths, *(pool.Q for pool in formed)], self.device)
        usable, Ps = usable & (drawn > 0), dict[Pool, Tensor](zip(formed, products, strict=True))
        del products
        whitened = self._precondition(gs, Ps, roots, weight, outs or [None] * len(gs))
        gs.clear()
        if damping:
            Ps.update({pool: torch.bmm(root.mT, root) for pool, root in roots.items()})
        tangents = {pool: torch.empty_like(pool.Q, dtype=low_dtype(pool.Q) if pool.dense else self.wide) for pool in Ps}
        if noise is not None:
            self._damp_(Ps, noise, tangents)
        Ps.clear()  # as large as the tangents: freed before more memory is needed
        arrays = self._at_once(self._rounded, range(len(whitened)), whitened, sizes=[a.v for a in whitened])
        length = self._see_(whitened, arrays, tangents, roots, add=damping > 0)
        sizes = [pool.Q for pool in self.pools]
        of_norms = [partial(self._norms, pool, tangents.get(pool), arrays) for pool in self.pools]
        norms = at_once(of_norms, sizes, self.device)
        steps = [
            partial(self._descend_, lr, usable, pool, target, tangents.get(pool), roots.get(pool), of_pool)
            for pool, target, of_pool in zip(self.pools, targets, norms, strict=True)
        ]
        # Damping distorts directions, as it is largest where g is small.
        known = {} if damping else {pool: of_pool for pool, (of_pool, _) in zip(self.pools, norms, strict=True)}
        directions = {pool: x for pool, of_pool in known.items() if (x := of_pool.direction) is not None}
        tasks = [*self._stretches(whitened, arrays, _by_member(directions)), *steps]
        small = [lengths] * (len(tasks) - len(steps))
        finite = at_once(tasks, [*small, *sizes], self.device)[len(small) :]
        del norms, of_norms, steps, tasks, known, directions  # freed before more memory is needed
        for large in (tangents, roots, arrays):
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
        """Results of a function for each of the arguments, see ``at_once``; ``sizes`` are tensors of their sizes."""
        return at_once([partial(function, *each) for each in zip(*arguments, strict=True)], sizes, self.device)

    def _length(self, v: Tensor) -> Tensor:
        """Length of each array of a stack."""
        return torch.linalg.vector_norm(v.flatten(1), dim=1, dtype=self.wide)

    def _numbers(
        self, lengths: Tensor, damping: float, ok: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Flags of the blocks that take the step, and the variance of the noise that damps each block, if any does."""
        rms = lengths.to(self.wide) if weight is None else lengths / weight
        rms = rms / self.factors.root_numel
        # Outside this range, a gradient has vanished or exploded: P fitted to it would be useless for ordinary ones.
        eps = torch.finfo(self.wide).eps
        return ok & between(rms, eps**2, eps**-2), (rms * damping).square_() if damping else None

    def _precondition(
        self,
        gs: Sequence[Tensor],
        Ps: Mapping[Pool, Tensor],
        roots: Mapping[Pool, Tensor],
        weight: Tensor | None,
        outs: Sequence[Tensor | None],
    ) -> list[Scaled]:
        """``P g / weight``, by ``P`` for pools in ``Ps``, and by rounded ``Q`` and ``Qᵀ`` for pools in ``roots``."""
        P_of, Q_of = _by_member(Ps), _by_member(roots)

        def multiply(k: int, g: Tensor, w: Tensor | None, out: Tensor | None) -> Scaled:
            group = self.groups[k]
            mine = {axis: P_of[k, axis] for axis in range(len(group.dims)) if (k, axis) in P_of}
            if w is not None:  # divide the smallest array of the product
                smallest = min(mine, key=lambda axis: mine[axis].numel(), default=None)
                if smallest is None:
                    g = g / along(w.to(g.dtype), g)
                else:
                    mine[smallest] = mine[smallest] / along(w.to(g.dtype), mine[smallest])
            matrices = [(P, axis) for axis, P in mine.items() if axis != group.scale_axis]
            twice = [axis for axis in range(len(group.dims)) if axis not in mine]
            v = multiply_axes(matrices, shaped(g, (len(g), *group.dims)), None if twice else out)
            for axis in twice:
                Q, into = Q_of[k, axis], torch.empty_like(v) if out is None else out
                v = multiply_axis(Q.mT, multiply_axis(Q, v.to(Q.dtype), axis), axis, into)
            return Scaled(v, None if group.scale_axis is None else along(mine[group.scale_axis], v, group.scale_axis))

        weights = [None] * len(gs) if weight is None else weight.split(self.counts)
        return self._at_once(multiply, range(len(gs)), gs, weights, outs, sizes=gs)

    def _damp_(self, Ps: Mapping[Pool, Tensor], noise: Tensor, tangents: Mapping[Pool, Tensor]) -> None:
        """``S_i ← variance · P_i²``, which white noise on ``g`` adds to ``a aᵀ``; a dense ``P`` may be overwritten.

        The variance of a factor is the variance of the noise times the product of ``‖P_j‖²_F`` over the other factors
        of its block.
        """

        def damp_(variance: Tensor, pool: Pool, P: Tensor, S: Tensor) -> None:
            if pool.dense:
                deviation = variance.sqrt().to(P.dtype).view(-1, 1, 1)
                noise = scaled(P, deviation, torch.empty_like(P, dtype=low_dtype(P)) if low_dtype(P) != P.dtype else P)
                product_(noise, noise, S)
            else:
                torch.mul(P.to(self.wide).square(), variance[:, None], out=S)

        each = [Ps[pool] for pool in self.pools]
        norms = joined(self._at_once(self._length, each, sizes=each)).log_()
        variance = self.factors.sum_of_others(norms).mul_(2).exp_().mul_(noise.index_select(0, self.factors.block))
        mine = variance.split([len(P) for P in each])
        self._at_once(damp_, mine, self.pools, each, [tangents[pool] for pool in self.pools], sizes=each)

    def _rounded(self, k: int, a: Scaled) -> Tensor | None:
        """``scale · v`` in the dtype of estimates, for products; None if the group has no dense factor."""
        dense = any(isinstance(factor, NearSymmetric) for factor in self.groups[k].factors)
        return a.rounded(low_dtype(a.v)) if dense else None

    def _see_(
        self,
        whitened: Sequence[Scaled],
        arrays: Sequence[Tensor | None],
        tangents: Mapping[Pool, Tensor],
        roots: dict[Pool, Tensor],
        add: bool,
    ) -> Tensor:
        """Write ``a aᵀ`` to the tangents, or add it to them, for ``a = scale · v`` unfolded along the axis of a factor.

        Also round the factors of these tangents to the dtype of estimates, as ``roots``.

        Returns:
            ``‖a‖`` of each block
        """

        def see_(g: int, axis: int, S: Tensor) -> None:
            array, a = arrays[g], whitened[g]
            if S.ndim == 3:
                assert array is not None
                unfolded = seen_along(array, axis)
                product_(unfolded, unfolded.mT, S, add)
                return
            if axis == self.groups[g].scale_axis and a.slices is not None:
                rows = a.slices.view_as(S)
            else:
                rows = torch.empty_like(S)
                if array is None:
                    gram_(a.v, axis, rows, a.scale)
                else:
                    gram_(array, axis, rows)
                if axis == self.groups[g].scale_axis:
                    a.slices = along(rows, a.v, axis)
            if add:
                S.addcmul_(rows, rows)
            else:
                torch.square(rows, out=S)

        of = _by_member(tangents)
        rounds = [pool for pool in tangents if pool.dense and pool not in roots]
        # Lengths of rows and copies wait for memory, and products of matrices for arithmetic: they run in parallel.
        small = self.factors.root_numel
        tasks: list[Callable[[], Any]] = [partial(low, pool.Q) for pool in rounds]
        tasks += [partial(see_, g, axis, S) for (g, axis), S in of.items()]
        sizes = [small for _ in rounds] + [whitened[g].v if S.ndim == 3 else S for (g, _), S in of.items()]
        roots.update(zip(rounds, at_once(tasks, sizes, self.device), strict=False))
        # The vector of the lengths of its slices has the same length as the array itself.
        shortest = [a.v if a.slices is None else a.slices for a in whitened]
        return joined(self._at_once(self._length, shortest, sizes=shortest))

    def _norms(self, pool: Pool, S: Tensor | None, arrays: Sequence[Tensor | None]) -> tuple[Norms, list[Tensor]]:
        """Norms of the tangent of each factor, and ``a`` of each member if the tangent is not formed.

        The norms of ``a aᵀ`` are those of the smaller matrix ``aᵀ a``.
        """
        if S is not None:
            return norm_(S), []
        each = [seen_along(array, axis) for g, axis in pool.members if (array := arrays[g]) is not None]
        norms = []
        for a in each:
            gram = a.new_empty(len(a), a.shape[2], a.shape[2], dtype=self.dtype)
            product_(a.mT, a, gram)
            norms.append(norm_(gram))
        largest, square = (joined([getattr(norm, name) for norm in norms]) for name in ("largest", "square"))
        return Norms(largest, square, None), each

    def _descend_(
        self,
        lr: float | Tensor,
        usable: Tensor,
        pool: Pool,
        target: Target,
        S: Tensor | None,
        root: Tensor | None,
        norms: tuple[Norms, list[Tensor]],
    ) -> Tensor:
        """Move the factors of a pool along ``S − target``, or along ``a aᵀ − target`` without forming that.

        Returns:
            for each factor, whether this tangent is finite
        """
        (norm, square, _), each = norms
        frobenius = square.add_(target.square).sqrt_()
        bound = norm + target.norm
        if S is None:
            assert root is not None
            return pool.step_along_(each, root, target.diagonal, bound, frobenius, lr, usable)
        pool.diagonal(S).sub_(target.diagonal)
        return pool.step_(S, bound, frobenius, lr, usable, root)

    def _stretches(
        self, whitened: Sequence[Scaled], arrays: Sequence[Tensor | None], directions: Mapping[tuple[int, int], Tensor]
    ) -> list[Callable[[], None]]:
        """Tasks that multiply the slices of each matrix with the direction that it stretches most."""

        tasks: list[Callable[[], None]] = []
        for (g, dense), x in directions.items():
            axis, array = self.groups[g].scale_axis, arrays[g]
            if axis == 1 - dense and array is not None and array.ndim == 3:
                tasks.append(partial(whitened[g].find_stretch, array if axis == 0 else array.mT, x))
        return tasks


def _by_member(of_pools: Mapping[Pool, Tensor]) -> dict[tuple[int, int], Tensor]:
    """Parts of the arrays of some pools, by group and axis."""
    return {key: part for pool, array in of_pools.items() for key, part in pool.parts(array).items()}
