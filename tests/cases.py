"""The structures, criteria and problems that the laws are tested on. A new structure is one more row here."""

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
    structure: Structure
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.structure}-{'x'.join(map(str, self.shape))}"

    def group(self, batch: int = 1, dtype: torch.dtype = torch.float64, seed: int = 0) -> Group:
        """A stack of random elements: positive diagonals, and where there is room, anything beside them."""
        group = self.structure.init(self.shape, batch=batch, dtype=dtype, device="cpu")
        generator = torch.Generator().manual_seed(seed)
        for factor in group.factors:
            n = factor.diagonal().shape[-1]
            noise = torch.randn(batch, n, n, generator=generator, dtype=dtype) / n**0.5
            for name, buffer in factor.buffers().items():
                if name == "full" or name == "Q11":
                    buffer.copy_(noise[:, : buffer.shape[1], : buffer.shape[2]].triu(1))
                elif name in ("Q12", "U", "V"):
                    buffer.copy_(noise[:, : buffer.shape[1], : buffer.shape[2]])
            factor.set_diagonal_(torch.rand(batch, n, generator=generator, dtype=dtype) + 0.5)
        return group

    def vectors(self, count: int = 1, batch: int = 1, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(count, batch, *self.shape, generator=generator, dtype=dtype)


#: the paper's Kronecker factors; inverse-free ones have laws of their own in test_inverse_free.py
TRIANGULAR = Kronecker(inverse_free=False)
CASES = [
    Case(Dense(), (5,)),
    Case(Dense(), (2, 3)),
    Case(Dense(), (150,)),
    Case(LimitedMemory(2), (7,)),
    Case(LimitedMemory(3), (3, 4)),
    Case(LimitedMemory(9), (4,)),
    Case(LowRank(1), (7,)),
    Case(LowRank(2), (2, 3)),
    Case(LowRank(3), (150,)),
    Case(LowRank(4), (5,)),
    Case(Diagonal(), (6,)),
    Case(Diagonal(), (2, 3)),
    Case(TRIANGULAR, (1,)),
    Case(TRIANGULAR, (6,)),
    Case(TRIANGULAR, (4, 3)),
    Case(TRIANGULAR, (1, 5, 1)),
    Case(TRIANGULAR, (2, 3, 4)),
    Case(TRIANGULAR, (2, 2, 3, 2)),
    Case(Kronecker(max_dense=3, inverse_free=False), (5, 3)),
    Case(Kronecker(max_dense=0, inverse_free=False), (3, 4)),
    Case(TRIANGULAR, (290, 2)),
]
#: those whose elements are one group; LowRank moves within three, and has laws of its own in test_low_rank.py
GROUPS = [c for c in CASES if not any(isinstance(factor, LowRankFactor) for factor in c.group().factors)]
CRITERIA = [psgd.c1, psgd.c2, psgd.c3]
NORMALIZATIONS = [MaxAbs(), MaxDiag(), Spectral()]
STRUCTURES = [Dense(), LimitedMemory(3), LowRank(2), Diagonal(), TRIANGULAR, Kronecker(), Kronecker(max_dense=4)]
PROBES = [FiniteDifference(), HessianVector(), Whitening()]

cases = pytest.mark.parametrize("case", CASES, ids=str)
groups = pytest.mark.parametrize("case", GROUPS, ids=str)
criteria = pytest.mark.parametrize("criterion", CRITERIA, ids=lambda c: c.__name__)
normalizations = pytest.mark.parametrize("normalize", NORMALIZATIONS, ids=str)
structures = pytest.mark.parametrize("structure", STRUCTURES, ids=str)
probes = pytest.mark.parametrize("probe", PROBES, ids=lambda p: type(p).__name__)


def scale_(factor: Factor, by: float) -> None:
    """``Q ← by · Q``"""
    buffers = factor.buffers()
    for name in ["diag"] if isinstance(factor, LowRankFactor) else buffers:
        buffers[name].mul_(by)


def small_model(dtype: torch.dtype = torch.float32, dropout: float = 0.0, seed: int = 0) -> nn.Module:
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
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

        if isinstance(optimizer.probe, HessianVector):
            loss = optimizer.step(loss_of)
        elif isinstance(optimizer.probe, Whitening):
            loss = backward_closure()
            optimizer.step()
        else:
            loss = optimizer.step(backward_closure)
        losses.append(loss.item())
        after(step)
    return losses
