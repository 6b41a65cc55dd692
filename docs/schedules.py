"""The table of docs/integrations.md#schedules: one small GPT with several schedules of the learning rate.

``python docs/schedules.py`` trains the model of ``examples/char_gpt.py`` for 400 steps on Python's language reference
with ``psgd.whiten``, with each schedule at three learning rates and with two seeds, and prints the validation losses.
It takes about ten minutes on one thread.
"""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import psgd

EXAMPLE = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "char_gpt.py"))
RATES, SEEDS, STEPS, WARM_UP = (0.001, 0.002, 0.004), (0, 1), 400, 50
#: weight of the average in the point at which schedule-free training computes gradients
BETA = 0.9


def warm_up(share: float) -> float:
    return min((share * STEPS + 1) / WARM_UP, 1.0)


#: factor of the learning rate at a share of the run
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda share: 1.0,
    "warm-up, constant": warm_up,
    "warm-up, linear decay to 0": lambda share: warm_up(share) * (1 - share),
    "warm-up, cosine decay to 0": lambda share: warm_up(share) * (1 + math.cos(math.pi * share)) / 2,
    "warm-up, constant, linear decay over the last fifth": lambda share: warm_up(share) * min(1, 5 * (1 - share)),
    "schedule-free": warm_up,
}


class ScheduleFree:
    """Average of the points that the optimizer visits; gradients are those at a point between both."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.base = [p.detach().clone() for p in params]
        self.average = [p.detach().clone() for p in params]
        self.steps = 0

    @torch.no_grad()
    def before(self) -> None:
        for p, z, x in zip(self.params, self.base, self.average, strict=True):
            p.copy_(z.lerp(x, BETA))
        self.start = [p.detach().clone() for p in self.params]

    @torch.no_grad()
    def after(self) -> None:
        self.steps += 1
        for p, y, z, x in zip(self.params, self.start, self.base, self.average, strict=True):
            z += p - y
            x.lerp_(z, 1 / self.steps)

    @torch.no_grad()
    def finish(self) -> None:
        for p, x in zip(self.params, self.average, strict=True):
            p.copy_(x)


def train(name: str, lr: float, seed: int, letters: Tensor, kept: Tensor, vocabulary: int) -> tuple[float, float]:
    """Validation loss of the model, and of the exponential average of its weights."""
    torch.manual_seed(seed)
    model: nn.Module = EXAMPLE["GPT"](vocabulary)
    optimizer = psgd.whiten(model, lr, weight_decay=0.5)
    schedule = LambdaLR(optimizer, lambda step: SCHEDULES[name](min(step / STEPS, 1.0)))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    free = ScheduleFree(list(model.parameters())) if name == "schedule-free" else None
    windows = letters.unfold(0, EXAMPLE["CONTEXT"] + 1, 1)
    for _ in range(STEPS):
        if free is not None:
            free.before()
        loss = model.loss(windows[torch.randint(len(windows), (EXAMPLE["BATCH"],))])  # type: ignore[operator]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
        if free is not None:
            free.after()
    if free is not None:
        free.finish()
    with torch.no_grad():
        return model.loss(kept).item(), average.module.loss(kept).item()  # type: ignore[operator]


def main() -> None:
    torch.set_num_threads(1)
    text = EXAMPLE["read"](None)
    alphabet = sorted(set(text))
    letters = torch.tensor([alphabet.index(letter) for letter in text[:400_000]])
    split = int(0.9 * len(letters))
    kept = letters[split:].unfold(0, EXAMPLE["CONTEXT"] + 1, EXAMPLE["CONTEXT"])[:200]
    for name in SCHEDULES:
        for lr in RATES:
            found = [train(name, lr, seed, letters[:split], kept, len(alphabet)) for seed in SEEDS]
            last, averaged = (fmean(values) for values in zip(*found, strict=True))
            print(f"{name}, {lr:g}: {last:.3f}, average of weights {averaged:.3f}", flush=True)


if __name__ == "__main__":
    main()
