"""Averages of weights by ``torch.optim.swa_utils``: exponential ones, and those of the last steps (SWA).

    python examples/integrations/averaging.py

After averaging, the statistics of batch normalisation are found anew by ``update_bn``. The margin: the losses of both
averages fall below half of that of the untrained model.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import psgd

STEPS, SWA_FROM = 100, 60


def data(step: int, size: int = 64) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(step))
    return x, (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3]


def loss_of_all(model: nn.Module) -> float:
    x, y = data(1000, 1000)
    model.eval()
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(x), y).item()
    model.train()
    return loss


def main(lr: float = 0.01) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1))
    before = loss_of_all(model)
    optimizer = psgd.whiten(model, lr)
    schedule = SWALR(optimizer, swa_lr=lr / 3, anneal_epochs=10)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    swa = AveragedModel(model)
    for step in range(STEPS):
        x, y = data(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        ema.update_parameters(model)
        if step >= SWA_FROM:
            swa.update_parameters(model)
            schedule.step()

    for name, averaged in (("EMA", ema), ("SWA", swa)):
        update_bn((data(step) for step in range(20)), averaged)
        after = loss_of_all(averaged)
        print(f"{name}: loss {before:.4f} -> {after:.4f}")
        if not after < 0.5 * before:
            sys.exit(f"averaging: the loss was to fall below half of what it was with {name}")


if __name__ == "__main__":
    main()
