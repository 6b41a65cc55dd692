"""A closure of one's own in a ``LightningModule``: gradients of several parts of a mini-batch, and finite differences.

    python examples/integrations/lightning_manual.py

So all parts are seen by both calls of the closure, and the curvature is that of their mean. The same way, with a
closure that returns the loss and leaves ``manual_backward`` out, takes ``HessianVector``. The margin: the loss falls
below a tenth of that of the untrained model.
"""

from __future__ import annotations

import sys

import lightning as L  # noqa: N812
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from psgd import PSGD, Affine, FiniteDifference

PARTS = 4


class Regression(L.LightningModule):
    automatic_optimization = False

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        optimizer = self.optimizers()
        x, y = batch

        def closure() -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros((), device=self.device)
            for part, goal in zip(x.chunk(PARTS), y.chunk(PARTS), strict=True):
                loss = nn.functional.mse_loss(self.net(part), goal) / PARTS
                self.manual_backward(loss)
                total += loss.detach()
            return total

        optimizer.step(closure)

    def configure_optimizers(self) -> PSGD:
        return PSGD(Affine.groups(self.net), lr=self.lr, probe=FiniteDifference(), blocks=Affine(), max_norm=1.0)


def main(lr: float = 0.1) -> None:
    L.seed_everything(0, verbose=False)
    x = torch.randn(1024, 8)
    y = (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3]
    model = Regression(lr)
    before = nn.functional.mse_loss(model.net(x), y).item()

    trainer = L.Trainer(
        max_epochs=10,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True))

    after = nn.functional.mse_loss(model.net(x), y).item()
    print(f"loss {before:.4f} -> {after:.4f}")
    if not after < 0.1 * before:
        sys.exit("lightning_manual: the loss was to fall below a tenth of what it was")


if __name__ == "__main__":
    main()
