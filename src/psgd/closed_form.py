"""The optimal ``P`` of each criterion in closed form, from covariances: what fitting converges to.

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
    """``R_θ = E[δθ δθᵀ]``, ``R_g = E[δg δgᵀ]`` and ``R_θg = E[δθ δgᵀ]`` from samples, one in each row."""
    if dtheta.ndim != 2 or dtheta.shape != dgrad.shape:
        raise ValueError(
            f"dtheta of shape {tuple(dtheta.shape)}, dgrad of shape {tuple(dgrad.shape)}: "
            "covariances wants two matrices of one shape, a sample in each row"
        )
    count = dtheta.shape[0]
    return dtheta.mT @ dtheta / count, dgrad.mT @ dgrad / count, dtheta.mT @ dgrad / count


def c1(R_theta: Tensor, R_g: Tensor, R_theta_g: Tensor) -> Tensor:
    """The ``P`` of ``E‖δg − P⁻¹δθ‖²``: the inverse of the solution of ``R_θ P⁻¹ + P⁻¹ R_θ = R_θg + R_gθ``.

    It is not positive definite if the Hessian is not; ``R_g`` is not used.
    """
    return torch.linalg.inv(_lyapunov(R_theta, R_theta_g + R_theta_g.mT))


def c2(R_theta: Tensor, R_g: Tensor, R_theta_g: Tensor) -> Tensor:
    """The ``P`` of ``E‖Pδg − δθ‖²``: it solves ``R_g P + P R_g = R_gθ + R_θg``.

    It is not positive definite if the Hessian is not; ``R_θ`` is not used.
    """
    return _lyapunov(R_g, R_theta_g + R_theta_g.mT)


def c3(R_theta: Tensor, R_g: Tensor, R_theta_g: Tensor | None = None) -> Tensor:
    """The ``P`` of ``E[δgᵀPδg + δθᵀP⁻¹δθ]`` (Proposition 3): the positive definite solution of ``P R_g P = R_θ``.

    With ``R_θ^½ R_g R_θ^½ = U D Uᵀ`` it is ``R_θ^½ U D^(−½) Uᵀ R_θ^½``, the geometric mean of ``R_g⁻¹`` and ``R_θ``;
    ``R_θg`` is not used.
    """
    values, vectors = torch.linalg.eigh(R_theta)
    root = vectors * values.sqrt() @ vectors.mT
    D, U = torch.linalg.eigh(root @ R_g @ root)
    half = root @ U
    return half * D.rsqrt() @ half.mT


def _lyapunov(A: Tensor, C: Tensor) -> Tensor:
    """Solve ``A X + X A = C`` for a positive definite ``A``: in its eigenvectors, ``X_ij = C_ij / (λ_i + λ_j)``."""
    values, U = torch.linalg.eigh(A)
    return U @ (U.mT @ C @ U / (values[:, None] + values[None, :])) @ U.mT
