"""The optimal ``P`` of each criterion in closed form, computed from covariances. Fitting converges to this ``P``.

All three functions have the same three arguments, so that one can replace another:

>>> import torch
>>> from psgd import closed_form
>>> H = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
>>> dtheta = torch.randn(1000, 2)
>>> P = closed_form.c3(*closed_form.covariances(dtheta, dtheta @ H))
>>> torch.allclose(P @ H, torch.eye(2), atol=1e-3)
True
"""

from __future__ import annotations

import torch
from torch import Tensor


def covariances(dtheta: Tensor, dgrad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``R_θ = E[δθ δθᵀ]``, ``R_g = E[δg δgᵀ]`` and ``R_θg = E[δθ δgᵀ]``, from matrices with one sample in each row."""
    if dtheta.ndim != 2 or dtheta.shape != dgrad.shape:
        raise ValueError(
            f"dtheta of shape {tuple(dtheta.shape)}, dgrad of shape {tuple(dgrad.shape)}: "
            "covariances wants two matrices of one shape, a sample in each row"
        )
    count = dtheta.shape[0]
    return dtheta.mT @ dtheta / count, dgrad.mT @ dgrad / count, dtheta.mT @ dgrad / count


def c1(R_theta: Tensor, R_g: Tensor, R_theta_g: Tensor) -> Tensor:
    """The ``P`` that minimises ``E‖δg − P⁻¹δθ‖²``; ``P⁻¹`` solves ``R_θ P⁻¹ + P⁻¹ R_θ = R_θg + R_gθ``.

    This ``P`` is not positive definite if the Hessian is not. ``R_g`` is not used. There is no such ``P`` if ``R_θ`` is
    singular, because any curvature fits a direction in which ``θ`` never changes. There is also none if the solution
    ``P⁻¹`` is singular, because ``P`` would be infinite in a direction without curvature.
    """
    values, U = _eigen(R_theta, "R_theta")
    _check_regular(values, "R_theta", "c1", "θ never changes in some direction, and any curvature fits there")
    inverse = _lyapunov(values, U, R_theta_g + R_theta_g.mT)
    values, U = _eigen(inverse, "R_theta_g", definite=False)
    _check_regular(values, "R_theta_g", "c1", "there is no curvature in some direction, and P would be infinite there")
    return U / values @ U.mT


def c2(R_theta: Tensor, R_g: Tensor, R_theta_g: Tensor) -> Tensor:
    """The ``P`` that minimises ``E‖Pδg − δθ‖²``; it solves ``R_g P + P R_g = R_gθ + R_θg``.

    This ``P`` is not positive definite if the Hessian is not. ``R_θ`` is not used. If ``R_g`` is singular, gradients
    never change in some directions, and many ``P`` are optimal. The function then returns the smallest of them, which
    is zero between such directions. It is the limit for gradients with less and less white noise.
    """
    return _lyapunov(*_eigen(R_g, "R_g"), R_theta_g + R_theta_g.mT)


def c3(R_theta: Tensor, R_g: Tensor, R_theta_g: Tensor | None = None) -> Tensor:
    """The ``P`` that minimises ``E[δgᵀPδg + δθᵀP⁻¹δθ]``, the positive definite solution of ``P R_g P = R_θ``.

    See Proposition 3 of the paper. With ``R_g^½ R_θ R_g^½ = U D Uᵀ``, the solution is ``R_g^(−½) U D^½ Uᵀ R_g^(−½)``,
    the geometric mean of ``R_g⁻¹`` and ``R_θ``. ``R_θg`` is not used. If ``R_θ`` is singular, so is ``P``: in a
    direction in which ``θ`` never changes, the criterion falls as ``P`` becomes smaller, and the function returns the
    limit. If ``R_g`` is singular, there is no limit: in a direction in which gradients never change, the criterion
    falls as ``P`` becomes larger.
    """
    values, V = _eigen(R_g, "R_g")
    _check_regular(values, "R_g", "c3", "gradients never change in some direction, and P would be infinite there")
    root, inverse_root = V * values.sqrt() @ V.mT, V * values.rsqrt() @ V.mT
    theirs, _ = _eigen(R_theta, "R_theta")
    D, U = torch.linalg.eigh(root @ R_theta @ root)
    D[: int((theirs <= _rounding(theirs)).sum())] = 0  # as many as R_θ has; their roots would not be small
    half = inverse_root @ U
    return half * D.clamp_min(0).sqrt() @ half.mT


def _lyapunov(values: Tensor, U: Tensor, C: Tensor) -> Tensor:
    """The smallest ``X`` with ``A X + X A = C``, ``A = U diag(λ) Uᵀ``: ``X_ij = C_ij / (λ_i + λ_j)`` for its vectors.

    If ``λ_i = λ_j = 0``, then ``C_ij = 0`` for covariances, and ``X_ij`` is zero.
    """
    sums = values[:, None] + values[None, :]
    C = U.mT @ C @ U
    zero = sums <= 2 * _rounding(values)
    if bool((C[zero].abs() > torch.finfo(C.dtype).eps ** 0.5 * C.abs().max()).any()):
        raise ValueError("R_theta_g: nonzero where the other covariance is zero; covariances of samples never are")
    return U @ torch.where(zero, 0.0, C / torch.where(zero, 1.0, sums)) @ U.mT


def _eigen(R: Tensor, name: str, definite: bool = True) -> tuple[Tensor, Tensor]:
    """Eigenvalues and vectors of a symmetric matrix, which has no negative eigenvalues where it is a covariance."""
    if R.ndim != 2 or R.shape[0] != R.shape[1]:
        raise ValueError(f"{name} of shape {tuple(R.shape)}: closed forms want a square matrix")
    if not bool(torch.isfinite(R).all()):
        raise ValueError(f"{name}: it is not finite; closed forms want covariances of finite samples")
    values, U = torch.linalg.eigh((R + R.mT) / 2)
    symmetric = bool((R - R.mT).abs().max() <= torch.finfo(R.dtype).eps ** 0.5 * R.abs().max())
    if definite and not (symmetric and values[0] >= -_rounding(values)):
        raise ValueError(f"{name}: it is not symmetric and positive semidefinite; closed forms want covariances")
    return values, U


def _rounding(values: Tensor) -> Tensor:
    """Size of eigenvalues that rounding cannot tell from zero."""
    return len(values) * torch.finfo(values.dtype).eps * values.abs().max()


def _check_regular(values: Tensor, name: str, who: str, why: str) -> None:
    if bool(values.abs().min() <= _rounding(values)):
        raise ValueError(
            f"{name}: it is singular to working precision: {why}; {who} wants more samples than parameters, a "
            "multiple of the identity added, or float64"
        )
