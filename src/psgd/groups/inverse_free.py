"""Kronecker products whose dense factors are near-symmetric: they need no triangular solves, which are slow on GPUs."""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..normalize import Normalization
from ..ops.real import shaped
from ..ops.triton import trial
from ..tangent import Tangent
from .axes import along, multiply_axes
from .base import Group
from .diagonal import DiagonalFactor
from .near_symmetric import NearSymmetric
from .pool import is_thin
from .pooled import Pooled

#: average number of updates of which one does all chores, see ``Chores``
KINDS = 16
#: largest step size of ``Q`` for which chores at one of ``KINDS`` updates are enough. Up to twice this step size, they
#: are done twice as often, and beyond that, every update turns ``Q`` back: after steps of 0.5 it can be too late.
SHORT = 0.15


class Chores(NamedTuple):
    """Work that is not needed at every update; each item costs a product of n × n matrices."""

    #: whether ``Q`` is turned back to symmetry, and the factors of a block are balanced
    tidy: bool
    #: factor of the probe's damping in this update
    damping: float
    #: whether this is the first update
    first: bool = False

    @classmethod
    def of(cls, number: int, lr: float) -> Chores:
        """Chores of an update with a pseudorandom number: all of them in one of ``KINDS`` updates, otherwise none.

        The update that does them has ``KINDS`` times the variance of the damping, so that the average stays the same.
        With step sizes above ``SHORT`` chores are done more often, as a ``Q`` far from symmetry loses directions for
        good.
        """
        kinds = KINDS if lr <= SHORT else KINDS // 2
        complete = number % kinds == 0
        return cls(tidy=complete or lr > 2 * SHORT, damping=kinds**0.5 * complete)

    @classmethod
    def all(cls) -> Chores:
        """Chores of an update that may be the only one: all of them."""
        return cls(tidy=True, damping=1.0)

    @classmethod
    def at_first(cls) -> Chores:
        """Chores of the first update."""
        return cls(tidy=True, damping=1.0, first=True)


class InverseFree(Group):
    """A Kronecker product of near-symmetric and diagonal factors, in the coordinates ``dQ = Q^½ E Q^1.5``.

    With one factor, steps descend criterion 3. With several factors, the tangent of each axis is formed from ``P δg``
    and ``δθ`` themselves, and steps vanish on average where ``tr_others(P R_g P) = tr_others(R_θ)`` for every axis. The
    derivation is in docs/method.md. ``Pooled`` fits many such groups at once, and whitens without random numbers.
    """

    whitens = True
    left = False

    @cached_property
    def scale_axis(self) -> int | None:  # type: ignore[override]
        """First axis with a diagonal factor; None if there is none, or if it is the only axis."""
        diagonals = [i for i, factor in enumerate(self.factors) if isinstance(factor, DiagonalFactor)]
        return diagonals[0] if diagonals and len(self.factors) > 1 else None

    def is_thin(self, axis: int) -> bool:
        """Whether the factor of an axis is dense and sees few columns of a block, see ``pool.is_thin``."""
        return isinstance(self.factors[axis], NearSymmetric) and is_thin(self.dims[axis], math.prod(self.dims))

    def kind(self, name: str) -> Hashable:
        axis, _, part = name.removeprefix("Q").partition("_")
        return part, self.is_thin(int(axis))

    def a(self, dgrad: Tensor) -> Tensor:
        return self.precondition(dgrad)

    def b(self, dtheta: Tensor) -> Tensor:
        return dtheta

    def precondition(self, g: Tensor) -> Tensor:
        v, scale = self.precondition_parts(g)
        return (v if scale is None else v * scale).reshape(g.shape)

    def precondition_parts(
        self, g: Tensor, keep: bool = False, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """``P g`` without the diagonal factor along ``scale_axis``, which is returned as the scale.

        The caller multiplies it with the other factors of the step, which saves a pass over the array.
        """
        matrices: list[tuple[Tensor, int]] = []
        for axis, factor in enumerate(self.factors):
            if isinstance(factor, NearSymmetric) and keep:
                matrices.append((factor.kept_P(), axis))
            elif isinstance(factor, NearSymmetric) and math.prod(self.dims) <= self.dims[axis] ** 2:
                matrices += [(factor.root, axis), (factor.root.mT, axis)]
            elif axis != self.scale_axis:
                matrices.append((factor.P(), axis))
        v = multiply_axes(matrices, shaped(g, (len(g), *self.dims)), out)
        return v, None if self.scale_axis is None else along(self.factors[self.scale_axis].P(), v, self.scale_axis)

    def descend_(
        self,
        tangent: Tangent,
        lr: float | Tensor,
        normalize: Normalization | None = None,
        usable: Tensor | None = None,
    ) -> None:
        """Take the step of ``Pooled.descend_`` for this group alone."""
        everywhere = torch.ones((), dtype=torch.bool, device=tangent.x.device)
        informative = everywhere.expand(len(tangent.x)) if usable is None else usable
        Pooled([self]).descend_([(tangent, informative)], lr, everywhere)

    def flops(self, update_every: int = 1) -> list[float]:
        """FLOPs of each factor in an average step of one block that ``Pooled`` whitens, with c3.

        In a block of N elements, a diagonal factor costs ``3 N`` for a product and a sum of squares, and ``7 n`` for
        its own step. If it is the one along ``scale_axis``, the spectral norm of the step costs ``18 N`` more, for two
        power iterations from two starts, or ``2 N`` if the update of a dense factor without damping has found the
        direction. Between updates, a dense factor costs ``2 n N`` for ``P g``, and once ``2 n³`` to form ``P``.
        """
        numel = math.prod(self.dims)
        between = update_every - 1
        each = []
        for axis, (n, factor) in enumerate(zip(self.dims, self.factors, strict=True)):
            spectrum = 18 * numel if axis == self.scale_axis else 0
            if isinstance(factor, NearSymmetric):
                update = self._flops_of_update(axis)
                precondition = 2 * n**3 * (between > 0) + 2 * n * numel * between
            else:
                finds = spectrum and len(self.dims) == 2 and isinstance(self.factors[1 - axis], NearSymmetric)
                update = 3 * numel + 7 * n + ((2 * (KINDS - 1) * numel + spectrum) / KINDS if finds else spectrum)
                precondition = (numel + n + spectrum) * between
            each.append((update + precondition) / update_every)
        return each

    def _flops_of_update(self, axis: int) -> float:
        """FLOPs of an average update of a dense factor along an axis of length n, for a block of N elements.

        An update with a tangent of n × n numbers costs ``4 n³`` for ``P`` and the step of ``Q``, ``4 n N`` for ``P g``
        and its Gram matrix, and ``4 n²`` for the norm of that. A thin factor with c columns needs ``8 n N`` for
        ``QᵀQ g`` and ``a (aᵀ Q)``, ``2 c N`` for ``aᵀ a``, and ``4 c²`` for the norm of that. One of ``KINDS`` updates
        always forms a tangent of n × n numbers, and costs ``2 n³`` more for the damping and ``2 n³`` for turning ``Q``
        back to symmetry.
        """
        n, numel, thin = self.dims[axis], math.prod(self.dims), self.is_thin(axis)
        c = numel // n
        whole = 4 * n**3 + (6 if thin else 4) * n * numel + 4 * n**2
        usual = 8 * n * numel + 2 * c * numel + 4 * c**2 if thin else whole
        return ((KINDS - 1) * usual + whole + 4 * n**3) / KINDS


@trial("whitening")
def _try_whitening(device: torch.device, dtype: torch.dtype, low: torch.dtype) -> None:
    """Whiten once, so that torch loads its kernels and initialises its libraries in the background; no step waits."""
    Q = InverseFree((64, 64), [NearSymmetric.identity(1, 64, dtype, device) for _ in range(2)])
    usable = torch.ones((), dtype=torch.bool, device=device)
    Pooled([Q]).whiten_([torch.ones(1, 64, 64, dtype=dtype, device=device)], 0.1, 0.0, usable)
