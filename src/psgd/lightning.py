"""For ``lightning``: a callback that logs what a preconditioner does while a ``Trainer`` trains.

The only module that imports that package; ``import psgd`` does not import this one.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from torch import Tensor

from .groups import Factor
from .groups.diagonal import DiagonalFactor
from .optimizer import PSGD
from .probes import FiniteDifference, HessianVector

try:
    import lightning.pytorch as pl
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.utilities import rank_zero_warn
except ImportError as missing:
    raise ImportError("psgd.lightning wants the package lightning: pip install 'psgd[integrations]'") from missing

#: the condition of larger factors is not looked for, as that would take longer than many steps
LARGEST = 1024


class PreconditionerMonitor(pl.Callback):
    """Logs, for each ``PSGD`` of a module, at every so many of its steps:

    * ``psgd/condition`` and ``psgd/condition_max``: the condition of the factors of ``Q``, median and largest. It is 1
      at the start, and grows as curvature is found to differ between directions.
    * ``psgd/update_rms`` and ``psgd/update_rms_max``: the root mean square of the change of a parameter in this step,
      median and largest
    * ``psgd/skipped``: steps skipped so far, as loss or gradients were not finite

    They go to the loggers of the ``Trainer`` and to ``trainer.callback_metrics``, so that other callbacks see them. The
    second ``PSGD`` of a module logs as ``psgd1/…``. In steps that are logged the parameters are kept a second time, and
    the host waits for the device; other steps cost nothing.

    It also warns where the settings of the ``Trainer`` do not suit the probe: gradients that are clipped or accumulated
    between the calls of a closure are not those that ``FiniteDifference`` measures.

    Args:
        every: steps from one look to the next; by default the ``log_every_n_steps`` of the ``Trainer``
    """

    def __init__(self, every: int | None = None) -> None:
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f"every={every!r}: PreconditionerMonitor wants a whole number of at least 1, or None")
        self.every = every
        self._watches: list[_Watch] = []

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
        every = self.every or getattr(trainer, "log_every_n_steps", 50) or 1
        self._watches = [_Watch(optimizer, every) for optimizer in optimizers]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        values: dict[str, float] = {}
        for k, watch in enumerate(self._watches):
            values |= {f"psgd{k or ''}/{name}": value for name, value in watch.take().items()}
        if values:
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step - 1)
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})

    def on_train_end(self, *_: Any) -> None:
        self._close()

    def on_exception(self, *_: Any) -> None:
        self._close()

    def _close(self) -> None:
        for watch in self._watches:
            watch.close()
        self._watches = []


class _Watch:
    """Looks at one optimizer from before a step to after it."""

    def __init__(self, optimizer: PSGD, every: int) -> None:
        self.optimizer = optimizer
        self.every = every
        self._before: list[Tensor] = []
        self._found: dict[str, float] = {}
        self._hooks = [
            optimizer.register_step_pre_hook(self._look_before),
            optimizer.register_step_post_hook(self._look_after),
        ]

    def take(self) -> dict[str, float]:
        """What was found since this was called last."""
        found, self._found = self._found, {}
        return found

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _look_before(self, *_: object) -> None:
        params = self.optimizer.parameters()
        due = int(self.optimizer.state[params[0]]["step"]) % self.every == 0
        self._before = [p.detach().clone() for p in params] if due else []

    @torch.no_grad()
    def _look_after(self, *_: object) -> None:
        if not self._before:
            return
        params = self.optimizer.parameters()
        changes = zip(params, self._before, strict=True)
        moved = [float((p - old).abs().square().mean().sqrt()) for p, old in changes if p.numel() > 0]
        self._before = []
        conditions = [c for stack in self.optimizer.stacks for f in stack.group.factors for c in _conditions(f)]
        skipped = {state["skipped"] for state in self.optimizer.state.values()}
        self._found = {"skipped": float(max(map(int, skipped)))}
        for name, values in (("condition", conditions), ("update_rms", moved)):
            if values:
                self._found |= {name: median(values), f"{name}_max": max(values)}


def _conditions(factor: Factor) -> list[float]:
    """The condition of a factor of ``Q``, for each block of its stack; nothing for one that is too large."""
    diagonal = factor.diagonal()
    if isinstance(factor, DiagonalFactor):
        values = diagonal.abs()
    elif diagonal.shape[-1] <= LARGEST:
        values = torch.linalg.svdvals(factor.dense().to(torch.promote_types(diagonal.dtype, torch.float32)))
    else:
        return []
    return (values.amax(-1) / values.amin(-1)).tolist()  # type: ignore[no-any-return]


def _check(optimizer: PSGD, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """What a probe wants of the settings; without a closure of the ``Trainer`` they do not matter to it."""
    if not module.automatic_optimization:
        return
    probe = type(optimizer.probe).__name__
    if isinstance(optimizer.probe, HessianVector) or getattr(optimizer.probe, "batched", False):
        raise MisconfigurationException(
            f"automatic_optimization=True: {probe} wants a closure that does not call backward(), and the Trainer's "
            "does; set automatic_optimization = False and call optimizer.step(closure) in training_step"
        )
    if not isinstance(optimizer.probe, FiniteDifference):
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
