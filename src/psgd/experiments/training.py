"""Common parts of all training runs: the optimizers they compare, the loop, and the averaging of losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from math import isfinite
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from .. import PSGD, Affine, Kronecker, c1, c2, c3
from .run import Row

CRITERIA = {"c1": c1, "c2": c2, "c3": c3}
PLAIN = {"SGD": torch.optim.SGD, "RMSProp": torch.optim.RMSprop, "Adam": torch.optim.Adam}
#: options of PSGD that the paper does without
AS_IN_THE_PAPER: dict[str, Any] = {
    "init": "identity",
    "momentum": 0.0,
    "update_every": 1,
    "clip_outliers": math.inf,
    "clip_steps": math.inf,
}
NAMES = {"c1": "preconditioner 1", "c2": "preconditioner 2", "c3": "preconditioner 3"}


def label(method: str, lr: float) -> str:
    """Label as in the legends of the paper."""
    return f"{NAMES.get(method, method)}, step size {lr:g}"


def optimizer(method: str, model: nn.Module, lr: float, *, seed: int, **options: Any) -> torch.optim.Optimizer:
    """Optimizer of a method for a model, with the paper's triangular factors; ``options`` are for PSGD alone."""
    if method in PLAIN:
        return PLAIN[method](model.parameters(), lr=lr)
    groups = Affine.groups(model) if isinstance(options.get("blocks"), Affine) else model.parameters()
    paper = {"preconditioner": Kronecker(inverse_free=False), "precond_lr": 0.01, **AS_IN_THE_PAPER}
    return PSGD(groups, lr, criterion=CRITERIA[method], seed=seed, **(paper | options))


def losses(
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Tensor],
    data: Iterator[tuple[Tensor, ...]],
    schedule: LRScheduler | None = None,
) -> Iterator[float]:
    """Take one step for each mini-batch, as far as the result is read, and yield ``loss(*mini-batch)`` before it."""
    for batch in data:
        value = float(optimizer.step(_closure(optimizer, loss, batch)))
        if schedule is not None:
            schedule.step()
        yield value


def _closure(
    optimizer: torch.optim.Optimizer, loss: Callable[..., Tensor], batch: tuple[Tensor, ...]
) -> Callable[[], float]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(*batch)
        value.backward()
        return value.detach()

    return closure  # type: ignore[return-value]  # torch writes float for what a closure returns, and means a loss


def averaged(values: Iterator[float], iterations: int, every: int) -> Iterator[Row]:
    """Yield a row every ``every`` mini-batches with their mean loss; a loss that is not finite is the last."""
    for iteration in range(every, iterations + 1, every):
        loss = fmean(islice(values, every))
        yield {"iteration": iteration, "loss": loss}
        if not isfinite(loss):
            return
