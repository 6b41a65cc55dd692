"""An echo canceller: ill-conditioned regression from a stream, where every sample is seen once.

    python examples/echo.py

A room answers a signal with an echo; a filter of 64 taps is to learn that answer from the signal and from what a
microphone hears, noise included. Neighbouring samples of the signal are much alike, so the Hessian has a condition of
5,000. What counts is how little of the stream is needed. The best possible is least squares on everything heard so far;
L-BFGS is no candidate, as no two gradients are of the same loss.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from psgd import PSGD, HessianVector

TAPS, BATCH, NOISE = 64, 10, 0.01
#: mini-batches between two looks at the filter
EVERY = 25
#: SGD and Adam at the best step size of 0.01, 0.03, 0.06 and of 0.003, 0.01, 0.03; PSGD at less than its default, 0.5,
#: as mini-batches are small: it is faster with more, and ends farther from the room
OPTIMIZERS = {
    "SGD": lambda w: torch.optim.SGD([w], lr=0.03),
    "Adam": lambda w: torch.optim.Adam([w], lr=0.01),
    "PSGD": lambda w: PSGD([w], lr=0.1, probe=HessianVector()),
}


def room(generator: torch.Generator) -> Tensor:
    """The answer of the room to a click: noise that dies away."""
    answer = torch.randn(TAPS, generator=generator) * torch.exp(-torch.arange(TAPS) / 16)
    return answer / answer.norm()


def coloured() -> Tensor:
    """A root of the covariance of the signal, an autoregressive process ``s_t = 1.71 s_{t−1} − 0.9025 s_{t−2} + …``."""
    impulse = [0.0, 1.0]
    while len(impulse) < 1024:
        impulse.append(1.71 * impulse[-1] - 0.9025 * impulse[-2])
    power = torch.fft.rfft(torch.tensor(impulse), 2048).abs().square()
    correlation = torch.fft.irfft(power)[:TAPS]
    lags = (torch.arange(TAPS)[:, None] - torch.arange(TAPS)).abs()
    return torch.linalg.cholesky(correlation[lags] / correlation[0])


def stream(answer: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Stretches of the signal ``(BATCH, TAPS)``, and what the microphone hears after each."""
    generator, root = torch.Generator().manual_seed(seed), coloured()
    while True:
        signal = torch.randn(BATCH, TAPS, generator=generator) @ root.mT
        yield signal, signal @ answer + NOISE * torch.randn(BATCH, generator=generator)


def decibels(w: Tensor, answer: Tensor) -> float:
    """How far the filter is from the room."""
    return 10 * (w.detach() - answer).square().sum().log10().item()


def train(name: str, answer: Tensor, steps: int, seed: int) -> tuple[list[tuple[int, float]], float]:
    """The distance to the room over mini-batches, and the seconds it took."""
    w = torch.zeros(TAPS, requires_grad=True)
    optimizer = OPTIMIZERS[name](w)
    curve, seconds = [(0, decibels(w, answer))], 0.0
    begin = time.process_time()
    for step, (signal, heard) in zip(range(1, steps + 1), stream(answer, seed), strict=False):

        def closure(signal: Tensor = signal, heard: Tensor = heard) -> Tensor:
            loss = (signal @ w - heard).square().mean()
            if name != "PSGD":  # HessianVector differentiates by itself
                optimizer.zero_grad()
                loss.backward()
            return loss

        optimizer.step(closure)
        if step % EVERY == 0 or step == steps:
            seconds += time.process_time() - begin
            curve.append((step, decibels(w, answer)))
            begin = time.process_time()
    return curve, seconds


def least_squares(answer: Tensor, steps: int, seed: int) -> list[tuple[int, float]]:
    """On everything heard so far, with a trace of regularisation for the time when that is too little."""
    A, b = 1e-4 * torch.eye(TAPS), torch.zeros(TAPS)
    curve = [(0, decibels(b, answer))]
    for step, (signal, heard) in zip(range(1, steps + 1), stream(answer, seed), strict=False):
        A += signal.mT @ signal
        b += signal.mT @ heard
        if step % EVERY == 0 or step == steps:
            curve.append((step, decibels(torch.linalg.solve(A, b), answer)))
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description="Cancel an echo by SGD, Adam and PSGD.")
    parser.add_argument("--steps", type=int, default=4000, help="mini-batches for each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("gallery/echo.png"), metavar="FIGURE")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps wants at least 1")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # 64 numbers are no faster with more
    torch.set_default_dtype(torch.float64)

    answer = room(torch.Generator().manual_seed(arguments.seed + 1))
    figure = Figure(figsize=(8, 4), layout="constrained")
    panel = figure.subplots()
    for name, color in zip(OPTIMIZERS, ("tab:orange", "tab:green", "tab:blue"), strict=True):
        curve, seconds = train(name, answer, arguments.steps, arguments.seed)
        below = next((str(step) for step, value in curve if value < -20), "not reached")
        print(
            f"{name:>4}: distance {curve[0][1]:.1f} dB -> {curve[-1][1]:.1f} dB, mini-batches to −20 dB: {below}, "
            f"{seconds:.1f} s",
            flush=True,
        )
        panel.plot(*zip(*curve, strict=True), color=color, label=f"{name}, {seconds:.1f} s")
    curve = least_squares(answer, arguments.steps, arguments.seed)
    print(f"least squares on everything heard: {curve[-1][1]:.1f} dB")
    panel.plot(*zip(*curve, strict=True), color="black", linewidth=1, label="least squares on everything heard")
    panel.set(xlabel="mini-batches of the stream", ylabel="distance to the room (dB)")
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    figure.savefig(arguments.out, dpi=100)
    print(f"drawn to {arguments.out}")


if __name__ == "__main__":
    main()
