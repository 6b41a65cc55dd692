"""Training of a language model with one optimizer after the other: the model is compiled once, and then reset."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from statistics import median

import torch
from torch import Tensor

from .contestants import Contestant
from .gpt import GPT, Shape
from .isolate import Row
from .peers import Steps
from .protocol import Setting
from .timing import Laps, wait_for
from .tokens import Tokens

#: largest number of steps over which the learning rate grows, and the largest share of all steps
WARMUP, WARMUP_SHARE = 100, 0.1
#: steps before the first run, in which what is compiled is compiled
COMPILING = 12


def factor(step: int, steps: int) -> float:
    """Factor of the learning rate: it grows linearly to 1, then falls linearly, to 0 after the last step.

    >>> [round(factor(step, 1200), 3) for step in (1, 50, 100, 101, 650, 1200)]
    [0.01, 0.5, 1.0, 1.0, 0.501, 0.001]
    """
    warmup = max(1, min(WARMUP, int(WARMUP_SHARE * steps)))
    return min(step / warmup, (steps - step + 1) / max(1, steps - warmup), 1.0)


class Trainer:
    """A model and its data on a device; both are made when they are needed for the first time.

    Args:
        shape: sizes of the model and of its mini-batches
        every: number of steps between two evaluations
        judged: most tokens of the held-out text that an evaluation uses
        data: tokens of the text
        device: device to train on; on a GPU the model is compiled and computes in bfloat16 where autocast does
    """

    def __init__(self, shape: Shape, every: int, judged: int, data: Tokens, device: str) -> None:
        self.shape, self.every, self.judged, self.data, self.device = shape, every, judged, data, device
        self.cuda = device.startswith("cuda")
        self._seconds_per_step: float | None = None
        if self.cuda:
            torch.cuda.set_device(torch.device(device).index or 0)  # where events are recorded

    @cached_property
    def model(self) -> GPT:
        torch.set_float32_matmul_precision("high")
        return GPT(self.data.vocabulary, self.shape).to(self.device)

    @cached_property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        return torch.compile(self.model.loss, dynamic=False) if self.cuda else self.model.loss

    @cached_property
    def train_tokens(self) -> Tensor:
        return self.data.train.to(self.device)

    @cached_property
    def held_out(self) -> list[Tensor]:
        """Windows of the held-out text, in mini-batches of the size of those of training: one compiled model is enough.

        A text that is too short for one has one that is smaller.
        """
        context = self.shape.context
        count = min(len(self.data.validation) - 1, self.judged) // context
        windows = self.data.validation[: count * context + 1].unfold(0, context + 1, context).to(self.device)
        full = count // self.shape.batch * self.shape.batch
        return list(windows[: full or count].split(self.shape.batch))

    def seconds_per_step(self, contestant: Contestant) -> float:
        """Seconds of a step; the first call takes a few steps, so that no run has to wait for compilers."""
        if self._seconds_per_step is None:
            self.model.reset()
            optimizer = contestant.optimizer(self.model, contestant.lr, contestant.weight_decay)
            starts = self._starts(0, COMPILING)
            for step in range(COMPILING):
                if step == COMPILING // 2:
                    wait_for(self.device)
                    begin = time.perf_counter()
                self._step(optimizer, starts[step], Laps(self.device))
            wait_for(self.device)
            self._seconds_per_step = (time.perf_counter() - begin) / (COMPILING - COMPILING // 2)
            self.validation_loss()
        return self._seconds_per_step

    def train(self, contestant: Contestant, setting: Setting, seed: int, steps: int) -> Iterator[Row]:
        """Train with a whole schedule, and yield a row for each evaluation; only training is timed."""
        gc.collect()  # the state of the optimizer before, which may be part of a cycle
        model = self.model
        torch.manual_seed(seed)
        model.reset()
        assert setting.weight_decay is not None
        optimizer = contestant.optimizer(model, setting.lr, setting.weight_decay)
        full = [float(group["lr"]) for group in optimizer.param_groups]
        starts, laps = self._starts(seed, steps), Laps(self.device)
        wait_for(self.device)
        seconds, begin, whole = 0.0, time.perf_counter(), time.perf_counter()
        for step in range(1, steps + 1):
            for group, lr in zip(optimizer.param_groups, full, strict=True):
                group["lr"] = lr * factor(step, steps)
            self._step(optimizer, starts[step - 1], laps)
            if step % self.every == 0 or step == steps:
                wait_for(self.device)
                seconds += time.perf_counter() - begin
                gradient, optimizing = laps.read(2)
                loss = self.validation_loss()
                yield {
                    **setting._asdict(),
                    "seed": seed,
                    "step": step,
                    "tokens": step * self.shape.batch * self.shape.context,
                    "seconds": seconds,
                    "gradient_ms": median(gradient),
                    "optimizer_ms": median(optimizing),
                    "loss": loss,
                }
                if not math.isfinite(loss):
                    return
                begin = time.perf_counter()
        self._seconds_per_step = (time.perf_counter() - whole) / steps

    def validation_loss(self) -> float:
        """Mean loss of the held-out windows, by the graph that was compiled for training, so not without gradients."""
        losses = [self._loss(windows).detach() * len(windows) for windows in self.held_out]
        return float(torch.stack(losses).sum()) / sum(map(len, self.held_out))

    def _starts(self, seed: int, steps: int) -> Tensor:
        """First tokens of the windows of all mini-batches: the same for all optimizers."""
        generator = torch.Generator().manual_seed(seed)
        last = len(self.data.train) - self.shape.context
        return torch.randint(last, (steps, self.shape.batch, 1), generator=generator).to(self.device)

    def _step(self, optimizer: Steps, starts: Tensor, laps: Laps) -> None:
        laps.mark()
        self._loss(self.train_tokens[starts + self._offsets]).backward()
        laps.mark()
        optimizer.step()
        laps.mark()
        optimizer.zero_grad()

    @cached_property
    def _offsets(self) -> Tensor:
        return torch.arange(self.shape.context + 1, device=self.device)

    def _loss(self, windows: Tensor) -> Tensor:
        windows = windows.long()
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.cuda):
            return self.loss(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
