"""Problems on which optimizers are compared: four of the paper's own, and four of ``hard``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import PSGD, Dense, FiniteDifference, Joint
from ..experiments import digits, equalizer, mnist, recurrent, zebra
from .hard import Start, start_logistic, start_rosenbrock, start_tensor
from .isolate import SkippedError
from .peers import Peer, Steps


@dataclass(frozen=True)
class Problem:
    """A loss, and a number that should fall below a target.

    Args:
        name: name for ``--model``, beside the names of ``GROUPS``
        title: title in pictures
        goal: name of the number
        target: value below which the problem counts as solved
        start: makes the problem, from a device and a seed
        every: steps from one evaluation of the goal to the next
        seconds: time of a run, after which the problem counts as not solved
        random: whether anything depends on the seed
        small: whether there are few enough parameters for one dense preconditioner
    """

    name: str
    title: str
    goal: str
    target: float
    start: Callable[[str, int], Start]
    every: int = 1
    seconds: float = 5.0
    random: bool = True
    small: bool = True


def fitted(params: Sequence[Tensor], hidden: Sequence[Tensor], lr: float, **options: Any) -> Steps:
    """PSGD as it comes, with curvature from finite differences."""
    return PSGD(params, lr, **options)


#: PSGD with one factor for each axis, and with one dense preconditioner for all parameters
NEWTON = Peer("PSGD", fitted, lr=FiniteDifference.lr, closure=True)
DENSE = Peer("PSGD, dense", partial(fitted, preconditioner=Dense(), blocks=Joint()), FiniteDifference.lr, closure=True)


# ---------------------------------------------------------------- the paper's


def start_zebra(device: str, seed: int) -> Start:
    model, data = zebra.start(seed)
    model.to(device)
    x = zebra.grid(100).reshape(-1, 2)
    x, y = x.to(device), zebra.label(x).to(device)

    @torch.no_grad()
    def judge() -> float:
        return float(zebra.loss(model, x, y))

    moved = ((x.to(device), y.to(device)) for x, y in data)
    return Start(list(model.parameters()), moved, partial(zebra.loss, model), judge)


def start_equalizer(device: str, seed: int) -> Start:
    w = equalizer.start().to(device).requires_grad_()
    data = ((windows.to(device),) for (windows,) in equalizer.batches(torch.Generator().manual_seed(seed)))
    return Start([w], data, partial(equalizer.loss, w), partial(equalizer.isi, w))


def start_addition(device: str, seed: int, length: int = 30) -> Start:
    task = recurrent.ADDITION
    model, generator = task.start(seed)
    model.to(device)
    tests = next(task.batches(torch.Generator().manual_seed(2**31 + seed), length, device, recurrent.TEST))

    @torch.no_grad()
    def judge() -> float:
        return float(task.loss(model, *tests))

    data = task.batches(generator, length, device)
    return Start(list(model.parameters()), data, partial(task.loss, model), judge)


def start_mnist(device: str, seed: int, size: int = 500) -> Start:
    """MNIST with mini-batches of 500, which on a CPU are about as much work as the products with ``P``.

    With the paper's 100, PSGD needs fewer steps than first-order methods, but not less time.
    """
    # Nothing is downloaded during a measurement.
    folder = Path(os.environ.get("PSGD_DATA") or mnist.cache())
    try:
        images, labels, test_images, test_labels = digits.tensors(folder, device)
    except mnist.DataError as error:
        raise SkippedError(f"skipped: {error}") from None
    generator = torch.Generator().manual_seed(seed)
    model = digits.network([300], generator).to(device)
    cost = digits.LOSSES["cross entropy"]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return cost(model(x), y)

    def judge() -> float:
        return digits.judge(model, cost, test_images, test_labels)[1]

    return Start(list(model.parameters()), digits.batches(images, labels, generator, size), loss, judge)


#: all problems
PROBLEMS: dict[str, Problem] = {
    problem.name: problem
    for problem in (
        Problem(
            "zebra",
            "zebra stripes, 401 parameters",
            "cross entropy",
            0.3,
            start_zebra,
            every=100,
            seconds=10.0,
        ),
        Problem(
            "equalizer",
            "blind equalizer, 21 taps",
            "interference",
            0.1,
            start_equalizer,
            every=50,
        ),
        Problem(
            "addition",
            "addition by an RNN over 30 steps",
            "squared error",
            0.01,
            start_addition,
            every=20,
            small=False,
        ),
        Problem(
            "mnist",
            "MNIST, 300 hidden nodes",
            "test error",
            0.025,
            start_mnist,
            every=24,
            seconds=15.0,
            small=False,
        ),
        Problem(
            "rosenbrock2",
            "Rosenbrock in 2 dimensions",
            "loss",
            1e-8,
            start_rosenbrock,
            every=10,
            seconds=3.0,
            random=False,
        ),
        Problem(
            "rosenbrock100",
            "Rosenbrock in 100 dimensions",
            "loss",
            1e-6,
            partial(start_rosenbrock, dimensions=100),
            every=10,
            seconds=4.0,
            random=False,
        ),
        Problem(
            "logistic",
            "logistic regression, condition 1e6",
            "loss over the least",
            1e-4,
            start_logistic,
            every=10,
            seconds=7.0,
        ),
        Problem(
            "tensor",
            "rank 10 of a 30 × 30 × 30 tensor",
            "relative squared error",
            1e-6,
            start_tensor,
            every=10,
            seconds=4.0,
        ),
    )
}
#: problems of the paper and those of ``hard``, to be run together
GROUPS = {"paper": list(PROBLEMS)[:4], "hard": list(PROBLEMS)[4:]}
