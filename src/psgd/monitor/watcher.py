"""The monitor: decides which steps are measured, and makes their records."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from operator import index
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import diagnostics
from ..blocks import Block
from ..engine import without_autocast
from ..ops.distributed import several_ranks
from ..optimizer import PSGD
from ..probes import Evaluation, is_due
from . import measure
from .files import CSVFile
from .record import Record, named_blocks
from .taken import Taken


class Monitor:
    """Records every ``every`` steps what happens during training, in a CSV file or wherever you want.

    Each record has the loss, the number of skipped steps and the learning rate. For each block it has four numbers: how
    far ``Q`` moved in its last update, the condition number of each factor of ``Q``, how far ``Q`` is from fitting the
    criterion, and how far the parameters moved.

    Steps that are not recorded cost almost nothing, and never wait for the device. The monitor does not change the
    steps: CUDA graphs are replayed as before, and parameters and state are bit for bit the same as without a monitor.
    While a step is measured, there is a second copy of ``Q`` and of the parameters.

    If the file exists already, the monitor appends to it, so that a run that resumes from a checkpoint continues its
    file. A file of another model is refused. If a step was written twice, ``psgd watch`` and ``psgd report`` show the
    later record. If the file can no longer be written, there is a warning, and training continues without the file.

    Args:
        optimizer: the optimizer to watch
        to: the name of a CSV file; ``TensorBoard(…)``; a function that is called with each ``Record``; or None, to keep
            only the last record, as ``last``. If ranks share the blocks, each rank writes its own blocks to its own
            file: ``run.csv`` becomes ``run.rank0.csv``. If every rank has all blocks, as with
            ``DistributedDataParallel`` alone, only the first rank writes.
        every: number of steps from one record to the next
        model: model from which the names of the parameters are taken, if the optimizer was not given
            ``model.named_parameters()``
        overwrite: replace a file that exists already

    >>> import torch
    >>> from psgd import PSGD, Monitor, Whitening
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = PSGD(model.named_parameters(), lr=0.01, probe=Whitening())
    >>> with Monitor(optimizer, every=2) as monitor:
    ...     for _ in range(4):
    ...         loss = model(torch.ones(1, 3)).square().sum()
    ...         optimizer.zero_grad()
    ...         loss.backward()
    ...         optimizer.step()
    ...         monitor.loss(loss)
    >>> monitor.last.step, [block.name for block in monitor.last.blocks]
    (2, ['weight', 'bias'])
    """

    def __init__(
        self,
        optimizer: PSGD,
        to: str | os.PathLike[str] | Callable[[Record], Any] | None = None,
        *,
        every: int = 50,
        model: nn.Module | None = None,
        overwrite: bool = False,
    ) -> None:
        if not isinstance(optimizer, PSGD):
            raise TypeError(f"optimizer={optimizer!r}: Monitor wants a PSGD")
        if isinstance(every, bool) or not hasattr(every, "__index__") or index(every) < 1:
            raise ValueError(f"every={every!r}: Monitor wants a whole number of at least 1")
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model={model!r}: Monitor wants a torch.nn.Module, or None")
        if not (to is None or isinstance(to, (str, os.PathLike)) or callable(to)) or isinstance(to, type):
            raise TypeError(f"to={to!r}: Monitor wants a file name, TensorBoard(…), a function of a Record, or None")
        self.optimizer = optimizer
        self.every = index(every)
        #: last record, or None before the first one
        self.last: Record | None = None
        self._blocks = named_blocks(optimizer, model)
        if several_ranks() and not optimizer.shares_blocks and dist.get_rank() > 0:
            to = None
        if isinstance(to, (str, os.PathLike)):
            to = CSVFile(_of_rank(to, optimizer), self._blocks, len(optimizer.param_groups), bool(overwrite))
        self._to = to
        self._closed = False
        #: numbers of the last measured update of ``Q``, and those of a step that waits for its loss
        self._fitted: measure.OfBlocks = {}
        #: blocks of each stack at that update, as blocks may be stacked again later
        self._fitted_blocks: list[list[Block]] = []
        self._waiting: Taken | None = None
        self._spectrum: dict[str, float] = {}
        #: measurements of the step that is being taken
        self._fit: measure.Fit | None = None
        self._move: measure.Move | None = None
        #: number that the next step should have, of the next step to record, and of the last update of ``Q`` before it
        self._expected = self._next = self._fit_at = -1
        self._loss: Any = None
        optimizer.observers = (*optimizer.observers, self._observe)
        self._hook = optimizer.register_step_post_hook(self._after)

    @property
    def due(self) -> bool:
        """Whether the next step will be recorded, so that it is time to call ``spectrum``."""
        return int(self.optimizer.state[self.optimizer.parameters()[0]]["step"]) % self.every == 0

    def loss(self, value: float | Tensor) -> None:
        """Set the loss of the step that was just taken; not needed if ``step`` is called with a closure.

        The call does nothing unless that step is recorded, so you can call it after every step at no cost. You can also
        call it if no step was taken, as may happen with ``GradScaler``.
        """
        if self._closed:
            raise ValueError("Monitor: it is closed, so nothing can be recorded")
        if self._waiting is not None:
            self._waiting.loss = _number(value)
            self._write()

    @property
    def waiting(self) -> bool:
        """Whether the step that was just taken will be recorded and has no loss yet."""
        return self._waiting is not None

    def flush(self) -> None:
        """Record a step that waits for its loss now, without the loss; otherwise the next step records it."""
        self._write()

    def spectrum(self, closure: Callable[[], Tensor], *, probes: int = 4, iterations: int = 32) -> diagnostics.Spectrum:
        """Compute the spectrum of ``PH``, see ``diagnostics.model_spectrum``; it becomes part of the next record.

        It costs ``probes · iterations`` Hessian-vector products, so call it only when ``due`` is true, or less often.
        """
        found = diagnostics.model_spectrum(self.optimizer, closure, probes=probes, iterations=iterations)
        self._spectrum = {f"ph_q{share}": found.quantile(share / 100) for share in (10, 50, 90)}
        self._spectrum |= {"ph_max": found.quantile(1), "ph_negative": found.negative}
        return found

    def close(self) -> None:
        """Write a step that waits for its loss, and stop watching the optimizer."""
        if self._closed:
            return
        self._closed = True
        self._let_go()
        self._write()
        if callable(close := getattr(self._to, "close", None)):
            close()
        self._to = None

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _observe(self, step: int, evaluation: Evaluation, grads: Mapping[int, Tensor]) -> None:
        """Observe a step, before anything moves."""
        if self._waiting is not None:  # its loss was never given
            self._write()
        if step != self._expected:  # the first one, or a checkpoint was loaded, or the last one failed
            self._plan(step)
        self._expected = step + 1
        self._fit = self._move = None
        if step not in (self._next, self._fit_at):
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # the user captures a graph: measurements would become part of it
        if step == self._fit_at or self._updates(step):
            self._fit = measure.Fit(self.optimizer, step, evaluation, grads)
        if step == self._next:
            self._move = measure.Move(self.optimizer)
            loss = evaluation.loss
            fine = isinstance(loss, (int, float)) or (isinstance(loss, Tensor) and loss.numel() == 1)
            self._loss = loss if fine else None

    @torch.no_grad()
    def _after(self, *_: object) -> None:
        """Finish the measurements after a step."""
        if self._fit is None and self._move is None:
            return
        fit, move, self._fit, self._move = self._fit, self._move, None, None
        with without_autocast({stack.device for stack in self.optimizer.stacks}):
            if fit is not None:
                self._fitted, self._fitted_blocks = fit.finish(), [stack.blocks for stack in fit.stacks]
            if move is None:
                return
            fitted, now = self._fitted, self.optimizer.stacks
            if self._fitted_blocks != [stack.blocks for stack in now]:  # see Resting
                fitted = measure.arranged(fitted, self._fitted_blocks, now)
            found = {**fitted, "condition": measure.conditions(self.optimizer), "update_rms": move.finish()}
        self._waiting = Taken(self.optimizer, self._expected - 1, found, self._spectrum, self._loss)
        self._spectrum = {}
        self._plan(self._expected)
        if self._loss is not None:
            self._loss = None
            self._write()

    def _plan(self, step: int) -> None:
        """Decide which step from this one on is recorded, and at which last update before it ``Q`` is measured."""
        self._next = -(-step // self.every) * self.every
        self._fit_at = next((s for s in range(self._next, step - 1, -1) if self._updates(s)), -1)

    def _updates(self, step: int) -> bool:
        return any(is_due(group, step) for group in self.optimizer.param_groups)

    def _write(self) -> None:
        if self._waiting is None:
            return
        taken, self._waiting = self._waiting, None
        if not taken.fits(self._blocks):
            self._stop("the optimizer has other blocks now; make a new Monitor, with another file")
            return
        self.last = taken.record(self._blocks)
        if self._to is not None:
            try:
                self._to(self.last)
            except OSError as error:
                if not isinstance(self._to, CSVFile):
                    raise
                self._stop(f"{self._to.path} cannot be written: {error.strerror or error}")

    def _stop(self, reason: str) -> None:
        warnings.warn(f"psgd.Monitor stops recording: {reason}", RuntimeWarning, stacklevel=2)
        self._to = None
        self._let_go()

    def _let_go(self) -> None:
        self._hook.remove()
        self.optimizer.observers = tuple(o for o in self.optimizer.observers if o != self._observe)


def snapshot(optimizer: PSGD, model: nn.Module | None = None) -> Record:
    """Make a record of the present state of an optimizer, without watching a step.

    The record has the number of skipped steps, the learning rates and the condition number of each factor. If averages
    of gradients are whitened, it also has the residual of the fit. Other numbers can be measured only during a step,
    see ``Monitor``: the loss, the steps of ``Q`` and of the parameters, and the residual of pairs.

    Args:
        optimizer: the optimizer
        model: model from which the names of the parameters are taken
    """
    if not isinstance(optimizer, PSGD):
        raise TypeError(f"optimizer={optimizer!r}: snapshot wants a PSGD")
    blocks = named_blocks(optimizer, model)
    stacks = optimizer.stacks
    step = int(optimizer.state[optimizer.parameters()[0]]["step"])
    with torch.no_grad(), without_autocast({stack.device for stack in stacks}):
        residual = [measure.whitening_residual(optimizer, stack, stack.group, step) for stack in stacks]
        found = {"residual": residual, "condition": measure.conditions(optimizer)}
        return Taken(optimizer, step, found).record(blocks)


def _number(value: Any) -> float | Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value  # the host does not wait for it here
    try:
        if not isinstance(value, str):  # float would parse it
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise TypeError(f"Monitor.loss: {value!r}; it wants a number, or a tensor with one")


def _of_rank(path: str | os.PathLike[str], optimizer: PSGD) -> str:
    """Name of the file of this rank."""
    root, extension = os.path.splitext(os.fspath(path))
    shared = several_ranks() and optimizer.shares_blocks
    return f"{root}.rank{dist.get_rank()}{extension}" if shared else os.fspath(path)
