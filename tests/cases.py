"""The structures, criteria and problems that are tested, by the laws of tests/laws and by others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import psgd
from psgd import (
    PSGD,
    Dense,
    Diagonal,
    FiniteDifference,
    HessianVector,
    Kronecker,
    LimitedMemory,
    LowRank,
    MaxAbs,
    MaxDiag,
    Spectral,
    Whitening,
)
from psgd.groups import Factor, Group, Structure
from psgd.groups.low_rank import LowRankFactor


@dataclass(frozen=True)
class Case:
    """A structure, and the shape of a block."""

    structure: Structure
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.structure}-{'x'.join(map(str, self.shape))}"

    def group(self, batch: int = 1, dtype: torch.dtype = torch.float64, seed: int = 0) -> Group:
        """Return a stack of random elements."""
        group = self.structure.init(self.shape, batch=batch, dtype=dtype, device="cpu")
        group.random_(torch.Generator().manual_seed(seed))
        return group

    @property
    def template(self) -> Group:
        """Group that tells what it is made of, without numbers."""
        return self.structure.init(self.shape, dtype=torch.float64, device="meta")

    @property
    def left(self) -> bool:
        """Whether steps are ``dQ = E Q``: those of inverse-free factors are not."""
        return self.template.left

    @property
    def one_group(self) -> bool:
        """Whether its matrices are one group in which steps are ``dQ = E Q``: ``LowRank`` moves within three."""
        return self.left and self.template.one_group

    def vectors(self, count: int = 1, batch: int = 1, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(count, batch, *self.shape, generator=generator, dtype=dtype)


#: the paper's Kronecker factors
TRIANGULAR = Kronecker(inverse_free=False)
#: every structure, with shapes of blocks that show all of it. A new structure is one more line here.
SHAPES: dict[Structure, list[tuple[int, ...]]] = {
    Dense(): [(5,), (2, 3), (150,)],
    LimitedMemory(3): [(7,), (3, 4)],
    LowRank(2): [(7,), (2, 3), (4,)],
    Diagonal(): [(6,), (2, 3)],
    TRIANGULAR: [(1,), (6,), (4, 3), (1, 5, 1), (2, 3, 4), (2, 2, 3, 2), (290, 2)],
    Kronecker(): [(1,), (6,), (4, 3), (1, 5, 1), (2, 3, 4), (2, 2, 3, 2), (300,)],
    Kronecker(max_dense=4): [(5, 3), (3, 7), (5, 2, 6)],
}
STRUCTURES = list(SHAPES)
CASES = [
    *(Case(structure, shape) for structure, shapes in SHAPES.items() for shape in shapes),
    Case(LimitedMemory(9), (4,)),
    Case(LowRank(1), (9,)),
    Case(LowRank(3), (150,)),
    Case(Kronecker(max_dense=3, inverse_free=False), (5, 3)),
    Case(Kronecker(max_dense=0, inverse_free=False), (3, 4)),
    Case(Kronecker(max_dense=0), (3, 4)),
]
CRITERIA = [psgd.c1, psgd.c2, psgd.c3]
NORMALIZATIONS = [MaxAbs(), MaxDiag(), Spectral()]
PROBES = [FiniteDifference(), HessianVector(), Whitening()]

#: cases whose steps are ``dQ = E Q``
cases = pytest.mark.parametrize("case", [case for case in CASES if case.left], ids=str)
criteria = pytest.mark.parametrize("criterion", CRITERIA, ids=lambda c: c.__name__)
normalizations = pytest.mark.parametrize("normalize", NORMALIZATIONS, ids=str)
structures = pytest.mark.parametrize("structure", STRUCTURES, ids=str)
probes = pytest.mark.parametrize("probe", PROBES, ids=lambda p: type(p).__name__)


def scale_(factor: Factor, by: float) -> None:
    """``Q ← by · Q``; of a change of low rank the diagonal has the scale."""
    buffers = factor.buffers()
    for name in ["diag"] if isinstance(factor, LowRankFactor) else buffers:
        buffers[name].mul_(by)


def small_model(dtype: torch.dtype = torch.float32, dropout: float = 0.0, seed: int = 0) -> nn.Module:
    generator_state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    torch.set_rng_state(generator_state)
    return model.to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    y = (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3]
    return x.to(dtype), y.to(dtype)


def train(
    model: nn.Module, optimizer: PSGD, first: int, last: int, after: Callable[[int], None] = lambda step: None
) -> list[float]:
    """Train by whatever closure the optimizer's probe wants; the mini-batches depend on the step alone."""
    losses = []
    dtype = next(model.parameters()).dtype
    for step in range(first, last):
        x, y = batch(step, dtype)

        def loss_of(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss: Tensor = ((model(x) - y) ** 2).mean()
            return loss

        def backward_closure(loss_of: Callable[[], Tensor] = loss_of) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            return loss

        if optimizer.probe.forward_only:
            loss = optimizer.step(loss_of)
        elif not optimizer.probe.needs_closure:
            loss = backward_closure()
            optimizer.step()
        else:
            loss = optimizer.step(backward_closure)
        losses.append(loss.item())
        after(step)
    return losses
