"""Fit of many inverse-free groups at once: factors of one size are handled together, whatever blocks they belong to.

A network has hundreds of factors but few sizes. Sums over the elements of a block are computed group by group. All
later work is batched: products of n × n matrices over all factors of one size, and single numbers over all factors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..normalize import Normalization
from ..ops.streams import at_once
from ..tangent import Tangent, largest
from .all_factors import AllFactors
from .axes import along, gram_
from .base import Groups, Preconditioned, Scaled, joined
from .near_symmetric import NearSymmetric, norm_
from .pool import Pool, put_back_
from .whitener import Whitener

if TYPE_CHECKING:
    from .inverse_free import InverseFree


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
        self._whitener = Whitener(self.factors)

    def descend_(self, tangents: Iterable[tuple[Tangent, Tensor]], lr: float | Tensor, ok: Tensor) -> None:
        """``Q_i ← (I − lr / L · S_i) Q_i`` for every factor, where ``L`` bounds ``‖a aᵀ‖ + ‖b bᵀ‖`` and so ``‖S_i‖``.

        The step is not normalised by ``S`` itself, so it vanishes with ``S``, and ``Q`` converges on a fixed Hessian.
        Steps of criteria whose tangent is not such a difference are normalised by ``‖S_i‖``.

        Every step turns ``Q`` back to symmetry. A pair shows a factor only one direction, and many steps in such
        directions turn ``Q`` so far that the next one would move ``P`` in a wrong direction.

        Args:
            tangents: for each group its tangent, which is overwritten, and a flag for each block that tells whether its
                tangent is informative
            lr: step size: one number, or one for each block of the bucket
            ok: flag that is false if the step is skipped
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
        # Both sides will be squared: scale them, so that squares stay within the range of the number format.
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
            bound.masked_fill_(bound == 0, torch.inf)  # a zero tangent moves nothing
            frobenius = square.sqrt_()
        pool.step_(S, bound, frobenius, lr, usable, room=squares[1])

    def _lengths(self, arrays: Sequence[Scaled]) -> Tensor:
        """Length of each block and, on a GPU, the stretch of each matrix, for ``Scaled.spectral_norm``.

        On a GPU both need one pass over the arrays, once a direction that each matrix stretches is known.
        """
        directions = self._directions(arrays) if self.device.type == "cuda" else {}
        tasks = [partial(a.length, directions.get(k)) for k, a in enumerate(arrays)]
        return joined(at_once(tasks, [a.v for a in arrays], self.device))

    def _directions(self, arrays: Sequence[Scaled]) -> dict[int, Tensor]:
        """Direction that each matrix stretches most, by group, from Gram matrices along the dense axis.

        Matrices of one size share each power iteration.
        """
        by_size: dict[int, list[int]] = {}
        for k, group in enumerate(self.groups):
            axis = group.scale_axis
            if axis is not None and len(group.dims) == 2 and isinstance(group.factors[1 - axis], NearSymmetric):
                by_size.setdefault(group.dims[1 - axis], []).append(k)
        directions: dict[int, Tensor] = {}
        for n, members in by_size.items():
            counts = [self.counts[k] for k in members]
            S = arrays[members[0]].v.new_empty(sum(counts), n, n)
            for k, part in zip(members, S.split(counts), strict=True):
                axis = self.groups[k].scale_axis
                assert axis is not None
                gram_(arrays[k].v, 1 - axis, part, arrays[k].scale)
            direction = norm_(S).direction
            assert direction is not None
            directions.update(zip(members, direction.split(counts), strict=True))
        return directions

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
        lengths: Tensor | None = None,
    ) -> Preconditioned:
        """Take one step of every ``Q`` towards whitening ``g``, see ``Whitener``."""
        return self._whitener(gs, lr, damping, ok, weight, tidy, outs, support, rescale, lengths)

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
    """``p`` and ``m`` with ``S ∝ p pᵀ − m mᵀ``, in the dims of the group; the tangent is overwritten."""
    x, y = (v.reshape(len(v), *group.dims) for v in (tangent.x, tangent.y))
    if tangent.is_difference:
        y.mul_(0.5)
    else:
        # x yᵀ + y xᵀ = (p pᵀ − m mᵀ) / 2 for p, m = x ± y, best conditioned if x and y have the same size
        sizes = largest(x), largest(y)
        moves = (sizes[0] > 0) & (sizes[1] > 0)  # if x or y is zero, so is S, and both become zero
        x, y = (v / along(torch.where(moves, size, torch.inf), v) for v, size in zip((x, y), sizes, strict=True))
    return x + y, y.sub_(x)
