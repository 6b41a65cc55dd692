"""Steps during ``backward``: an optimizer for each parameter, so that gradients never exist all at once.

    python examples/integrations/in_backward.py

With ``Whitening`` these are the steps that one optimizer for all would take, but for what belongs to all together:
``max_norm`` limits each parameter by itself, and where a gradient is not finite only its parameter is left out. The
margin: the loss falls below half of that of the untrained model.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from psgd import PSGD, Whitening


def data(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
    return x, (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3]


def main(lr: float = 0.01) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    x, y = data(1000)
    before = nn.functional.mse_loss(model(x), y).item()

    optimizers = {p: PSGD([p], lr=lr, probe=Whitening()) for p in model.parameters()}

    def step_now(p: Tensor) -> None:
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_now)

    for step in range(80):
        inputs, goal = data(step)
        nn.functional.mse_loss(model(inputs), goal).backward()  # that is all

    after = nn.functional.mse_loss(model(x), y).item()
    print(f"loss {before:.4f} -> {after:.4f}")
    if not after < 0.5 * before:
        sys.exit("in_backward: the loss was to fall below half of what it was")


if __name__ == "__main__":
    main()
