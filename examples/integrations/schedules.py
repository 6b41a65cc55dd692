"""Schedules of ``torch.optim.lr_scheduler``: all numbers of a param group may change while training.

    python examples/integrations/schedules.py

``OneCycleLR`` and ``CyclicLR`` change ``momentum`` too, as that is its name in PSGD. The margin: with each of them
the loss falls below half of that of the untrained model.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR

import psgd

STEPS, WARM_UP = 80, 10


def warm_up_then_cosine(optimizer: psgd.PSGD) -> SequentialLR:
    warm_up = LambdaLR(optimizer, lambda step: (step + 1) / WARM_UP)
    return SequentialLR(optimizer, [warm_up, CosineAnnealingLR(optimizer, STEPS - WARM_UP)], [WARM_UP])


SCHEDULES = {
    "one cycle": lambda optimizer, lr: OneCycleLR(optimizer, max_lr=lr, total_steps=STEPS),
    "warm-up, then cosine": lambda optimizer, lr: warm_up_then_cosine(optimizer),
    "plateaus": lambda optimizer, lr: ReduceLROnPlateau(optimizer, patience=10, factor=0.5),
}


def data(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
    return x, (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3]


def main(lr: float = 0.01) -> None:
    x, y = data(1000)
    for name, make in SCHEDULES.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = psgd.whiten(model, lr)
        schedule = make(optimizer, lr)
        before = nn.functional.mse_loss(model(x), y).item()
        for step in range(STEPS):
            inputs, goal = data(step)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), goal)
            loss.backward()
            optimizer.step()
            schedule.step(*([loss.item()] if isinstance(schedule, ReduceLROnPlateau) else []))
        after = nn.functional.mse_loss(model(x), y).item()
        print(f"{name}: loss {before:.4f} -> {after:.4f}")
        if not after < 0.5 * before:
            sys.exit(f"schedules: the loss was to fall below half of what it was with {name}")


if __name__ == "__main__":
    main()
