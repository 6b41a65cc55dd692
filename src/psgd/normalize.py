"""Normalisations of the step of ``Q``: the ``‖∇E‖`` in ``Q ← (I − precond_lr / ‖∇E‖ · ∇E) Q``.

Every choice is at least the largest ``|∇E_ii|``, so with ``0 < precond_lr < 1`` the factors ``1 − μ ∇E_ii`` that
multiply the diagonal of ``Q`` stay positive.
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
    """The largest absolute element of ``∇E``: the paper's choice in all of its experiments."""

    def __call__(self, tangent: Projected, /) -> Tensor:
        return tangent.max_abs()


@dataclass(frozen=True)
class MaxDiag:
    """The largest absolute diagonal element of ``∇E``: the paper's second choice, and the cheapest.

    It does not limit elements off the diagonal, which can be large if the diagonal happens to vanish.
    """

    def __call__(self, tangent: Projected, /) -> Tensor:
        return tangent.max_diag()


@dataclass(frozen=True)
class Spectral:
    """The spectral norm of ``S``: the smallest steps, and the only ones that do not grow with the size of ``Q``."""

    def __call__(self, tangent: Projected, /) -> Tensor:
        return tangent.spectral()
