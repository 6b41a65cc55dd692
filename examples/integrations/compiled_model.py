"""A model compiled by ``torch.compile``, which takes a C++ compiler on a CPU; the step stays as it is.

    python examples/integrations/compiled_model.py

The closure of finite differences may call the compiled model too; ``HessianVector`` cannot differentiate it twice, so
let its closure call the model itself. The margin: the loss falls below half of that of the untrained model.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import psgd


def main(lr: float = 0.01) -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    y = (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3]
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    before = nn.functional.mse_loss(model(x), y).item()

    compiled = torch.compile(model)
    optimizer = psgd.whiten(model, lr)
    for step in range(100):
        part = slice(step * 64 % 512, step * 64 % 512 + 64)
        optimizer.zero_grad()
        nn.functional.mse_loss(compiled(x[part]), y[part]).backward()
        optimizer.step()

    after = nn.functional.mse_loss(model(x), y).item()
    print(f"loss {before:.4f} -> {after:.4f}")
    if not after < 0.5 * before:
        sys.exit("compiled_model: the loss was to fall below half of what it was")


if __name__ == "__main__":
    main()
