"""The paper's zebra stripes: a small network learns narrow curved classes, by SGD, by Adam and by PSGD.

    python examples/zebra.py

The network has 401 parameters, few enough for one full preconditioner of all of them: ``Joint()`` makes them one block,
``Dense()`` a matrix of 401 × 401. The closure is an ordinary one; PSGD calls it twice in a step, and learns about the
curvature from how the gradient changed.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from psgd import PSGD, Dense, Joint

BATCH = 100
#: mini-batches whose losses are averaged to one point of a curve
AVERAGED = 100
#: SGD and Adam at the best step size of 0.3, 1, 3 and of 0.01, 0.03, 0.1, 0.3
OPTIMIZERS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
    "PSGD": lambda model: PSGD(model.parameters(), lr=0.1, preconditioner=Dense(), blocks=Joint()),
}


def stripes(x: Tensor) -> Tensor:
    """The class, 0 or 1, of points ``(…, 2)`` of the unit square."""
    powers = 10**x
    return (powers[..., 0] - powers[..., 1]).round().remainder(2)


class Network(nn.Sequential):
    """The logarithm of the odds of class 1."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 100), nn.Tanh(), nn.Linear(100, 1), nn.Flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x - 0.5) * 12**0.5)  # mean 0 and variance 1


def train(name: str, steps: int, seed: int) -> tuple[nn.Module, list[tuple[int, float]], float]:
    """The network, its learning curve, and the seconds it took. Start and mini-batches depend on the seed alone."""
    torch.manual_seed(seed)
    model = Network()
    optimizer = OPTIMIZERS[name](model)
    curve, losses = [], []
    begin = time.process_time()
    for step in range(1, steps + 1):
        x = torch.rand(BATCH, 2)
        y = stripes(x)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = binary_cross_entropy_with_logits(model(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
        if len(losses) == AVERAGED or step == steps:
            curve.append((step, sum(losses) / len(losses)))
            losses.clear()
    return model, curve, time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn the zebra stripes by SGD, Adam and PSGD.")
    parser.add_argument("--steps", type=int, default=8000, help="mini-batches for each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("gallery/zebra.png"), metavar="FIGURE")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps wants at least 1")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # a network this small is no faster with more
    torch.set_default_dtype(torch.float64)

    line = (torch.arange(200) + 0.5) / 200
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=-1)
    truth = stripes(grid)
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    panels = figure.subplot_mosaic([["curves"] * 4, ["truth", *OPTIMIZERS]], height_ratios=(1, 1.05))
    pictures = {"truth": ("to be learned", truth)}
    for name, color in zip(OPTIMIZERS, ("tab:orange", "tab:green", "tab:blue"), strict=True):
        model, curve, seconds = train(name, arguments.steps, arguments.seed)
        with torch.no_grad():
            probability = torch.sigmoid(model(grid))
        wrong = ((probability > 0.5) != truth.bool()).double().mean().item()
        print(
            f"{name:>4}: loss {curve[0][1]:.3f} -> {curve[-1][1]:.3f}, {wrong:.1%} wrong, {seconds:.1f} s", flush=True
        )
        panels["curves"].plot(*zip(*curve, strict=True), color=color, label=f"{name}, {seconds:.0f} s")
        pictures[name] = (f"{name}: {wrong:.1%} wrong", probability)

    for place, (title, values) in pictures.items():
        panels[place].imshow(values.numpy(), cmap="gray", vmin=0, vmax=1, origin="lower", extent=(0, 1, 0, 1))
        panels[place].set_title(title, fontsize="medium")
        panels[place].set(xticks=(0, 1), yticks=(0, 1))
    panels["curves"].set(xlabel="mini-batches", ylabel="cross entropy")
    panels["curves"].set_ylim(bottom=0)
    panels["curves"].grid(alpha=0.3)
    panels["curves"].spines[["top", "right"]].set_visible(False)
    panels["curves"].legend(frameon=False)
    figure.savefig(arguments.out, dpi=100)
    print(f"drawn to {arguments.out}")


if __name__ == "__main__":
    main()
