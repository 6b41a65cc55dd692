"""The paper's recurrent network: of 100 numbers two are marked, and after the last one their sum is to be told.

    python examples/rnn_addition.py

Always answering zero has a mean squared error of 1/6; under 0.01 the problem counts as solved. Both marked numbers
stand in the first half, so the gradient has to come back over at least 50 steps. ``Affine()`` takes weights and bias of
a layer for one matrix, here 50 × 53 and 1 × 51, and learns a Kronecker product for each.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from psgd import PSGD, Affine, Kronecker

BATCH, STATES = 100, 50
SOLVED = 0.01
#: mini-batches whose losses are averaged to one point of a curve
AVERAGED = 25
#: mini-batches over which the step size of PSGD grows
WARMUP = 500


def batch(generator: torch.Generator, length: int) -> tuple[Tensor, Tensor]:
    """Sequences ``(length, BATCH, 2)`` of numbers and marks, and for each the sum of its two marked numbers."""
    numbers = torch.rand(length, BATCH, generator=generator) - 0.5
    order = torch.rand(length // 2, BATCH, generator=generator).argsort(0)
    marks = torch.zeros(length, BATCH).scatter(0, order[:2], 1.0)
    return torch.stack([numbers, marks], dim=-1), (numbers * marks).sum(0)


class Network(nn.Module):
    """``h ← tanh(W [x, h] + b)``, and a linear layer on the last states."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(2 + STATES, STATES)
        self.output = nn.Linear(STATES, 1)
        with torch.no_grad():
            self.cell.weight[:, :2].normal_(std=0.1)
            nn.init.orthogonal_(self.cell.weight[:, 2:])  # at first nothing is forgotten
            self.output.weight.normal_(std=0.1)
            self.cell.bias.zero_()
            self.output.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        forward, feedback = self.cell.weight.split([2, STATES], dim=1)
        drives = (x @ forward.mT + self.cell.bias).unbind(0)
        h = torch.tanh(drives[0])
        for drive in drives[1:]:
            h = torch.tanh(torch.addmm(drive, h, feedback.mT))
        return self.output(h)[:, 0]


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    if name == "Adam":
        return torch.optim.Adam(model.parameters(), lr=0.001)
    return PSGD(
        Affine.groups(model),
        lr=0.5,
        blocks=Affine(),
        preconditioner=Kronecker(inverse_free=False),  # triangular factors, as in the paper
        precond_lr=0.1,
        max_norm=0.05,  # short steps: on the plateau gradients are mostly noise
    )


def train(name: str, length: int, steps: int, seed: int) -> tuple[list[tuple[int, float]], float]:
    """The learning curve, and the seconds it took; a solved problem ends it."""
    torch.manual_seed(seed)
    model = Network()
    generator = torch.Generator().manual_seed(seed + 1)
    optimizer = optimizer_of(name, model)
    warmup = WARMUP if name == "PSGD" else 1
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / warmup, 1.0))
    curve, losses = [], []
    begin = time.process_time()
    for step in range(1, steps + 1):
        x, y = batch(generator, length)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
        schedule.step()
        if len(losses) == AVERAGED or step == steps:
            curve.append((step, sum(losses) / len(losses)))
            losses.clear()
            if curve[-1][1] < SOLVED:
                break
    return curve, time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="Teach a recurrent network to add, by SGD, Adam and PSGD.")
    parser.add_argument("--steps", type=int, default=1500, help="mini-batches for each at most (default: %(default)s)")
    parser.add_argument("--length", type=int, default=100, help="numbers in a sequence (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("gallery/rnn_addition.png"), metavar="FIGURE")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps wants at least 1")
    if arguments.length < 4:
        parser.error("--length wants at least 4: two numbers of the first half are marked")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # products this small are no faster with more
    torch.set_default_dtype(torch.float64)

    figure = Figure(figsize=(8, 4), layout="constrained")
    panel = figure.subplots()
    for name, color in (("SGD", "tab:orange"), ("Adam", "tab:green"), ("PSGD", "tab:blue")):
        curve, seconds = train(name, arguments.length, arguments.steps, arguments.seed)
        step, loss = curve[-1]
        verdict = f"solved after {step} mini-batches" if loss < SOLVED else "not solved"
        print(f"{name:>4}: loss {curve[0][1]:.4f} -> {loss:.4f}, {verdict}, {seconds:.1f} s", flush=True)
        panel.semilogy(*zip(*curve, strict=True), color=color, label=f"{name}, {seconds:.0f} s")
    panel.axhline(1 / 6, color="grey", linewidth=0.8, linestyle=":", label="always zero")
    panel.axhline(SOLVED, color="grey", linewidth=0.8, linestyle="--", label="solved")
    panel.set(xlabel="mini-batches", ylabel="mean squared error")
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, ncols=2)
    figure.savefig(arguments.out, dpi=100)
    print(f"drawn to {arguments.out}")


if __name__ == "__main__":
    main()
