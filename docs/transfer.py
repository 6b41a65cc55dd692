"""Learning rates that are good for several structures, widths and mini-batches: ``python docs/transfer.py`` draws them.

A network with one hidden layer learns MNIST with ``psgd.whiten``; the test error after 300 steps is drawn over the
learning rate. It needs some minutes on one core, prints the numbers, and writes ``docs/transfer.svg``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch.nn import functional

import psgd
from psgd.experiments import digits
from psgd.experiments.drawing import images
from psgd.experiments.training import losses

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
STEPS = 300
#: errors in percent that are marked on the axis
TICKS = (2, 3, 5, 10, 20)
SEED = 0


class Setting(NamedTuple):
    """One curve: longest axis with a dense factor, number of hidden nodes, size of the mini-batches."""

    max_dense: int = 2048
    width: int = 300
    batch: int = 500


#: for each panel what differs, and the curves
PANELS: dict[str, dict[str, Setting]] = {
    "structure": {
        "dense 784 ⊗ dense 300": Setting(),
        "diagonal 784 ⊗ dense 300": Setting(max_dense=512),
        "both diagonal": Setting(max_dense=64),
    },
    "hidden nodes": {f"{width}": Setting(width=width) for width in (100, 300, 1000)},
    "mini-batch": {f"{batch}": Setting(batch=batch) for batch in (100, 500, 2000)},
}


def error(setting: Setting, lr: float, folder: Path | None, steps: int = STEPS) -> float:
    """Test error after so many steps."""
    train_images, train_labels, test_images, test_labels = digits.tensors(folder, "cpu")
    generator = torch.Generator().manual_seed(SEED)
    model = digits.network([setting.width], generator)
    optimizer = psgd.whiten(model, lr, max_dense=setting.max_dense)

    data = digits.batches(train_images, train_labels, generator, setting.batch)
    training = losses(optimizer, lambda x, y: functional.cross_entropy(model(x), y), data)
    for _ in range(steps):
        next(training)
    return digits.judge(model, functional.cross_entropy, test_images, test_labels)[1]


def draw(found: dict[Setting, Sequence[float]]) -> Figure:
    """Draw a panel for each thing that differs."""
    picture = Figure(figsize=(11, 3.4), layout="constrained")
    for axes, (title, curves) in zip(picture.subplots(1, len(PANELS), sharey=True), PANELS.items(), strict=True):
        for name, setting in curves.items():
            axes.plot(RATES, [100 * value for value in found[setting]], marker="o", label=name)
        axes.set(xscale="log", yscale="log", xlabel="learning rate", title=title)
        axes.set_yticks(TICKS, map(str, TICKS))
        axes.minorticks_off()
        axes.axvline(1e-3, color="grey", linewidth=0.5)
        axes.grid(alpha=0.3, which="both")
        axes.legend(frameon=False, fontsize="small")
    picture.axes[0].set_ylabel("test error in %")
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with the files of MNIST")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[Setting, Sequence[float]] = {}
    for curves in PANELS.values():
        for setting in curves.values():
            if setting not in found:
                found[setting] = [error(setting, lr, options.data) for lr in RATES]
                print(setting, *(f"{100 * value:.2f}" for value in found[setting]), flush=True)
    path = Path(__file__).with_suffix(".svg")
    path.write_bytes(images(draw(found), "transfer")["svg"])


if __name__ == "__main__":
    main()
