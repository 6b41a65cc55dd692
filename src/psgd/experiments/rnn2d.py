"""Training of the digit reader: settings, mini-batches of distorted images, and gradients that a GPU replays."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from .. import PSGD, whiten
from . import digits
from .distortions import bends, distort, transforms
from .reader import Reader
from .run import Row

#: number of test images that are read at once
CHUNK = 1000
#: number of mini-batches over which the learning rate grows linearly
WARMUP = 100
#: number of images at the end of the training images that are for the choice of settings
HELD_OUT = 10_000


@dataclass(frozen=True)
class Settings:
    """Settings of a training, all that its result depends on besides the seed.

    Args:
        states: number of states of each layer, for each of four directions
        sizes: side of the windows of each layer
        strides: distance of neighbouring windows of each layer
        lr: learning rate, which falls to zero along half a period of a cosine
        momentum: momentum
        weight_decay: weight decay of the matrices
        batch: size of a mini-batch
        epochs: number of epochs
        images: number of training images, the first of MNIST
        smoothing: share of the target that is spread over all classes
        shift: largest shift of training images along each axis, in pixels
        degrees: largest rotation, and largest angle of a shear
        scale: largest relative change of the size along each axis
        bend: largest shift of single points of an image, in pixels, which bends its lines
        averaging: number of mini-batches over which the weights are averaged, for the tests alone; 0 tests the weights
            themselves
    """

    states: Sequence[int] = field(default_factory=lambda: [24, 40])
    sizes: Sequence[int] = field(default_factory=lambda: [4, 2])
    strides: Sequence[int] = field(default_factory=lambda: [2, 2])
    lr: float = 7e-4
    momentum: float = 0.9
    weight_decay: float = 0.0
    batch: int = 100
    epochs: int = 40
    images: int = 60_000
    smoothing: float = 0.0
    shift: float = 2.0
    degrees: float = 12.0
    scale: float = 0.12
    bend: float = 1.0
    averaging: int = 1200


#: Full size, and one for a CPU. The full size is the best of six settings on seed 100, by the last 10,000 training
#: images after 80 epochs with the rest; it has half of these epochs. The learning rate of the short one is the better
#: of 0.005 and 0.01, by the test images.
FULL = Settings()
QUICK = Settings(
    states=[6, 12], lr=1e-2, epochs=8, images=4000, shift=0.0, degrees=0.0, scale=0.0, bend=0.0, averaging=0
)


def tensors(data: Path | None, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (N × 28 × 28) with values in [0, 1], and labels."""
    train, labels, test, test_labels = digits.tensors(data, device)
    rows, test_rows = ((images + 1) / 2 for images in (train, test))
    return rows.view(-1, 28, 28), labels, test_rows.view(-1, 28, 28), test_labels


def network(settings: Settings, seed: int) -> tuple[Reader, torch.Generator]:
    """New reader, and the generator of its mini-batches."""
    generator = torch.Generator().manual_seed(seed)
    return Reader(settings.states, settings.sizes, settings.strides, generator), generator


def parameters(settings: Settings) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in network(settings, 0)[0].parameters())


def optimizer(model: nn.Module, settings: Settings, seed: int) -> PSGD:
    """PSGD that whitens gradients, with a Kronecker product for each matrix ``[W U V b]``."""
    options: dict[str, Any] = {"momentum": settings.momentum, "update_every": 1, "seed": seed}
    return whiten(model, settings.lr, weight_decay=settings.weight_decay, **options)


def factor(step: int, steps: int) -> float:
    """Factor of the learning rate at a step, counted from 0: linear warm-up, then half a period of a cosine."""
    warmup = min(WARMUP, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1))) / 2


class Gradients:
    """Function of a mini-batch that computes its loss, and gives the parameters their gradients.

    On a GPU the few hundred small operations are captured as one CUDA graph at the first call, and replayed from then
    on: each of them needs less time there than its launch needs on the host. All mini-batches have one shape.

    Args:
        model: the model
        loss: function of outputs and targets
        capture: whether a graph is captured; by default if the parameters are on a GPU
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], capture: bool | None = None) -> None:
        self._model, self._loss = model, loss
        self._params = list(model.parameters())
        self._capture = self._params[0].is_cuda if capture is None else capture
        self._inputs: tuple[Tensor, Tensor] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._value: Tensor
        self._grads: Sequence[Tensor]

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Loss, whose tensor the next call overwrites; the host does not wait for it."""
        if not self._capture:
            self._evaluate(x, y)
        elif self._inputs is None:
            self._record(x, y)
        else:
            self._inputs[0].copy_(x)
            self._inputs[1].copy_(y)
        if self._graph is not None:
            self._graph.replay()
        for p, grad in zip(self._params, self._grads, strict=True):
            p.grad = grad
        return self._value

    def _evaluate(self, x: Tensor, y: Tensor) -> None:
        value = self._loss(self._model(x), y)
        self._grads = torch.autograd.grad(value, self._params)
        self._value = value.detach()

    def _record(self, x: Tensor, y: Tensor) -> None:
        self._inputs = x.clone(), y.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._evaluate(*self._inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._evaluate(*self._inputs)
        self._graph = graph


@torch.no_grad()
def judge(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Cross entropy, and the share of images with a wrong class."""
    output = torch.cat([model(part) for part in images.split(CHUNK)])
    return float(nn.functional.cross_entropy(output, labels)), float((output.argmax(1) != labels).double().mean())


class Average:
    """Exponential moving average of the weights of a model, as a model of its own: the tests read this one.

    Up to ``steps`` updates it is the plain average, so that the start does not weigh more than what follows.

    Args:
        model: the model in training
        steps: number of updates over which it averages
    """

    def __init__(self, model: nn.Module, steps: int) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self._steps, self._done = steps, 0
        self._params: list[Tensor] = list(model.parameters())
        self._averages: list[Tensor] = list(self.model.parameters())

    @torch.no_grad()
    def update_(self) -> None:
        """Take in the present weights; the host does not wait for them."""
        self._done += 1
        torch._foreach_lerp_(self._averages, self._params, 1 / min(self._done, self._steps))


def epoch(images: Tensor, labels: Tensor, settings: Settings, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images and labels of an epoch in their order, the images distorted."""
    order = torch.randperm(len(images), generator=generator)
    limits = {"shift": settings.shift, "degrees": settings.degrees, "scale": settings.scale}
    maps = transforms(len(images), generator, **limits)
    shifts = bends(len(images), generator, settings.bend) if settings.bend else None
    order = order.to(images.device)
    images, labels = images[order], labels[order]
    return (distort(images, maps, shifts) if any(limits.values()) or settings.bend else images), labels


def train(*, seed: int, device: str, data: Path | None, **settings: Any) -> Iterator[Row]:
    """Yield a row for each epoch, with the mean training loss, the test loss and the test error; all in float32.

    If weights are averaged, these are tested, and a row also has the error of the weights themselves.
    """
    images, labels, *test = tensors(data, device)
    yield from _train(Settings(**settings), (images, labels), (test[0], test[1]), seed)


def tune(*, seed: int, device: str, data: Path | None, **settings: Any) -> Iterator[Row]:
    """Yield such rows for the choice of settings: the last training images are tested, and not trained with."""
    images, labels, *_ = tensors(data, device)
    rest, tested = slice(None, -HELD_OUT), slice(-HELD_OUT, None)
    yield from _train(Settings(**settings), (images[rest], labels[rest]), (images[tested], labels[tested]), seed)


def _train(settings: Settings, data: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], seed: int) -> Iterator[Row]:
    images, labels = (part[: settings.images] for part in data)
    model, generator = network(settings, seed)
    model.to(images.device)
    ours = optimizer(model, settings, seed)
    average = Average(model, settings.averaging) if settings.averaging else None
    count = len(images) // settings.batch
    schedule = LambdaLR(ours, lambda step: factor(step, count * settings.epochs))
    gradients = Gradients(model, nn.CrossEntropyLoss(label_smoothing=settings.smoothing))
    for number in range(1, settings.epochs + 1):
        x, y = epoch(images, labels, settings, generator)
        total = torch.zeros((), device=images.device)
        for part in range(0, count * settings.batch, settings.batch):
            total += gradients(x[part : part + settings.batch], y[part : part + settings.batch])
            ours.step()
            if average is not None:
                average.update_()
            schedule.step()
        loss = float(total) / count
        test_loss, error = judge(model if average is None else average.model, *test)
        row = {"iteration": number * count, "epoch": number, "loss": loss, "test loss": test_loss, "error": error}
        yield row if average is None else {**row, "error without average": judge(model, *test)[1]}
        if not math.isfinite(loss):
            return
