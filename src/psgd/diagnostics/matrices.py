"""The three properties of a preconditioner, exactly, from the matrices ``P`` and ``H``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Properties:
    """The three properties of a preconditioner on a problem."""

    eigenvalue_spread_gain: float
    mean_abs_eigenvalue: float
    noise_suppression_gain: float


def preconditioned_eigenvalues(P: Tensor, H: Tensor) -> Tensor:
    """The eigenvalues of ``PH`` in ascending order; all are real and have the signs of those of ``H`` (Proposition 1).

    >>> import torch
    >>> H = torch.tensor([[-1.5, -2.5], [-2.5, -1.5]])  # Figure 1 of the paper
    >>> preconditioned_eigenvalues(torch.tensor([[1.25, -0.75], [-0.75, 1.25]]), H)
    tensor([-2.,  2.])
    """
    _check_symmetric("P", P)
    _check_symmetric("H", H)
    Q, failed = torch.linalg.cholesky_ex(P, upper=True)
    if bool(failed):
        raise ValueError("P: it is not positive definite; a preconditioner QᵀQ with a regular Q is")
    return torch.linalg.eigvalsh(Q @ H @ Q.mT)


def _check_symmetric(name: str, M: Tensor) -> None:
    """Raise unless a matrix is symmetric but for rounding: functions of torch would read one of its halves only."""
    if M.ndim != 2 or M.shape[0] != M.shape[1]:
        raise ValueError(f"{name} of shape {tuple(M.shape)}: diagnostics want a square matrix")
    if not bool((M - M.mT).abs().max() <= torch.finfo(M.dtype).eps ** 0.5 * M.abs().max()):
        raise ValueError(
            f"{name}: it is not symmetric, or not finite; diagnostics want a symmetric matrix, as a Hessian is"
        )


def eigenvalue_spread(eigenvalues: Tensor) -> Tensor:
    """The standard deviation of the logarithms of the absolute eigenvalues."""
    return eigenvalues.abs().log().std(correction=0)


def eigenvalue_spread_gain(P: Tensor, H: Tensor) -> Tensor:
    """The eigenvalue spread of ``H`` divided by that of ``PH``: 1 for plain SGD; larger is better."""
    _check_symmetric("H", H)
    return eigenvalue_spread(torch.linalg.eigvalsh(H)) / eigenvalue_spread(preconditioned_eigenvalues(P, H))


def mean_abs_eigenvalue(P: Tensor, H: Tensor) -> Tensor:
    """The mean of the absolute eigenvalues of ``PH``: 1 is best, as the learning rate then needs no tuning."""
    return preconditioned_eigenvalues(P, H).abs().mean()


def noise_suppression_gain(P: Tensor, H: Tensor, noise: Tensor | None = None) -> Tensor:
    """``tr(H⁻² R) / tr(P² R)`` for gradient noise with covariance ``R``; by default the noise is white."""
    _check_symmetric("P", P)
    _check_symmetric("H", H)
    R = torch.eye(H.shape[0], dtype=H.dtype, device=H.device) if noise is None else noise
    H_inverse, failed = torch.linalg.inv_ex(H)
    if bool(failed):
        raise ValueError("H: it is singular; noise is suppressed relative to Newton's method, which wants its inverse")
    return (H_inverse @ H_inverse @ R).trace() / (P @ P @ R).trace()


def properties(P: Tensor, H: Tensor) -> Properties:
    """Compute all three properties exactly for a positive definite ``P`` and a nonsingular symmetric ``H``."""
    return Properties(
        float(eigenvalue_spread_gain(P, H)), float(mean_abs_eigenvalue(P, H)), float(noise_suppression_gain(P, H))
    )
