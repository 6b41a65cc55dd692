"""The zebra stripes of Section VI.C: a small classification problem with sharp, interleaved, curved boundaries.

The module has data, network, loss, and the judgement of a network. Everything random is drawn from one
generator, first the weights and then the mini-batches, so two runs from one seed differ in the optimizer alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .layers import linear

#: number of points in a mini-batch
BATCH = 100
#: number of nodes in the hidden layer
HIDDEN = 100
#: number of points along each side of the grid on which errors are counted
GRID = 200


def label(x: Tensor) -> Tensor:
    """The class, 0 or 1, of points ``(…, 2)``.

    The paper prints ``mod[round(10^x₁ − 10^x₂) / 2]``, "modulus after division": the remainder of the rounded
    difference after division by 2. So the class changes wherever the difference passes a half-integer.

    >>> label(torch.tensor([[0.0, 0.0], [0.3, 0.0], [0.0, 0.3], [1.0, 0.0]]))
    tensor([0., 1., 1., 1.])
    """
    powers = 10**x
    return (powers[..., 0] - powers[..., 1]).round().remainder(2)


def batches(generator: torch.Generator, size: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    """Points, uniform in the unit square, with their classes: always new ones, so there is nothing to overfit."""
    while True:
        x = torch.rand(size, 2, generator=generator, dtype=torch.float64)
        yield x, label(x)


def grid(points: int) -> Tensor:
    """The centres of ``points × points`` equal squares, ``(points, points, 2)``: x₁ along a row, x₂ down a column."""
    line = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    x2, x1 = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([x1, x2], dim=-1)


class Network(nn.Module):
    """Two layers, 2 to ``hidden`` to 1, with tanh between them: 401 parameters in the paper's size.

    Its input are points of the unit square, and its output is the logarithm of the odds of class 1.
    """

    def __init__(self, generator: torch.Generator, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.hidden = linear(2, hidden, generator)
        self.output = linear(hidden, 1, generator)

    def forward(self, x: Tensor) -> Tensor:
        normalized = (x - 0.5) * 12**0.5  # to mean 0 and variance 1: the uniform distribution has variance 1/12
        logits: Tensor = self.output(torch.tanh(self.hidden(normalized)))
        return logits.squeeze(-1)


def start(seed: int) -> tuple[Network, Iterator[tuple[Tensor, Tensor]]]:
    """A new network and the mini-batches to train it with: the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return Network(generator), batches(generator)


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Logistic cross entropy."""
    return nn.functional.binary_cross_entropy_with_logits(model(x), y)


@torch.no_grad()
def probability(model: nn.Module, points: int) -> Tensor:
    """Probability of class 1 at the points of the grid, as the network has learned it."""
    return torch.sigmoid(model(grid(points)))


def error_rate(model: nn.Module, points: int = GRID) -> float:
    """Share of the grid where the more probable class is the wrong one."""
    wrong = (probability(model, points) > 0.5) != label(grid(points)).bool()
    return float(wrong.double().mean())
