"""Lanczos quadrature: the spectrum of a symmetric linear map that is never formed as a matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LinearMap = Callable[[Tensor], Tensor]


def lanczos_quadrature(A: LinearMap, z: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights with ``zᵀ f(A) z / zᵀz ≈ Σ weight · f(node)`` for a symmetric ``A``.

    They are exact for polynomials ``f`` of a degree below twice the number of iterations. Every new vector is made
    orthogonal to all earlier ones, twice, as rounding would otherwise bring back eigenvalues already found.
    """
    basis = [z / torch.linalg.vector_norm(z)]
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    for _ in range(min(iterations, z.numel())):
        w = A(basis[-1])
        diagonal.append(basis[-1] @ w)
        V = torch.stack(basis)
        for _ in range(2):
            w = w - V.mT @ (V @ w)
        length = torch.linalg.vector_norm(w)
        scale = torch.stack(diagonal).abs().max()
        if not length > 10 * torch.finfo(z.dtype).eps * scale:
            break
        beside.append(length)
        basis.append(w / length)
    beside = beside[: len(diagonal) - 1]
    T = torch.diag(torch.stack(diagonal))
    if beside:
        T = T + torch.diag(torch.stack(beside), 1) + torch.diag(torch.stack(beside), -1)
    nodes, vectors = torch.linalg.eigh(T)
    return nodes, vectors[0].square()


def mean_over_spectrum(quadratures: list[tuple[Tensor, Tensor]], f: LinearMap) -> Tensor:
    """Estimate of ``tr f(A) / n``: the mean over quadratures from random vectors ``z``."""
    return torch.stack([(weights * f(nodes)).sum() for nodes, weights in quadratures]).mean()


def log_spread(quadratures: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Standard deviation of the logarithms of absolute eigenvalues."""
    mean = mean_over_spectrum(quadratures, lambda nodes: nodes.abs().log())
    variance = mean_over_spectrum(quadratures, lambda nodes: (nodes.abs().log() - mean).square())
    return variance.sqrt()
