"""The three criteria of the paper, each as a function from ``Q`` and a pair ``(δθ, δg)`` to a tangent.

With ``a = Q δg`` and ``b = Q⁻ᵀ δθ``, or their counterparts in other coordinates of a group, the relative gradient of
each criterion is ``∇E = 2 project(x yᵀ + y xᵀ)``, where ``project`` is the projection onto the Lie algebra of the
group of ``Q``. A criterion therefore only defines ``x`` and ``y``, and does not depend on the group.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .groups.base import Group
from .tangent import Tangent, largest


class Criterion(Protocol):
    """Function ``(Q, δθ, δg) → (x, y)``; all arrays have the shape ``(B, *dims)`` of the blocks of ``Q``."""

    def __call__(self, Q: Group, dtheta: Tensor, dgrad: Tensor, /) -> Tangent: ...


# `del` below frees an array as soon as it has been used, as each is as large as the parameters.


def c1(Q: Group, dtheta: Tensor, dgrad: Tensor, /) -> Tangent:
    """Fit the secant equation ``δg = P⁻¹ δθ`` by minimising ``E‖δg − P⁻¹δθ‖²``.

    The optimal ``P`` is the inverse of a positive definite Hessian, even if this inverse amplifies noise.
    """
    e1 = dgrad - Q.solve(Q.solve_t(dtheta))
    del dgrad
    return Tangent(Q.b(dtheta), Q.b(e1))


def c2(Q: Group, dtheta: Tensor, dgrad: Tensor, /) -> Tangent:
    """Fit the secant equation in the other direction, ``P δg = δθ``, by minimising ``E‖P δg − δθ‖²``."""
    e2 = Q.precondition(dgrad) - dtheta
    del dtheta
    return Tangent(Q.a(dgrad), Q.a(e2))


def c3(Q: Group, dtheta: Tensor, dgrad: Tensor, /) -> Tangent:
    """Match the size of preconditioned gradient changes to the size of parameter changes: the paper's criterion.

    It minimises ``E[δgᵀPδg + δθᵀP⁻¹δθ]``, whose tangent is ``a aᵀ − b bᵀ``. It does not depend on the signs of
    curvatures.
    """
    a = Q.a(dgrad)
    del dgrad
    b = Q.b(dtheta)
    del dtheta
    return Tangent((a - b).mul_(0.5), a.add_(b), is_difference=True)


#: criteria that are fitted without solving linear equations, which would make a GPU wait for the host
WITHOUT_SOLVES = frozenset([c2, c3])
#: criteria that fit the secant equation between ``δθ`` and ``δg``; white noise and a gradient do not satisfy one
OF_SECANTS: frozenset[Criterion] = frozenset([c1, c2])
#: criteria whose expectation over white noise ``δθ`` has a closed form, so that whitening needs no random numbers
IN_EXPECTATION = frozenset([c3])


def misfit(criterion: Criterion, Q: Group, dtheta: Tensor, dgrad: Tensor) -> Tensor:
    """Measure how far one pair is from satisfying a criterion: one number for each block, independent of any scale.

    For ``c1`` and ``c2``, the misfit is the relative error of their secant equations. For ``c3``, which requires sizes
    to agree, and for criteria of users, it is ``|ln(‖a‖² / ‖b‖²)|``.

    Every group contains the scalings, so the optimum of ``c3`` has ``E‖a‖² = E‖b‖²``. If this optimum is ``P = |H|⁻¹``,
    then ``‖a‖ = ‖b‖`` for every pair. Before the optimum is reached, a few directions with too large a curvature make
    up most of ``‖a‖²``, so that it varies from pair to pair even if its mean is right. The misfit therefore falls while
    ``Q`` learns the scale, and continues to fall while ``Q`` learns the shape.
    """
    if criterion is c1:
        return _relative(dgrad - Q.solve(Q.solve_t(dtheta)), dgrad)
    if criterion is c2:
        return _relative(Q.precondition(dgrad) - dtheta, dtheta)
    return 2 * (log_length(Q.a(dgrad)) - log_length(Q.b(dtheta))).abs()


def _relative(error: Tensor, of: Tensor) -> Tensor:
    return (log_length(error) - log_length(of)).exp()


def log_length(v: Tensor) -> Tensor:
    """``ln ‖v‖`` of each block of a stack, also if squares would overflow or underflow."""
    dtype = torch.promote_types(v.dtype, torch.float32)
    size = largest(v).to(dtype)
    unit = v.to(dtype) / torch.where(size > 0, size, 1.0).view(-1, *[1] * (v.ndim - 1))
    return size.log() + torch.linalg.vector_norm(unit.flatten(1), dim=1).log().clamp_min(0)
