"""Measurements of what an iteration costs, beside the arithmetic that it consists of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import PSGD, Affine, whiten
from . import arithmetic, digits, recurrent, training
from .run import Row

RNN, MNIST, DEFAULTS = "recurrent network", "MNIST network", "MNIST example"
#: columns for the arithmetic of a step without its gradient, and for that of an update of Q without its gradient
PRECONDITIONING, FITTING = "arithmetic of P g", "arithmetic of an update"
#: size of the mini-batches of the MNIST example
EXAMPLE_BATCH = 500
#: update interval that is longer than a run
NEVER = 10**9
#: number of mini-batches between two updates of Q
EVERY = (1, 2, 5, 10, NEVER)
#: number of mini-batches in a turn, so that each turn has its share of updates
TURN = 10


def measure(*, seed: int, device: str, model: str, rounds: int, length: int) -> Iterator[Row]:
    """Measure seconds of one iteration of each kind, and of its arithmetic at the speed of the library.

    All kinds take turns, so that a busy machine slows all of them. On a CPU the time is that of this process alone.
    """
    clock = time.process_time if device == "cpu" else time.perf_counter
    start: Callable[[int, str], Start] = partial(_rnn, length) if model == RNN else _mnist
    kinds: dict[str, Callable[[], Any]] = {}
    gradients = Gradients(clock)
    for name, method, every in (("SGD", "SGD", 1), *((kind(every), "c3", every) for every in EVERY)):
        network, loss, data = start(seed, device)
        optimizer = training.optimizer(method, network, 0.01, seed=seed, blocks=Affine(), update_every=every)
        kinds[name] = partial(next, gradients.timed_steps(optimizer, partial(loss, network), data))
    assert isinstance(optimizer, PSGD)
    dtype = next(network.parameters()).dtype
    calls = list(arithmetic.parts((stack.group for stack in optimizer.stacks), dtype, device))
    for number in range(rounds + 1):
        row: Row = {"round": number, PRECONDITIONING: 0.0, FITTING: 0.0}
        for name, iterate in kinds.items():
            gradients.seconds = 0.0
            row[name] = _seconds_of(iterate, clock)
            row[besides(name)] = row[name] - gradients.seconds / TURN
        row["gradient"] = row["SGD"] - row.pop(besides("SGD"))
        for part in calls * TURN:  # in the order of an iteration, so that caches hold no more of it than there
            begin = clock()
            part.call()
            row[FITTING if part.of_update else PRECONDITIONING] += part.share * (clock() - begin) / TURN
        if number:  # the first is the warm-up
            yield row


class Gradients:
    """Seconds that closures take, with all that is for the gradient in them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds = 0.0

    def timed_steps(
        self, optimizer: torch.optim.Optimizer, loss: Callable[..., Tensor], data: Iterator[tuple[Tensor, ...]]
    ) -> Iterator[float]:
        """Take a step for each mini-batch, as far as the result is read, and yield the loss before it."""
        for batch in data:

            def closure(batch: tuple[Tensor, ...] = batch) -> Tensor:
                begin = self.clock()
                optimizer.zero_grad()
                value = loss(*batch)
                value.backward()
                self.seconds += self.clock() - begin
                return value.detach()

            yield float(optimizer.step(closure))  # type: ignore[arg-type]  # torch writes float and means a loss


def _seconds_of(work: Callable[[], Any], clock: Callable[[], float]) -> float:
    begin = clock()
    for _ in range(TURN):
        work()
    return (clock() - begin) / TURN


def measure_defaults(*, seed: int, device: str, rounds: int) -> Iterator[Row]:
    """Measure seconds of one iteration of the MNIST example, by SGD and by ``psgd.whiten`` with its defaults."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    kinds, period = {}, TURN
    for name, new in (("SGD", _sgd), ("PSGD", whiten)):
        network, loss, data = _mnist(seed, device, EXAMPLE_BATCH)
        optimizer = new(network)
        iterate = partial(next, training.losses(optimizer, partial(loss, network), data))
        for _ in range(optimizer.param_groups[0].get("update_anneal", 0)):
            iterate()  # updates are frequent at first
        period = optimizer.param_groups[0].get("update_every", period)
        kinds[name] = iterate
    for number in range(rounds + 1):
        row: Row = {"round": number}
        for name, iterate in kinds.items():
            begin = clock()
            for _ in range(period):
                iterate()
            row[name] = (clock() - begin) / period
        if number:
            yield row


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def kind(every: int) -> str:
    return f"PSGD, update every {every}" if every < NEVER else "PSGD, no update"


def besides(name: str) -> str:
    """Column for the seconds of an iteration in which no gradient is computed."""
    return f"{name}, besides gradients"


Start = tuple[nn.Module, Callable[..., Tensor], Iterator[tuple[Tensor, ...]]]


def _rnn(length: int, seed: int, device: str) -> Start:
    task = recurrent.ADDITION
    model, generator = task.start(seed)
    return model.to(device), task.loss, task.batches(generator, length, device)


def _mnist(seed: int, device: str, batch: int = digits.BATCH) -> Start:
    """MNIST network on noise: the time does not depend on the images."""
    generator = torch.Generator().manual_seed(seed)
    model = digits.network([300], generator).to(device)
    images = (2 * torch.rand(6 * batch, digits.PIXELS, generator=generator) - 1).to(device)
    labels = torch.randint(digits.CLASSES, (6 * batch,), generator=generator).to(device)

    def loss(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(network(x), y)

    return model, loss, digits.batches(images, labels, generator, batch)
