"""Whitening of many inverse-free groups at once: factors of one size are handled together, whatever blocks they are of.

A network has hundreds of factors and few sizes. Sums over the elements of a block are done group by group; what follows
are products of n × n matrices, done for all factors of a size, and numbers for each factor, done for all factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .base import Factor
from .diagonal import DiagonalFactor
from .inverse_free import InverseFree, NearSymmetric, along, gram_, move_, multiply_axis, norm_, safe, turn_


@dataclass
class Pool:
    """All factors of one kind and size as one tensor ``Q``, ``(N, n, n)`` or ``(N, n)``."""

    dense: bool
    #: a group and an axis of it, with the tensor of the stack's factors there
    members: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def join(self, start: int) -> int:
        """Make ``Q``: a view if the members lie one after the other in memory, as the optimizer puts them."""
        view = adjacent(list(self.members.values()))
        self.copied = view is None
        self.Q = self.copy() if view is None else view
        #: where the factors of this pool are among all factors
        self.span = slice(start, start + len(self.Q))
        self.rows: dict[tuple[int, int], slice] = {}
        row = 0
        for key, part in self.members.items():
            self.rows[key] = slice(row, row + len(part))
            row += len(part)
        return self.span.stop

    def copy(self) -> Tensor:
        return torch.cat(list(self.members.values()))

    def fetch(self) -> None:
        """Others may have moved the factors meanwhile."""
        if self.copied:
            self.Q = self.copy()

    def put_back_(self) -> None:
        if self.copied:
            for key, part in self.members.items():
                part.copy_(self.Q[self.rows[key]])

    def P(self) -> Tensor:
        return torch.bmm(self.Q.mT, self.Q) if self.dense else self.Q.square()

    def diagonal(self, M: Tensor) -> Tensor:
        return M.diagonal(dim1=1, dim2=2) if self.dense else M


class Whitener:
    """Groups that are whitened together.

    Args:
        groups: stacks of blocks on one device and with one dtype
    """

    def __init__(self, groups: Sequence[InverseFree]) -> None:
        self.groups = list(groups)
        pools: dict[tuple[bool, int], Pool] = {}
        for g, group in enumerate(self.groups):
            for axis, (n, factor) in enumerate(zip(group.dims, group.factors, strict=True)):
                dense = isinstance(factor, NearSymmetric)
                pools.setdefault((dense, n), Pool(dense)).members[g, axis] = _tensor(factor)
        self.pools = list(pools.values())
        stop = 0
        for pool in self.pools:
            stop = pool.join(stop)
        like = self.pools[0].Q
        #: of the numbers for each factor
        self.dtype = torch.promote_types(like.dtype, torch.float32)

        counts = [len(_tensor(group.factors[0])) for group in self.groups]
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
        of_block = sorted((b, k) for k, (b, first) in enumerate(zip(blocks, firsts, strict=True)) if first)

        def on_device(values: Sequence[float], dtype: torch.dtype = self.dtype) -> Tensor:
            return sent(torch.tensor(values, dtype=dtype), like.device)

        #: for each factor: its block, what it sees, whether it is the first of its block
        self.block = on_device(blocks, torch.int64)
        self.columns, self.sizes, self.first = map(on_device, (columns, sizes, firsts))
        #: the logarithm of how large it may get
        self.most = on_device(most)
        self.first_of_block = on_device([k for _, k in of_block], torch.int64)
        self.numel = on_device(
            [float(numel) for numel, count in zip(numels, counts, strict=True) for _ in range(count)]
        )
        #: sums over the factors of a block, with and without the factor itself
        self.sum = (self.block[:, None] == self.block).to(self.dtype)
        self.others = self.sum - torch.eye(len(blocks), dtype=self.dtype, device=like.device)

    def whiten_(
        self,
        gs: Sequence[Tensor],
        lr: float | Tensor,
        damping: float,
        usable: Tensor,
        weight: Tensor | None = None,
        tidy: bool = True,
    ) -> tuple[list[tuple[Tensor, Tensor | None]], Tensor]:
        """One step of every ``Q`` towards whitening ``g``, or ``g / weight``.

        It is the step of criterion 3 for the pair ``(v, g + ε v)``, ``v ~ N(0, I)``, in expectation over ``v``. There
        ``b bᵀ`` is a multiple of the identity and the damping, ``ε = damping · rms(g)``, a multiple of ``P_i²``, so no
        random number is drawn.

        Args:
            gs: an array ``(B, *dims)`` for each group
            lr: one number, or one for each of all blocks
            damping: relative to the size of ``g``
            usable: whether there is a step at all; blocks whose gradient is useless keep their ``Q`` anyway
            weight: for each of all blocks
            tidy: also do what need not be done at every step: turn ``Q`` back to symmetry, and balance the factors

        Returns:
            ``P g / weight`` for each group, with ``P`` from before the step, as an array and what it still has to be
            multiplied with, if anything; and their lengths for all blocks
        """
        for pool in self.pools:
            pool.fetch()
        Ps = [pool.P() for pool in self.pools]
        rms = torch.cat([torch.linalg.vector_norm(g.flatten(1), dim=1, dtype=self.dtype) for g in gs])
        if weight is not None:
            rms = rms / weight
        rms = rms / self.numel.sqrt()
        # What is outside is a gradient that vanished or exploded: following it, P would be of no use afterwards.
        eps = torch.finfo(self.dtype).eps
        usable = (usable & (rms > eps**2) & (rms < eps**-2))[self.block]
        noise = (rms * damping).square_()
        whitened = self._precondition(gs, Ps, weight)
        tangents = []
        for pool, P in zip(self.pools, Ps, strict=True):
            S = torch.empty_like(P, dtype=P.dtype if pool.dense else self.dtype)
            for (g, axis), rows in pool.rows.items():
                v, scale = whitened[g]
                gram_(v, axis, S[rows], scale)
            tangents.append(S if pool.dense else S.square_())
        squares = torch.cat(
            [pool.diagonal(S).sum(1, dtype=self.dtype) for pool, S in zip(self.pools, tangents, strict=True)]
        )
        self._damp_(Ps, tangents, noise)
        del Ps, P  # as large as S: gone before more is needed
        overflown = self._descend_(tangents, lr, usable)
        if tidy:
            self._tidy_(usable, overflown)
        for pool in self.pools:
            pool.put_back_()
        return whitened, squares[self.first_of_block].sqrt_()

    def _precondition(
        self, gs: Sequence[Tensor], Ps: Sequence[Tensor], weight: Tensor | None
    ) -> list[tuple[Tensor, Tensor | None]]:
        of = {key: P[rows] for pool, P in zip(self.pools, Ps, strict=True) for key, rows in pool.rows.items()}
        start = 0
        whitened: list[tuple[Tensor, Tensor | None]] = []
        for k, (g, group) in enumerate(zip(gs, self.groups, strict=True)):
            v = g.reshape(len(g), *group.dims)
            scale = None
            for axis in range(len(group.dims)):
                P = of[k, axis]
                if axis == 0 and weight is not None:  # divides the smallest array there is
                    P = P / along(weight[start : start + len(g)].to(P.dtype), P)
                if axis == group.long:
                    scale = along(P, v, axis)
                else:
                    v = multiply_axis(P, v, axis)
            start += len(g)
            whitened.append((v, scale))
        return whitened

    def _descend_(self, tangents: list[Tensor], lr: float | Tensor, usable: Tensor) -> Tensor:
        """Move every ``Q``; say where it is so large that its tangent overflows."""
        norm, square = (torch.cat(parts) for parts in zip(*map(norm_, tangents), strict=True))
        if isinstance(lr, Tensor) and lr.ndim:
            lr = lr[self.block]
        # The second bound is safe whatever the first has missed: overshooting never stretches a direction of Q.
        frobenius = torch.addcmul(square, self.sizes, self.columns.square()).sqrt_()
        bound = torch.maximum(norm.add_(self.columns), frobenius * safe(lr))
        step = torch.where(usable & torch.isfinite(bound), lr / bound, 0.0)
        for pool, S in zip(self.pools, tangents, strict=True):
            mine = step[pool.span]
            pool.diagonal(S).sub_(self.columns[pool.span, None])
            if pool.dense:
                move_(pool.Q, S, mine.to(S.dtype).view(-1, 1, 1))
            else:
                pool.Q.mul_(1 - S.mul_(mine[:, None]).masked_fill_((mine == 0)[:, None], 0))
        return usable & ~torch.isfinite(bound)

    def _damp_(self, Ps: list[Tensor], tangents: list[Tensor], noise: Tensor) -> None:
        """Add what white noise on ``g`` adds to ``a aᵀ``: its variance, times ``P_i²`` and ``‖P_j‖²`` of the rest."""
        logs = torch.cat([torch.linalg.vector_norm(P.flatten(1), dim=1, dtype=self.dtype) for P in Ps]).log_()
        variance = (self.others @ logs).mul_(2).exp_().mul_(noise[self.block])
        for pool, P, S in zip(self.pools, Ps, tangents, strict=True):
            mine = variance[pool.span]
            if pool.dense:
                S.baddbmm_(P * mine.to(P.dtype).view(-1, 1, 1), P)
            else:
                S.addcmul_(P.to(self.dtype).square(), mine[:, None])

    def _tidy_(self, usable: Tensor, overflown: Tensor) -> None:
        """Turn factors back to symmetry, and move scale between those of a block until all are of one size.

        Where there was no step, they were tidy before. The scales are powers of two, as in ``Group``. What is over the
        limit, or so large that there could be no step, is made smaller.
        """
        for pool in self.pools:
            if pool.dense:
                turn_(pool.Q, usable[pool.span])
        sizes = torch.cat([pool.diagonal(pool.Q).amax(1).to(self.dtype) for pool in self.pools])
        logs = sizes.clamp_min_(torch.finfo(self.dtype).tiny).log2_()
        powers = torch.where(usable, ((self.sum @ logs) / self.sum.sum(1) - logs).round_(), 0.0)
        powers.sub_(self.first * (self.sum @ powers))
        powers.sub_((logs + powers - self.most).clamp_min_(0).ceil_())
        scales = powers.sub_(8 * overflown).exp2_()
        for pool in self.pools:
            pool.Q.mul_(along(scales[pool.span].to(pool.Q.dtype), pool.Q))


def sent(values: Tensor, device: torch.device) -> Tensor:
    """To a device, without making the host wait."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """All parts as one tensor, if they lie one after the other in memory."""
    first = parts[0]
    offset = first.storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and part.storage_offset() == offset and part.is_contiguous()):
            return None
        offset += part.numel()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def _tensor(factor: Factor) -> Tensor:
    assert isinstance(factor, (NearSymmetric, DiagonalFactor))
    return factor.root if isinstance(factor, NearSymmetric) else factor.diag
