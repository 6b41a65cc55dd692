"""Effect of a preconditioner on a problem: the three properties of Section III.B of the paper.

* *eigenvalue spread gain*: the spread of ``H`` divided by the spread of ``PH``. The spread is the standard deviation of
  the logarithms of the absolute eigenvalues. The gain is 1 for plain SGD; larger is better.
* *mean absolute eigenvalue* of ``PH``: 1 is best, as the learning rate then needs no tuning.
* *noise suppression gain*: ``tr(H⁻²) / tr(P²)``, the energy of the gradient noise after Newton's method divided by
  its energy after preconditioning.

``properties`` computes them exactly for matrices. ``model_properties`` estimates them for an optimizer and a closure
without forming a matrix. The eigenvalues of ``PH`` are those of the symmetric ``Q H Qᵀ`` (Proposition 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import Block
from .ops.distributed import is_dtensor
from .ops.lanczos import lanczos_quadrature, log_spread, mean_over_spectrum
from .ops.real import as_real, from_real
from .optimizer import PSGD
from .probes.closures import evaluate_forward
from .probes.restore import Gradients


@dataclass(frozen=True)
class Properties:
    """The three properties of a preconditioner on a problem."""

    eigenvalue_spread_gain: float
    mean_abs_eigenvalue: float
    noise_suppression_gain: float


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
    operators = _Operators(optimizer, closure, "model_properties")
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


def _exact(operators: _Operators) -> EstimatedProperties:
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
    operators = _Operators(optimizer, closure, "model_spectrum")
    vectors = operators.probes(probes, seed)
    found = [lanczos_quadrature(operators.QHQt, z, iterations) for z in vectors]
    nodes, weights = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Spectrum(nodes, weights / len(found))


class _Operators:
    """``H``, ``P`` and ``Q H Qᵀ`` of a model as functions of one flat vector: the packed blocks of the optimizer."""

    def __init__(self, optimizer: PSGD, closure: Callable[[], Tensor], who: str) -> None:
        self.params = optimizer.parameters()
        self.stacks = [
            stack.select(chosen, torch.tensor(chosen, device=stack.device))
            for stack in optimizer.stacks
            if (chosen := _trainable(stack.blocks, self.params))
        ]
        with torch.enable_grad():
            loss = evaluate_forward(closure, Gradients(self.params), who)
            self.inputs = {i: p for i, p in enumerate(self.params) if p.requires_grad and p.numel() > 0}
            grads = torch.autograd.grad(loss, list(self.inputs.values()), create_graph=True, allow_unused=True)
        self.grads = [g if g is not None and g.requires_grad else None for g in grads]
        self.sizes = [len(stack.blocks) * stack.blocks[0].numel for stack in self.stacks]
        self.size = sum(self.sizes)
        self.dtype, self.device = self.stacks[0].like.dtype, self.stacks[0].device

    def probes(self, count: int, seed: int) -> list[Tensor]:
        """Vectors of random signs, or all unit vectors if there are no more of them than ``count``."""
        if count >= self.size:
            return list(torch.eye(self.size, dtype=self.dtype, device=self.device))
        generator = torch.Generator("cpu").manual_seed(seed)
        signs = torch.randint(0, 2, (count, self.size), generator=generator, device="cpu") * 2 - 1
        return list(signs.to(self.device, self.dtype))

    def _split(self, v: Tensor) -> list[Tensor]:
        return [
            part.reshape(len(stack.blocks), *stack.blocks[0].shape).to(stack.like)
            for stack, part in zip(self.stacks, v.split(self.sizes), strict=True)
        ]

    def _join(self, parts: list[Tensor]) -> Tensor:
        first = self.stacks[0].like
        return torch.cat([part.flatten().to(first) for part in parts])

    def P(self, v: Tensor) -> Tensor:
        parts = zip(self.stacks, self._split(v), strict=True)
        return self._join([stack.group.precondition(part) for stack, part in parts])

    def QHQt(self, v: Tensor) -> Tensor:
        parts = zip(self.stacks, self._split(v), strict=True)
        Hv = self.H(self._join([stack.group.apply_t(part) for stack, part in parts]))
        parts = zip(self.stacks, self._split(Hv), strict=True)
        return self._join([stack.group.apply(part) for stack, part in parts])

    def H(self, v: Tensor) -> Tensor:
        vectors = {
            i: part
            for stack, stacked in zip(self.stacks, self._split(v), strict=True)
            for i, part in stack.unpack(stacked)
        }
        used = [
            (g, from_real(vectors[i].to(as_real(g).dtype).contiguous(), g))
            for i, g in zip(self.inputs, self.grads, strict=True)
            if g is not None
        ]
        products = torch.autograd.grad(
            [g for g, _ in used],
            list(self.inputs.values()),
            [u for _, u in used],
            retain_graph=True,
            allow_unused=True,
        )
        found = {i: p.detach() for i, p in zip(self.inputs, products, strict=True) if p is not None}
        return self._join([stack.pack(found) for stack in self.stacks])


def _trainable(blocks: Sequence[Block], params: Sequence[Tensor]) -> list[int]:
    """Indices of trainable blocks; raise if only some parameters of one are, as then only a part of ``P`` would act."""
    chosen = []
    for b, block in enumerate(blocks):
        trainable = [params[i].requires_grad for i in block.params]
        if all(trainable):
            chosen.append(b)
        elif any(trainable):
            raise ValueError(
                f"optimizer: a block of shape {block.shape} has trainable and frozen parameters; model_properties "
                "wants blocks of one kind, as PerTensor() makes them"
            )
    return chosen
