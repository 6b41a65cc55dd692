"""Limits: of gradients by ``clip_grad_norm_`` before a whitened step, of steps by ``max_norm`` with finite differences.

    python examples/integrations/clipping.py

In a closure that is called twice gradients must not be clipped: two of one length have no difference along
themselves. The margin: both losses fall below half of that of the untrained model.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import psgd


def data(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
    return x, (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3]


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = data(step)
    return nn.functional.mse_loss(model(x), y)


def clipped_gradients(model: nn.Module, lr: float) -> None:
    # max_rms limits the step of each tensor, before lr; 1.1 is the default with Whitening.
    optimizer = psgd.whiten(model, lr, max_rms=1.1)
    for step in range(80):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def limited_steps(model: nn.Module, lr: float) -> None:
    # max_norm limits the step of all tensors together, before lr.
    optimizer = psgd.newton(model, lr, max_norm=1.0)
    for step in range(80):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        optimizer.step(closure)


def main(lr: float = 1.0) -> None:
    """Train both ways, each at its step size times ``lr``."""
    for name, train, best in (("clipped gradients", clipped_gradients, 0.01), ("limited steps", limited_steps, 0.1)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        before = loss_of(model, 1000).item()
        train(model, lr * best)
        after = loss_of(model, 1000).item()
        print(f"{name}: loss {before:.4f} -> {after:.4f}")
        if not after < 0.5 * before:
            sys.exit(f"clipping: the loss was to fall below half of what it was with {name}")


if __name__ == "__main__":
    main()
