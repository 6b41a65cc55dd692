"""PSGD in a ``LightningModule``, with a schedule, clipping, accumulation, and a callback that logs the preconditioner.

    python examples/integrations/lightning_trainer.py

The margin: the loss falls below half of that of the untrained model.
"""

from __future__ import annotations

import sys

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from psgd import PSGD, Whitening
from psgd.lightning import PreconditionerMonitor


class Regression(L.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = PSGD(self.parameters(), lr=self.lr, probe=Whitening())
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(lr: float = 0.01, folder: str = "lightning_logs") -> None:
    L.seed_everything(0, verbose=False)
    x = torch.randn(1024, 8)
    y = (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3]
    model = Regression(lr)
    before = nn.functional.mse_loss(model.net(x), y).item()

    trainer = L.Trainer(
        max_epochs=10,
        accelerator="cpu",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=CSVLogger(folder),
        log_every_n_steps=20,
        callbacks=[PreconditionerMonitor()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))

    seen = {name: f"{value:.3g}" for name, value in trainer.callback_metrics.items() if name.startswith("psgd")}
    print(", ".join(f"{name} {value}" for name, value in seen.items()))
    after = nn.functional.mse_loss(model.net(x), y).item()
    print(f"loss {before:.4f} -> {after:.4f}")
    if not after < 0.5 * before:
        sys.exit("lightning_trainer: the loss was to fall below half of what it was")


if __name__ == "__main__":
    main()
