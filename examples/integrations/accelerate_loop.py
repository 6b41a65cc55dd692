"""PSGD in a loop of Hugging Face accelerate: mixed precision, accumulation, clipping, and a checkpoint to go on from.

    python examples/integrations/accelerate_loop.py

The margin: the loss falls below half of that of the untrained model, with a checkpoint loaded half-way.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from psgd import PSGD, Whitening


def main(lr: float = 0.01) -> None:
    set_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    x = torch.randn(1024, 8)
    y = (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3]
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = PSGD(model.parameters(), lr=lr, probe=Whitening())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    data = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    model, optimizer, schedule, data = accelerator.prepare(model, optimizer, schedule, data)

    def loss_of_all() -> float:
        with torch.no_grad():
            return nn.functional.mse_loss(model(x), y).item()

    def epoch() -> None:
        for inputs, goal in data:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), goal)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    before = loss_of_all()
    for _ in range(5):
        epoch()
    half_way = loss_of_all()
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        epoch()
        accelerator.load_state(folder)
    if loss_of_all() != half_way:
        sys.exit("accelerate_loop: the checkpoint was to bring back the parameters")
    for _ in range(5):
        epoch()
    after = loss_of_all()
    print(f"loss {before:.4f} -> {after:.4f}")
    if not after < 0.5 * before:
        sys.exit("accelerate_loop: the loss was to fall below half of what it was")


if __name__ == "__main__":
    main()
