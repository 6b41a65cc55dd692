"""Callback for ``lightning`` that logs what a preconditioner does while a ``Trainer`` trains.

This is the only module that imports ``lightning``; ``import psgd`` does not import this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .monitor import Monitor, Record
from .optimizer import PSGD

try:
    import lightning.pytorch as pl
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.utilities import rank_zero_warn
except ImportError as missing:
    raise ImportError("psgd.lightning wants the package lightning: pip install 'psgd[integrations]'") from missing


class PreconditionerMonitor(pl.Callback):
    """Logs the records of a ``psgd.Monitor`` for each ``PSGD`` of a module, every ``every`` steps:

    * ``psgd/residual``: how far ``Q`` is from fitting the criterion
    * ``psgd/q_step``: how far ``Q`` moved in its last update
    * ``psgd/condition``: condition number of the factors of ``Q``
    * ``psgd/update_rms``: how far the parameters moved
    * ``psgd/loss`` and ``psgd/lr``: loss and learning rate
    * ``psgd/skipped``: number of steps skipped so far because loss or gradients were not finite

    Each of the first four is the median over the blocks. The suffix ``_max`` marks the maximum over the blocks.

    The numbers go to the loggers of the ``Trainer`` and to ``trainer.callback_metrics``, so that other callbacks see
    them. The numbers of the second ``PSGD`` of a module are called ``psgd1/…``. The callback costs as much as the
    monitor.

    The callback also warns if the settings of the ``Trainer`` do not suit the probe: gradients that are clipped or
    accumulated between the calls of a closure are not those that ``FiniteDifference`` measures.

    Args:
        every: number of steps from one record to the next; by default the ``log_every_n_steps`` of the ``Trainer``
    """

    def __init__(self, every: int | None = None) -> None:
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f"every={every!r}: PreconditionerMonitor wants a whole number of at least 1, or None")
        self.every = every
        #: monitors, each with the last record that was logged
        self._monitors: dict[Monitor, Record | None] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        optimizers = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, PSGD)]
        if not optimizers:
            found = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers) or "none"
            raise MisconfigurationException(
                f"configure_optimizers: it returned {found}; PreconditionerMonitor wants at least one PSGD"
            )
        for optimizer in optimizers:
            _check(optimizer, trainer, pl_module)
        self._close()
        every = self.every or getattr(trainer, "log_every_n_steps", 0) or 50
        self._monitors = {Monitor(optimizer, every=every, model=pl_module): None for optimizer in optimizers}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        loss: Any = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        told = isinstance(loss, Tensor) and loss.numel() == 1
        # In automatic optimization losses are divided by this number.
        batches = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        values: dict[str, float] = {}
        for k, (monitor, logged) in enumerate(self._monitors.items()):
            if monitor.waiting and told:  # the step had no closure, as with scaled gradients
                monitor.loss(loss)
            monitor.flush()
            if monitor.last is not None and monitor.last is not logged:
                self._monitors[monitor] = monitor.last
                found = monitor.last.summary()
                if "loss" in found:
                    found["loss"] *= batches
                values |= {f"psgd{k or ''}/{name}": value for name, value in found.items()}
        if values:
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step - 1)
            trainer.callback_metrics.update({name: torch.tensor(value, device="cpu") for name, value in values.items()})

    def on_train_end(self, *_: Any) -> None:
        self._close()

    def on_exception(self, *_: Any) -> None:
        self._close()

    def _close(self) -> None:
        for monitor in self._monitors:
            monitor.close()
        self._monitors = {}


def _check(optimizer: PSGD, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise or warn if settings of the ``Trainer`` do not suit the probe; they matter only for its closure."""
    if not module.automatic_optimization:
        return
    probe = type(optimizer.probe).__name__
    if optimizer.probe.forward_only:
        raise MisconfigurationException(
            f"automatic_optimization=True: {probe} wants a closure that does not call backward(), and the Trainer's "
            "does; set automatic_optimization = False and call optimizer.step(closure) in training_step"
        )
    if not optimizer.probe.calls_twice:
        return
    if trainer.accumulate_grad_batches > 1:
        k = trainer.accumulate_grad_batches
        rank_zero_warn(
            f"accumulate_grad_batches={k}: FiniteDifference measures the curvature of the last of {k} mini-batches, "
            f"divided by {k}, so that P becomes {k} times too large; use Whitening(), or a closure over all of them "
            "with automatic_optimization = False"
        )
    if trainer.gradient_clip_val:
        rank_zero_warn(
            f"gradient_clip_val={trainer.gradient_clip_val}: gradients are clipped before FiniteDifference sees them, "
            "which hides the curvature along them; limit the step by PSGD(…, max_norm=…) instead"
        )
