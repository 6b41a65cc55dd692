"""Mixed precision by ``torch.amp``: the ordinary loop with a ``GradScaler``, and finite differences without one.

    python examples/integrations/mixed_precision.py

``GradScaler.step`` takes no closure, so a closure scales by itself: by a power of two, which rounds nothing, and
back. A step that overflows is skipped by PSGD. The margin: both losses fall below half of that of the untrained
model.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import psgd

#: also "cuda"; bfloat16 needs no scaling, float16 does
DEVICE, DTYPE = "cpu", torch.bfloat16
SCALE = 2.0**12


def data(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step)).to(DEVICE)
    return x, (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(DEVICE)


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = data(step)
    with torch.autocast(DEVICE, dtype=DTYPE):
        return nn.functional.mse_loss(model(x).float(), y)


def with_scaler(model: nn.Module, lr: float) -> None:
    optimizer = psgd.whiten(model, lr)
    scaler = torch.amp.GradScaler(DEVICE)
    for step in range(80):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def with_closure(model: nn.Module, lr: float) -> None:
    # Differences over what the dtype of autocast can tell apart.
    probe = psgd.FiniteDifference(module=model, std=torch.finfo(DTYPE).eps ** 0.5)
    optimizer = psgd.newton(model, lr, probe=probe, max_norm=1.0)
    for step in range(80):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            (loss * SCALE).backward()
            for p in model.parameters():
                p.grad /= SCALE
            return loss

        optimizer.step(closure)


def main(lr: float = 1.0) -> None:
    """Train both ways, each at its step size times ``lr``."""
    for name, train, best in (("GradScaler", with_scaler, 0.01), ("closure", with_closure, 0.1)):
        model = network()
        before = loss_of(model, 1000).item()
        train(model, lr * best)
        after = loss_of(model, 1000).item()
        print(f"{name}: loss {before:.4f} -> {after:.4f}")
        if not after < 0.5 * before:
            sys.exit(f"mixed_precision: the loss was to fall below half of what it was with a {name}")


if __name__ == "__main__":
    main()
