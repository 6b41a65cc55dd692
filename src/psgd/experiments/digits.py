"""The classifiers of Section VI.E: handwritten digits, linear or with tanh layers, by cross entropy or hinge loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import Affine
from . import mnist, training
from .layers import linear
from .run import Row

BATCH = 100
PIXELS = 28 * 28
CLASSES = 10
#: number of mini-batches between two points of a curve: 0.1 epoch
EVERY = 60


def network(hidden: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    """Linear layers with tanh between them; in float32, as is usual for training."""
    sizes = [PIXELS, *hidden, CLASSES]
    layers = [linear(inputs, outputs, generator, torch.float32) for inputs, outputs in pairwise(sizes)]
    return nn.Sequential(*[module for layer in layers for module in (nn.Tanh(), layer)][1:])


def hinge(output: Tensor, target: Tensor) -> Tensor:
    """``√(max(max_{j≠i} o_j + 1 − o_i, 0)² + 0.01) − 0.1``: the paper's smoothed multi-class hinge loss.

    >>> hinge(torch.tensor([[3.0, 1.0, 1.5]]), torch.tensor([0]))
    tensor(0.)
    """
    right = output.gather(1, target[:, None])
    others = output.scatter(1, target[:, None], -torch.inf)
    margin = (others.amax(1) + 1 - right[:, 0]).clamp_min(0)
    return ((margin.square() + 0.01).sqrt() - 0.1).mean()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cross entropy": nn.functional.cross_entropy, "hinge": hinge}


@cache
def tensors(data: Path | None, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images as rows of numbers in [−1, 1], and labels."""
    digits = mnist.load(data)

    def images(raw: Tensor) -> Tensor:
        return (raw.flatten(1).to(device) / 127.5 - 1).contiguous()

    return (
        images(digits.train_images),
        digits.train_labels.to(device),
        images(digits.test_images),
        digits.test_labels.to(device),
    )


def batches(
    images: Tensor, labels: Tensor, generator: torch.Generator, size: int = BATCH
) -> Iterator[tuple[Tensor, Tensor]]:
    """Mini-batches of endless epochs, each in another order."""
    while True:
        for picked in torch.randperm(len(images), generator=generator).to(images.device).split(size):
            yield images[picked], labels[picked]


@torch.no_grad()
def judge(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], images: Tensor, labels: Tensor
) -> tuple[float, float]:
    """Loss, and the share of images with a wrong class."""
    output = model(images)
    return float(loss(output, labels)), float((output.argmax(1) != labels).double().mean())


def train(
    *,
    seed: int,
    device: str,
    data: Path | None,
    method: str,
    lr: float,
    hidden: Sequence[int],
    loss: str,
    epochs: float,
    regularization: float = 0.0,
    update_every: int = 1,
    max_norm: float | None = None,
) -> Iterator[Row]:
    """Yield a row with training loss and test error for each tenth of an epoch."""
    images, labels, test_images, test_labels = tensors(data, device)
    generator = torch.Generator().manual_seed(seed)
    model = network(hidden, generator).to(device)
    options = {"blocks": Affine(), "update_every": update_every, "max_norm": max_norm}
    optimizer = training.optimizer(method, model, lr, seed=seed, **options)

    def cost(x: Tensor, y: Tensor) -> Tensor:
        value = LOSSES[loss](model(x), y)
        if regularization:
            value = value + regularization * torch.stack([p.square().sum() for p in model.parameters()]).sum()
        return value

    steps = training.losses(optimizer, cost, batches(images, labels, generator))
    for row in training.averaged(steps, round(epochs * 10) * EVERY, EVERY):
        test_loss, error = judge(model, LOSSES[loss], test_images, test_labels)
        yield {**row, "epoch": row["iteration"] / (10 * EVERY), "test loss": test_loss, "error": error}
