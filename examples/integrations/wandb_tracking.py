"""Weights & Biases: the loss and what happens to the preconditioner, every ten steps.

    pip install wandb
    python examples/integrations/wandb_tracking.py

It writes to the folder ``wandb`` and sends nothing, unless ``WANDB_MODE=online`` is set. The margin: the loss falls
below half of that of the untrained model.
"""

from __future__ import annotations

import os
import sys

import torch
import wandb
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import psgd

STEPS = 150


def data(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
    return x, (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3]


def main(lr: float = 0.01) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = psgd.whiten(model, lr)
    schedule = CosineAnnealingLR(optimizer, STEPS)
    x, y = data(1000)
    before = nn.functional.mse_loss(model(x), y).item()
    mode = os.environ.get("WANDB_MODE", "offline")
    with wandb.init(project="psgd", mode=mode, config={"lr": lr, "optimizer": repr(optimizer)}) as run:

        def log(record: psgd.monitor.Record) -> None:
            run.log(record.summary(), step=record.step)  # record.to_dict() has the numbers of every block

        with psgd.Monitor(optimizer, log, every=10) as monitor:
            for step in range(STEPS):
                inputs, goal = data(step)
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), goal)
                loss.backward()
                optimizer.step()
                monitor.loss(loss)
                schedule.step()
        after = nn.functional.mse_loss(model(x), y).item()
        run.summary["test_loss"] = after
    print(f"loss {before:.4f} -> {after:.4f}")
    if not after < 0.5 * before:
        sys.exit("wandb_tracking: the loss was to fall below half of what it was")


if __name__ == "__main__":
    main()
