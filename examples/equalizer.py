"""The paper's blind equalizer: undo what a channel did to a signal, without knowing the signal.

    python examples/equalizer.py

A source of independent numbers goes through a channel that smears each of them over many samples. A filter of 21 taps
is to undo that. All it knows is how constant the squares of its outputs should be (the constant modulus criterion).
That loss is of fourth degree and not convex, and its mini-batches of 10 samples are noisy: Newton's method would fail.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import conv1d

from psgd import PSGD, Dense

TAPS, BATCH = 21, 10
#: E s⁴ / E s² of the source, which is uniform in [−1, 1]
MODULUS = 3 / 5
#: mini-batches between two looks at the filter
EVERY = 50
#: SGD at the paper's step size (0.05 diverges), Adam at the best of 0.001, 0.003, 0.01 and 0.03
OPTIMIZERS = {
    "SGD": lambda w: torch.optim.SGD([w], lr=0.02),
    "Adam": lambda w: torch.optim.Adam([w], lr=0.01),
    "PSGD": lambda w: PSGD([w], lr=0.02, preconditioner=Dense()),
}


def channel(length: int = 256) -> Tensor:
    """The impulse response of ``(−0.8 + z⁻²) / (1 + 0.8 z⁻²)``, brought to unit energy."""
    h = torch.zeros(length)
    h[0], h[2] = -0.8, 1.0
    for k in range(2, length):
        h[k] -= 0.8 * h[k - 2]
    return h / h.norm()


def received(h: Tensor, seed: int, chunk: int = 10_000) -> Iterator[Tensor]:
    """Mini-batches of windows ``(BATCH, TAPS)`` of what comes out of the channel, the newest sample first."""
    generator = torch.Generator().manual_seed(seed)
    past = TAPS - 1 + len(h) - 1
    source = 2 * torch.rand(past, generator=generator) - 1
    while True:
        source = torch.cat([source[-past:], 2 * torch.rand(chunk, generator=generator) - 1])
        samples = conv1d(source[None, None], h.flip(0)[None, None])[0, 0]
        yield from samples.unfold(0, TAPS, 1).flip(1).split(BATCH)


def through(h: Tensor, w: Tensor) -> Tensor:
    """The impulse response of channel and filter together; a single peak would be perfect."""
    return conv1d(h[None, None], w.detach().flip(0)[None, None], padding=TAPS - 1)[0, 0]


def interference(c: Tensor) -> float:
    """The energy of everything but the largest peak, relative to that peak."""
    return (c.square().sum() / c.square().max() - 1).item()


def train(name: str, h: Tensor, steps: int, seed: int) -> tuple[Tensor, list[tuple[int, float]], float]:
    """The filter, its interference over mini-batches, and the seconds it took."""
    w = torch.zeros(TAPS)
    w[TAPS // 2] = 1  # at first it leaves the signal as it is
    w.requires_grad_()
    optimizer = OPTIMIZERS[name](w)
    curve, seconds = [(0, interference(through(h, w)))], 0.0
    begin = time.process_time()
    for step, windows in zip(range(1, steps + 1), received(h, seed), strict=False):

        def closure(windows: Tensor = windows) -> Tensor:
            optimizer.zero_grad()
            loss = ((windows @ w).square() - MODULUS).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        if step % EVERY == 0 or step == steps:
            seconds += time.process_time() - begin
            curve.append((step, interference(through(h, w))))
            begin = time.process_time()
    return w, curve, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Equalize a channel blindly by SGD, Adam and PSGD.")
    parser.add_argument("--steps", type=int, default=10_000, help="mini-batches for each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("gallery/equalizer.png"), metavar="FIGURE")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps wants at least 1")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # 21 numbers are no faster with more
    torch.set_default_dtype(torch.float64)

    h = channel()
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplot_mosaic([["curves", "channel"], ["curves", "both"]], width_ratios=(1.6, 1))
    for name, color in zip(OPTIMIZERS, ("tab:orange", "tab:green", "tab:blue"), strict=True):
        w, curve, seconds = train(name, h, arguments.steps, arguments.seed)
        below = next((str(step) for step, value in curve if value < 0.1), "not reached")
        print(
            f"{name:>4}: interference {curve[0][1]:.3f} -> {curve[-1][1]:.3f}, mini-batches to 0.1: {below}, "
            f"{seconds:.1f} s",
            flush=True,
        )
        panels["curves"].semilogy(*zip(*curve, strict=True), color=color, label=f"{name}, {seconds:.0f} s")
    panels["curves"].set(xlabel="mini-batches", ylabel="intersymbol interference")
    panels["curves"].legend(frameon=False)
    for place, title, c in (
        ("channel", "channel", h),
        ("both", "channel and filter of PSGD", through(h, w)),  # the last one trained
    ):
        panels[place].stem(
            c[:50].numpy(), basefmt=" ", linefmt="tab:gray" if place == "channel" else "tab:blue", markerfmt="."
        )
        panels[place].set_title(title, fontsize="medium")
        panels[place].set_xlabel("samples" if place == "both" else "")
    for panel in panels.values():
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(arguments.out, dpi=100)
    print(f"drawn to {arguments.out}")


if __name__ == "__main__":
    main()
