"""The fitting problem of Section VI.A: random 10×10 Hessians, and pairs of changes with and without noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

#: number of parameters
N = 10
#: signal-to-noise ratio of the noisy gradients: −20 dB
SNR = 0.01


@dataclass(frozen=True)
class Scenario:
    """One row of the paper's Figure 2."""

    definite: bool
    noisy: bool
    variance: float

    def __str__(self) -> str:
        kind = "positive definite" if self.definite else "indefinite"
        return f"{kind}, {'noisy' if self.noisy else 'noise-free'}, $\\sigma_h^2 = 10^{{{self.power}}}$"

    @property
    def power(self) -> int:
        return round(torch.tensor(self.variance).log10().item())


#: scenarios in the order of the rows of the figure
SCENARIOS = [
    Scenario(definite, noisy, variance)
    for definite in (True, False)
    for noisy in (False, True)
    for variance in (1e-12, 1e12)
]


def hessian(scenario: Scenario, generator: torch.Generator, n: int = N) -> Tensor:
    """Symmetric matrix with normal elements of the given variance; made definite by absolute eigenvalues."""
    A = torch.randn(n, n, generator=generator, dtype=torch.float64)
    H = (A + A.mT) / 2**0.5 * scenario.variance**0.5
    if scenario.definite:
        values, vectors = torch.linalg.eigh(H)
        H = vectors * values.abs() @ vectors.mT
    return H


def pairs(H: Tensor, noisy: Tensor, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless pairs ``(δθ, Hδθ + ε)`` for a stack of Hessians: ``δθ ~ N(0, eps)``, and ``ε`` for noisy ones."""
    count, n, _ = H.shape
    size = torch.finfo(H.dtype).eps ** 0.5
    # E‖Hδθ‖² = eps ‖H‖², divided among n elements
    noise = size * torch.linalg.matrix_norm(H) / (n * SNR) ** 0.5 * noisy
    while True:
        dtheta, epsilon = torch.randn(2, count, n, generator=generator, dtype=H.dtype).to(H.device)
        dtheta = dtheta * size
        yield dtheta, (H @ dtheta[..., None])[..., 0] + noise[:, None] * epsilon
