"""TensorBoard: the loss and what happens to the preconditioner, beside scalars of one's own.

    pip install 'psgd[monitor]'
    python examples/integrations/tensorboard_tracking.py
    tensorboard --logdir runs

The margin: the loss falls below half of that of the untrained model.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import psgd
from psgd.monitor import TensorBoard

STEPS = 150


def data(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
    return x, (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3]


def main(lr: float = 0.01) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = psgd.whiten(model, lr)
    x, y = data(1000)
    before = nn.functional.mse_loss(model(x), y).item()
    with SummaryWriter("runs/psgd") as writer, psgd.Monitor(optimizer, TensorBoard(writer), every=10) as monitor:
        for step in range(STEPS):
            inputs, goal = data(step)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), goal)
            loss.backward()
            optimizer.step()
            monitor.loss(loss)
            if step % 50 == 0:
                writer.add_scalar("test_loss", nn.functional.mse_loss(model(x), y).item(), step)
    after = nn.functional.mse_loss(model(x), y).item()
    print(f"loss {before:.4f} -> {after:.4f}")
    if not after < 0.5 * before:
        sys.exit("tensorboard_tracking: the loss was to fall below half of what it was")


if __name__ == "__main__":
    main()
