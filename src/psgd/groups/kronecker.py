"""Kronecker products: one factor for each axis of a parameter array, ``P = P_0 ⊗ P_1 ⊗ …``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..normalize import Normalization
from .base import Factor, Group, Groups, Structure
from .diagonal import DiagonalFactor
from .inverse_free import InverseFree
from .near_symmetric import NearSymmetric
from .pooled import Pooled
from .triangular import Triangular


@dataclass(frozen=True)
class Kronecker(Structure):
    """One factor for each axis of a block: dense if the axis is not too long, otherwise diagonal.

    A matrix of gradients ``G`` is preconditioned as ``P_0 G P_1``. Axes of length one have no factor; the factor of a
    scalar is a single number.

    Args:
        max_dense: length of the longest axis that gets a dense factor; 0 makes every factor diagonal
        max_skew: largest ratio of the length of an axis with a dense factor to the product of the lengths of the other
            axes. Each gradient shows a factor only as many directions as this product, so the dense factor of a long
            vector would learn its n² numbers too slowly.
        inverse_free: use dense factors that are fitted by matrix products only (``NearSymmetric``), instead of the
            paper's triangular factors
    """

    max_dense: int = 2048
    max_skew: int = 256
    inverse_free: bool = True

    def __post_init__(self) -> None:
        for name, least in (("max_dense", 0), ("max_skew", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}: Kronecker wants a whole number of at least {least}")
        if not isinstance(self.inverse_free, bool):
            raise ValueError(f"inverse_free={self.inverse_free!r}: Kronecker wants True or False")

    def is_dense(self, n: int, shape: Sequence[int]) -> bool:
        """Whether an axis of a block gets a dense factor.

        Args:
            n: length of the axis
            shape: shape of the block
        """
        return n <= self.max_dense and n * n <= self.max_skew * math.prod(shape)

    def precond_lr(self, whitening: bool, size: int = 1) -> float:
        return 0.1 if self.inverse_free else super().precond_lr(whitening, size)

    def precond_boost(self, whitening: bool) -> float:
        return 6.0 if self.inverse_free and not whitening else 3.0

    @property
    def exact_precond_lr(self) -> float:
        return 0.5 if self.inverse_free else 0.3

    def smaller(self, groups: Iterable[Group]) -> Iterator[Kronecker]:
        """Structures with smaller and smaller ``max_dense``; the last one has no dense factors."""
        dense = {
            n
            for group in groups
            for n, factor in zip(group.dims, group.factors, strict=True)
            if not isinstance(factor, DiagonalFactor)
        }
        for n in [*sorted(dense, reverse=True)[1:], 0] if dense else []:
            yield replace(self, max_dense=n)

    @property
    def inverts(self) -> bool:
        return not self.inverse_free

    @property
    def own_normalization(self) -> bool:
        return self.inverse_free

    def together(self, groups: Sequence[Group], normalize: Normalization | None = None) -> Groups:
        if not self.inverse_free:
            return Groups(groups, normalize)
        return Pooled([group for group in groups if isinstance(group, InverseFree)])

    def init(self, shape: Sequence[int], *, batch: int = 1, dtype: torch.dtype, device: torch.device | str) -> Group:
        dims = [n for n in shape if n > 1] or [1]
        dense: type[NearSymmetric] | type[Triangular] = NearSymmetric if self.inverse_free else Triangular
        factors: list[Factor] = []
        for n in dims:
            fits = self.is_dense(n, dims)
            kind: type[NearSymmetric] | type[Triangular] | type[DiagonalFactor] = dense if fits else DiagonalFactor
            factors.append(kind.identity(batch, n, dtype, device))
        return InverseFree(dims, factors) if self.inverse_free else Group(dims, factors)
