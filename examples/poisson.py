"""A physics-informed network: solve a differential equation by minimising how much a network violates it.

    python examples/poisson.py

``−u″ = f`` on [−1, 1] with ``u(±1) = 0``, for a solution that is a slow wave and a fast one. The loss is the mean
square of ``u″ + f`` at 129 fixed points: smooth, without noise, and badly conditioned, as the second derivative weighs
a wave by the square of its frequency. So it is the ground of L-BFGS; Adam and PSGD are made for noisy losses too. All
are compared after the same number of gradients, of which PSGD takes two in a step.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import psgd

HIDDEN = 32
#: gradients between two looks at the error
EVERY = 50


class Solution(nn.Module):
    """``u(x) = (1 − x²) · network(x)``, which is zero at both ends, with its first two derivatives.

    They are carried through the layers by the chain rule, which is faster than differentiating twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u, du, ddu = x, torch.ones_like(x), torch.zeros_like(x)
        for layer in self.layers:
            if layer is not self.layers[0]:
                u = torch.tanh(u)
                slope = 1 - u.square()
                du, ddu = slope * du, slope * (ddu - 2 * u * du.square())
            u, du, ddu = layer(u), du @ layer.weight.mT, ddu @ layer.weight.mT
        b, db, ddb = 1 - x.square(), -2 * x, -2
        return b * u, b * du + db * u, b * ddu + 2 * db * du + ddb * u


def exact(x: Tensor) -> Tensor:
    return torch.sin(math.pi * x) + torch.sin(4 * math.pi * x) / 4


def source(x: Tensor) -> Tensor:
    """``−u″`` of the exact solution."""
    return math.pi**2 * (torch.sin(math.pi * x) + 4 * torch.sin(4 * math.pi * x))


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "Adam":
        return torch.optim.Adam(model.parameters(), lr=0.01)
    if name == "L-BFGS":
        options = {"max_iter": 20, "history_size": 100, "tolerance_grad": 0.0, "tolerance_change": 0.0}
        return torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", **options)
    return psgd.newton(model)


def train(name: str, gradients: int, seed: int) -> tuple[nn.Module, list[tuple[int, float, float, float]]]:
    """The solution, and gradients, seconds, loss and relative error of ``u`` again and again."""
    torch.manual_seed(seed)
    model = Solution()
    optimizer = optimizer_of(name, model)
    points, fine = torch.linspace(-1, 1, 129)[:, None], torch.linspace(-1, 1, 1001)[:, None]
    f, right = source(points), exact(fine)
    taken = 0

    def closure() -> Tensor:
        nonlocal taken
        taken += 1
        optimizer.zero_grad()
        loss = (model(points)[2] + f).square().mean() / f.square().mean()
        loss.backward()
        return loss

    rows, seconds, looked = [], 0.0, -EVERY
    while taken < gradients:
        begin = time.process_time()
        loss = optimizer.step(closure)
        if name == "Adam":  # which needs smaller steps in the end
            optimizer.param_groups[0]["lr"] = 0.01 * max(1 - taken / gradients, 0.01)
        seconds += time.process_time() - begin
        if taken - looked >= EVERY or taken >= gradients:
            looked = taken
            with torch.no_grad():
                error = ((model(fine)[0] - right).norm() / right.norm()).item()
            rows.append((taken, seconds, loss.item(), error))
    return model, rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Solve a Poisson equation by Adam, L-BFGS and PSGD.")
    parser.add_argument("--steps", type=int, default=5000, help="gradients for each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("gallery/poisson.png"), metavar="FIGURE")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps wants at least 1")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # a network this small is no faster with more
    torch.set_default_dtype(torch.float64)

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, 3)
    x = torch.linspace(-1, 1, 400)[:, None]
    panels[0].plot(x.numpy(), exact(x).numpy(), color="black", linewidth=3, alpha=0.25, label="exact")
    for name, color in (("Adam", "tab:green"), ("L-BFGS", "tab:red"), ("PSGD", "tab:blue")):
        model, rows = train(name, arguments.steps, arguments.seed)
        gradients, seconds, losses, errors = zip(*rows, strict=True)
        print(
            f"{name:>6}: loss {losses[0]:.2e} -> {losses[-1]:.2e}, relative error of u {errors[-1]:.1e}, "
            f"{gradients[-1]} gradients, {seconds[-1]:.1f} s",
            flush=True,
        )
        panels[0].plot(x.numpy(), model(x)[0].detach().numpy(), color=color, linewidth=1, label=name)
        panels[1].loglog(gradients, losses, color=color)
        panels[2].loglog(seconds, losses, color=color)
    panels[0].set(xlabel="x", ylabel="u")
    panels[0].legend(frameon=False, fontsize="small")
    panels[1].set(xlabel="gradients", ylabel="loss")
    panels[2].set(xlabel="seconds", ylabel="loss")
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(arguments.out, dpi=100)
    print(f"drawn to {arguments.out}")


if __name__ == "__main__":
    main()
