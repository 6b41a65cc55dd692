"""Problems of the panel without networks: functions of few numbers, regressions, and factorisations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Instance:
    """A problem of the panel before the first step.

    Args:
        model: parameters to be found
        loss: training loss of a mini-batch; of an empty one if there are no mini-batches
        value: returns the number that the target is for, without gradients
        batches: endless mini-batches, which depend on the seed alone; None where every step sees the same loss
    """

    model: nn.Module
    loss: Callable[[Batch], Tensor]
    value: Callable[[], float]
    batches: Iterator[Batch] | None = None


class Numbers(nn.Module):
    """Parameters without a network."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(nn.Parameter(tensor) for tensor in tensors)

    def forward(self) -> list[Tensor]:
        return list(self.tensors)


def whole(model: nn.Module, loss: Callable[[], Tensor]) -> Instance:
    """Problem without mini-batches, judged by its loss."""

    @torch.no_grad()
    def value() -> float:
        return float(loss())

    return Instance(model, lambda batch: loss(), value)


def drawn(generator: torch.Generator, *data: Tensor, size: int) -> Iterator[Batch]:
    """Endless mini-batches of rows that are drawn independently."""
    while True:
        picked = torch.randint(len(data[0]), (size,), generator=generator)
        yield tuple(tensor[picked] for tensor in data)


class Normal:
    """Normal numbers in double precision, from a generator of their own."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def rotation(self, size: int) -> Tensor:
        return torch.linalg.qr(self(size, size))[0]


# ---------------------------------------------------------------- functions


def _function(start: Sequence[float], function: Callable[[Tensor], Tensor]) -> Instance:
    model = Numbers(torch.tensor(start, dtype=torch.float64))
    (x,) = model()
    return whole(model, lambda: function(x))


def _rosenbrock(x: Tensor) -> Tensor:
    here, following = x[:-1], x[1:]
    return ((1 - here).square() + 100 * (following - here.square()).square()).sum()


def rosenbrock(seed: int) -> Instance:
    """Narrow curved valley in two dimensions, from the usual start on its far side."""
    return _function((-1.2, 1.0), _rosenbrock)


def chain(seed: int, dimensions: int = 20) -> Instance:
    """Rosenbrock's function of neighbouring pairs, from zero."""
    return _function((0.0,) * dimensions, _rosenbrock)


def beale(seed: int) -> Instance:
    """Plateau with steep walls, from the usual start."""

    def function(x: Tensor) -> Tensor:
        powers = torch.stack([x[1], x[1] ** 2, x[1] ** 3])
        return (torch.tensor([1.5, 2.25, 2.625], dtype=x.dtype) - x[0] * (1 - powers)).square().sum()

    return _function((1.0, 1.0), function)


def quadratic(seed: int, dimensions: int = 50, condition: float = 1e4) -> Instance:
    """Rotated quadratic function whose eigenvalues are spread evenly over four decades."""
    normal = Normal(seed)
    rotation = normal.rotation(dimensions)
    eigenvalues = torch.logspace(0, -torch.tensor(condition).log10().item(), dimensions, dtype=torch.float64)
    H = (rotation * eigenvalues) @ rotation.mT
    model = Numbers(normal(dimensions))
    (x,) = model()
    return whole(model, lambda: 0.5 * x @ H @ x)


# ---------------------------------------------------------------- regressions


def regression(seed: int, features: int = 30, condition: float = 1e4, size: int = 32) -> Instance:
    """Least squares with noise and mini-batches; the covariance of the features is rotated and badly conditioned.

    It is judged by the mean excess of the squared error, which is zero at the true weights.
    """
    normal = Normal(seed)
    scales = torch.logspace(0, -torch.tensor(condition).log10().item() / 2, features, dtype=torch.float64)
    rotation = normal.rotation(features)
    root = (rotation * scales).float()
    true = (rotation / scales @ normal(features) * features**-0.5).float()
    model = Numbers(torch.zeros(features))
    (w,) = model()

    def batches() -> Iterator[Batch]:
        while True:
            x = normal(size, features).float() @ root.T
            yield x, x @ true + 0.1 * normal(size).float()

    @torch.no_grad()
    def value() -> float:
        return float((root.T @ (w - true)).square().sum())

    return Instance(model, lambda batch: (batch[0] @ w - batch[1]).square().mean(), value, batches())


def logistic(seed: int, samples: int = 2000, features: int = 30, size: int = 64) -> Instance:
    """Logistic regression with features in units from 0.01 to 100; judged by the loss of all data over the least."""
    normal = Normal(seed)
    units = torch.logspace(-2, 2, features)[torch.randperm(features, generator=normal.generator)]
    latent = normal(samples, features).float()
    y = torch.bernoulli(torch.sigmoid(latent @ normal(features).float()), generator=normal.generator)
    x = latent * units
    best = _least(latent, y)
    model = Numbers(torch.zeros(features))
    (w,) = model()

    def loss(batch: Batch) -> Tensor:
        return functional.binary_cross_entropy_with_logits(batch[0] @ w, batch[1])

    @torch.no_grad()
    def value() -> float:
        return float(loss((x, y))) - best

    return Instance(model, loss, value, drawn(normal.generator, x, y, size=size))


def _least(x: Tensor, y: Tensor) -> float:
    """Least logistic loss, by Newton's method, which converges from zero for well scaled features."""
    x, y = x.double(), y.double()
    w = x.new_zeros(x.shape[1])
    for _ in range(15):
        p = torch.sigmoid(x @ w)
        H = x.mT @ ((p * (1 - p))[:, None] * x)
        w = w - torch.linalg.solve(H, x.mT @ (p - y))
    return float(functional.binary_cross_entropy_with_logits(x @ w, y))


# ---------------------------------------------------------------- factorisations


def tensor(seed: int, size: int = 12, rank: int = 4) -> Instance:
    """Three-way tensor of known rank, to be found as a sum of outer products; the relative squared error."""
    normal = Normal(seed)

    def product(U: Tensor, V: Tensor, W: Tensor) -> Tensor:
        return ((U[:, None] * V[None]).reshape(-1, rank) @ W.mT).reshape(size, size, size)

    true = product(*(normal(size, rank) for _ in range(3)))
    model = Numbers(*(0.5 * normal(size, rank) for _ in range(3)))
    return whole(model, lambda: (product(*model()) - true).square().sum() / true.square().sum())


def sensing(seed: int, size: int = 16, rank: int = 3, measurements: int = 300, imbalance: float = 10.0) -> Instance:
    """Matrix of low rank from linear measurements; one of its two factors starts large and the other small."""
    normal = Normal(seed)
    A = normal(measurements, size * size)
    y = A @ (normal(size, rank) @ normal(rank, size)).reshape(-1)
    model = Numbers(0.3 * imbalance * normal(size, rank), 0.3 / imbalance * normal(rank, size))
    U, V = model()
    return whole(model, lambda: (A @ (U @ V).reshape(-1) - y).square().sum() / y.square().sum())
