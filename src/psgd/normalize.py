"""Normalisations of the step of ``Q``: the ``‖∇E‖`` in ``Q ← (I − precond_lr / ‖∇E‖ · ∇E) Q``.

Every normalisation is at least the largest ``|∇E_ii|``. If ``0 < precond_lr < 1``, the factors ``1 − μ ∇E_ii`` that
multiply the diagonal of ``Q`` therefore stay positive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Projected(Protocol):
    """Projection of the tangent ``S`` onto a group, with its three norms, each of shape ``(B,)``."""

    def diagonal(self) -> Tensor: ...
    def max_abs(self) -> Tensor: ...
    def max_diag(self) -> Tensor: ...
    def spectral(self) -> Tensor: ...


class Normalization(Protocol):
    """Function from a projected tangent to one positive number for each block."""

    def __call__(self, tangent: Projected, /) -> Tensor: ...


@dataclass(frozen=True)
class MaxAbs:
    """Divide by the largest absolute element of ``∇E``, as the paper does in all of its experiments."""

    def __call__(self, tangent: Projected, /) -> Tensor:
        return tangent.max_abs()


@dataclass(frozen=True)
class MaxDiag:
    """Divide by the largest absolute diagonal element of ``∇E``, the paper's second choice and the cheapest one.

    This norm does not limit the off-diagonal elements, which can be large if the diagonal happens to vanish.
    """

    def __call__(self, tangent: Projected, /) -> Tensor:
        return tangent.max_diag()


@dataclass(frozen=True)
class Spectral:
    """Divide by the spectral norm of ``S``.

    The steps of ``Q`` are the smallest of the three, and the only ones that do not grow with the size of ``Q``.
    """

    def __call__(self, tangent: Projected, /) -> Tensor:
        return tangent.spectral()
