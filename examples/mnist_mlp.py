"""Handwritten digits in an ordinary loop without closure: whitened gradients beside Adam and SGD with momentum.

    python examples/mnist_mlp.py

MNIST is taken from ``--data``, else from ``$PSGD_DATA``, else from the user's cache, where it is downloaded to. The
network has 300 hidden nodes; ``psgd.whiten`` needs no second gradient, so it takes the place of any other optimizer.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import psgd
from psgd.experiments import mnist

BATCH = 500
#: mini-batches between two looks at the test set
EVERY = 30
#: SGD at the best step size of 0.03, 0.1 and 0.3, Adam at the better one of 0.001 and 0.002
OPTIMIZERS = {
    "SGD, momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.002),
    "PSGD": psgd.whiten,
}


def numbers(images: Tensor) -> Tensor:
    """Rows of numbers in [−1, 1]."""
    return images.flatten(1) / 127.5 - 1


def train(name: str, digits: mnist.Digits, steps: int, seed: int) -> list[tuple[int, float, float, float]]:
    """Steps, seconds of training, loss on training data and error on test data, again and again."""
    images, labels = numbers(digits.train_images), digits.train_labels
    test_images, test_labels = numbers(digits.test_images), digits.test_labels
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(784, 300), nn.Tanh(), nn.Linear(300, 10))
    optimizer = OPTIMIZERS[name](model)
    rows, losses, seconds = [], [], 0.0
    begin = time.process_time()
    for step in range(1, steps + 1):
        picked = torch.randint(len(images), (BATCH,))
        loss = cross_entropy(model(images[picked]), labels[picked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 1 or step % EVERY == 0 or step == steps:
            seconds += time.process_time() - begin
            with torch.no_grad():
                error = (model(test_images).argmax(1) != test_labels).double().mean().item()
            rows.append((step, seconds, sum(losses) / len(losses), error))
            losses.clear()
            begin = time.process_time()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on MNIST by SGD with momentum, Adam and PSGD.")
    parser.add_argument("--steps", type=int, default=1200, help="mini-batches for each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("gallery/mnist_mlp.png"), metavar="FIGURE")
    parser.add_argument("--data", type=Path, metavar="DIR", help="where MNIST is; else $PSGD_DATA, or a download")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps wants at least 1")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    try:
        digits = mnist.load(arguments.data)
    except mnist.DataError as error:
        sys.exit(f"mnist_mlp: {error}")

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    for name, color in zip(OPTIMIZERS, ("tab:orange", "tab:green", "tab:blue"), strict=True):
        rows = train(name, digits, arguments.steps, arguments.seed)
        steps, seconds, losses, errors = zip(*rows, strict=True)
        reached = next((f"{s} steps, {t:.1f} s" for s, t, _, e in rows if e < 0.025), "not reached")
        print(
            f"{name:>13}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, test error {errors[-1]:.2%}, "
            f"2.5 % after {reached}, {seconds[-1]:.1f} s",
            flush=True,
        )
        panels[0].semilogy(steps, losses, color=color, label=name)
        panels[1].plot(steps, [100 * e for e in errors], color=color)
        panels[2].plot(seconds, [100 * e for e in errors], color=color)
    panels[0].set(xlabel="mini-batches", ylabel="training loss")
    panels[1].set(xlabel="mini-batches", ylabel="test error (%)")
    panels[2].set(xlabel="seconds of training", ylabel="test error (%)")
    for panel in panels[1:]:
        panel.set_ylim(1, 6)
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    figure.savefig(arguments.out, dpi=100)
    print(f"drawn to {arguments.out}")


if __name__ == "__main__":
    main()
