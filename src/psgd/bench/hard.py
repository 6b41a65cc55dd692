"""Problems that are hard in a known way: a curved valley, a large condition, a tensor of low rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

#: mini-batch of problems without data: every step sees the same loss
WHOLE: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Start:
    """A problem before the first step.

    Args:
        params: parameters to be found
        data: a mini-batch for every step
        loss: loss of a mini-batch
        judge: returns the number that the target is for
    """

    params: list[Tensor]
    data: Iterator[tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    judge: Callable[[], float]


def _whole(params: list[Tensor], loss: Callable[[], Tensor], best: float = 0.0) -> Start:
    """Problem without mini-batches, judged by the difference of its loss to the best one."""

    @torch.no_grad()
    def judge() -> float:
        return float(loss()) - best

    return Start(params, repeat(WHOLE), loss, judge)


def start_rosenbrock(device: str, seed: int, dimensions: int = 2) -> Start:
    """Narrow curved valley; in two dimensions it starts on the far side."""
    theta = torch.zeros(dimensions, dtype=torch.float64)
    if dimensions == 2:
        theta += torch.tensor([-1.0, 1.0], dtype=torch.float64)
    theta = theta.to(device).requires_grad_()

    def loss() -> Tensor:
        here, following = theta[:-1], theta[1:]
        return ((1 - here).square() + 100 * (following - here.square()).square()).sum()

    return _whole([theta], loss)


def start_logistic(device: str, seed: int, samples: int = 1000, features: int = 50) -> Start:
    """Logistic regression with a rotated covariance of condition 1e6; all directions are equally informative."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scales = torch.logspace(0, -3, features, dtype=torch.float64)
    rotation, _ = torch.linalg.qr(normal(features, features))
    latent = normal(samples, features)
    x = ((latent * scales) @ rotation).to(device)
    y = torch.bernoulli(torch.sigmoid(latent.sum(1) * features**-0.5 * 3), generator=generator).to(device)
    w = torch.zeros(features, dtype=torch.float64, device=device, requires_grad=True)

    def loss() -> Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(x @ w, y)

    return _whole([w], loss, best=_newton(x, y))


@torch.no_grad()
def _newton(x: Tensor, y: Tensor, iterations: int = 30) -> float:
    """Least logistic loss, by Newton's method with steps that are halved as long as the loss rises."""
    w = x.new_zeros(x.shape[1])

    def loss(w: Tensor) -> float:
        return float(torch.nn.functional.binary_cross_entropy_with_logits(x @ w, y))

    for _ in range(iterations):
        p = torch.sigmoid(x @ w)
        H = x.mT @ ((p * (1 - p))[:, None] * x) / len(x)
        step = torch.linalg.lstsq(H, (x.mT @ (p - y) / len(x))[:, None]).solution[:, 0]
        length = 1.0
        while length > 1e-6 and loss(w - length * step) > loss(w):
            length /= 2
        w = w - length * step
    return loss(w)


def start_tensor(device: str, seed: int, size: int = 30, rank: int = 10) -> Start:
    """Tensor of known rank, to be found as a sum of outer products from another random start."""
    generator = torch.Generator().manual_seed(seed)

    def factors() -> list[Tensor]:
        return [torch.randn(size, rank, generator=generator, dtype=torch.float64).to(device) for _ in range(3)]

    def product(U: Tensor, V: Tensor, W: Tensor) -> Tensor:
        return ((U[:, None] * V[None]).reshape(-1, rank) @ W.mT).reshape(size, size, size)

    true = product(*factors())
    found = [factor.requires_grad_() for factor in factors()]

    def loss() -> Tensor:
        return (product(*found) - true).square().sum() / true.square().sum()

    return _whole(found, loss)
