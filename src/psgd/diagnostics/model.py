"""The three properties, and the spectrum of ``PH``, for an optimizer and a closure, without forming a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.distributed import is_dtensor
from ..ops.lanczos import lanczos_quadrature, log_spread, mean_over_spectrum
from ..optimizer import PSGD
from .matrices import Properties, eigenvalue_spread
from .operators import Operators


@dataclass(frozen=True)
class EstimatedProperties(Properties):
    """The three properties, and the standard error of each of them.

    Args:
        standard_error: standard error of each property, from the differences between random vectors. It is zero for
            exact properties, and infinite for a single vector.
    """

    standard_error: Properties

    def __str__(self) -> str:
        """Each property with twice its standard error, beyond which lies a true value in one case of about fifteen."""
        names = Properties.__dataclass_fields__
        return ", ".join(f"{n}: {getattr(self, n):.3g} ± {2 * getattr(self.standard_error, n):.2g}" for n in names)


def model_properties(
    optimizer: PSGD, closure: Callable[[], Tensor], *, probes: int = 8, iterations: int = 64, seed: int = 0
) -> EstimatedProperties:
    """Estimate all three properties for the parameters of an optimizer, by Hessian-vector products instead of matrices.

    Functions of eigenvalues are estimated by stochastic Lanczos quadrature, and ``tr(P²)`` by Hutchinson's estimator.
    The standard errors are estimated by leaving out one random vector at a time (the jackknife). They do not include
    errors from small eigenvalues that this number of Lanczos steps does not resolve; more iterations show whether there
    are any.

    For up to ``probes · iterations`` parameters, the matrices themselves cost no more, so that the result is exact. The
    parameters, their gradients and the optimizer's state are not changed.

    Args:
        optimizer: the optimizer; blocks whose parameters are frozen are left out
        closure: function that returns the loss, always for the same mini-batch, without calling ``backward``
        probes: number of random vectors to average over, each of which costs ``2 · iterations`` products
        iterations: number of Lanczos steps for each random vector
        seed: seed of the random vectors
    """
    _check_counts("model_properties", probes=probes, iterations=iterations)
    operators = Operators(optimizer, closure, "model_properties")
    if operators.size <= probes * iterations:
        return _exact(operators)
    vectors = operators.probes(probes, seed)
    plain = [lanczos_quadrature(operators.H, z, iterations) for z in vectors]
    preconditioned = [lanczos_quadrature(operators.QHQt, z, iterations) for z in vectors]
    squares = [operators.P(z).square().sum() for z in vectors]

    def estimate(some: Sequence[int]) -> Tensor:
        H, PH = ([each[k] for k in some] for each in (plain, preconditioned))
        trace_P2 = torch.stack([squares[k] for k in some]).mean()
        trace_H_2 = mean_over_spectrum(H, lambda eigenvalues: eigenvalues**-2) * operators.size
        return torch.stack([log_spread(H) / log_spread(PH), mean_over_spectrum(PH, torch.abs), trace_H_2 / trace_P2])

    everyone = list(range(probes))
    found = estimate(everyone).tolist()
    errors = [math.inf] * len(found)
    if probes > 1:
        without_one = torch.stack([estimate([k for k in everyone if k != left]) for left in everyone])
        errors = (without_one.std(0, correction=0) * (probes - 1) ** 0.5).tolist()
    return EstimatedProperties(found[0], found[1], found[2], standard_error=Properties(*errors))


def _exact(operators: Operators) -> EstimatedProperties:
    """Properties from matrices, made column by column."""
    columns = list(torch.eye(operators.size, dtype=operators.dtype, device=operators.device))
    H, PH, P = (torch.stack([of(e) for e in columns]) for of in (operators.H, operators.QHQt, operators.P))
    plain, preconditioned = (torch.linalg.eigvalsh((M + M.mT) / 2) for M in (H, PH))
    return EstimatedProperties(
        float(eigenvalue_spread(plain) / eigenvalue_spread(preconditioned)),
        float(preconditioned.abs().mean()),
        float(plain.pow(-2).sum() / P.square().sum()),
        standard_error=Properties(0.0, 0.0, 0.0),
    )


def _check_counts(who: str, **counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: {who} wants a whole number of at least 1")


@dataclass(frozen=True)
class Spectrum:
    """Distribution of the eigenvalues of ``PH``.

    The ``weights`` sum to one. Each tells which share of the eigenvalues is near the corresponding node.
    """

    nodes: Tensor
    weights: Tensor

    def quantile(self, share: float) -> float:
        """Absolute value that this share of the eigenvalues does not exceed."""
        sizes, order = self.nodes.abs().sort()
        below = self.weights[order].cumsum(0)
        return float(sizes[min(int((below < share * (1 - 1e-6)).sum()), len(sizes) - 1)])

    @property
    def negative(self) -> float:
        """The share of negative eigenvalues."""
        return float(self.weights[self.nodes < 0].sum())


def model_spectrum(
    optimizer: PSGD, closure: Callable[[], Tensor], *, probes: int = 4, iterations: int = 32, seed: int = 0
) -> Spectrum:
    """Estimate the spectrum of ``PH`` for the parameters of an optimizer, by stochastic Lanczos quadrature.

    The ends of the estimate are the ends of the true spectrum or lie a little inside it. Like ``model_properties``,
    this function does not change parameters, gradients or state.

    Args:
        optimizer: the optimizer; blocks whose parameters are frozen are left out
        closure: function that returns the loss, always for the same mini-batch, without calling ``backward``
        probes: number of random vectors to average over, each of which costs ``iterations`` products
        iterations: number of Lanczos steps for each random vector
        seed: seed of the random vectors
    """
    _check_counts("model_spectrum", probes=probes, iterations=iterations)
    if any(is_dtensor(p) for p in optimizer.parameters()):
        raise ValueError("optimizer: ranks hold only parts of its parameters; model_spectrum wants whole ones")
    operators = Operators(optimizer, closure, "model_spectrum")
    vectors = operators.probes(probes, seed)
    found = [lanczos_quadrature(operators.QHQt, z, iterations) for z in vectors]
    nodes, weights = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Spectrum(nodes, weights / len(found))
