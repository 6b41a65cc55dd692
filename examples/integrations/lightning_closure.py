"""Finite differences in a ``LightningModule``: the ``Trainer`` hands its closure to ``step``, which calls it twice.

    python examples/integrations/lightning_closure.py

``max_norm`` limits the step; ``gradient_clip_val`` would clip inside of the closure, and accumulation needs a closure
of one's own: see ``lightning_manual.py``. The margin: the loss falls below a tenth of that of the untrained model.
"""

from __future__ import annotations

import sys

import lightning as L  # noqa: N812
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from psgd import PSGD, Affine, FiniteDifference


class Regression(L.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> PSGD:
        # module= leaves the statistics of batch normalisation as the first of the two calls made them.
        probe = FiniteDifference(module=self.net)
        return PSGD(Affine.groups(self.net), lr=self.lr, probe=probe, blocks=Affine(), max_norm=1.0)


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
        sys.exit("lightning_closure: the loss was to fall below a tenth of what it was")


if __name__ == "__main__":
    main()
