"""Problems on which optimizers are compared: four of the paper's own, and four of ``hard``.

Every method has three learning rates for each problem, and otherwise its defaults. A further row, "tuned by hand", is
PSGD with a structure, ``precond_lr``, ``max_norm`` and ``momentum`` for each problem, which no other method has. These
were chosen with other seeds than that of the benchmark: from about ten settings for the zebra and the equalizer, and
from about forty for Rosenbrock in 100 dimensions, where only the probes are random, and for logistic regression.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import PSGD, Affine, Dense, FiniteDifference, Joint, Whitening
from ..experiments import digits, equalizer, mnist, recurrent, zebra
from ..experiments.training import AS_IN_THE_PAPER
from .hard import Start, start_logistic, start_rosenbrock, start_tensor
from .isolate import SkippedError
from .peers import LBFGS, Peer, Steps

#: name of PSGD with settings of its own for each problem
BY_HAND = "PSGD, tuned by hand"


@dataclass(frozen=True)
class Problem:
    """A loss, and a number that should fall below a target.

    Args:
        name: name for ``--model``, beside the names of ``GROUPS``
        title: title in pictures
        goal: name of the number
        target: value below which the problem counts as solved
        start: makes the problem, from a device and a seed
        plain: three learning rates for SGD; with momentum a third of them
        adaptive: three learning rates for Adam, and for all whose steps do not depend on the scale of the loss
        psgd: the choices and numbers of PSGD tuned by hand; half and twice its ``lr`` are tried, too
        every: steps from one evaluation of the goal to the next
        seconds: time with one learning rate, after which the problem counts as not solved
    """

    name: str
    title: str
    goal: str
    target: float
    start: Callable[[str, int], Start]
    plain: tuple[float, float, float]
    adaptive: tuple[float, float, float]
    psgd: Mapping[str, Any] = field(default_factory=dict)
    every: int = 1
    seconds: float = 5.0

    def by_hand(self, seed: int) -> Peer:
        """PSGD with settings of this problem, of which ten to forty were tried, beside those of the paper."""
        choices = {**AS_IN_THE_PAPER, **self.psgd}
        lr = choices.pop("lr")
        return Peer(BY_HAND, partial(fitted, seed=seed, **choices), lr=lr, closure=True)

    def rates(self, peer: Peer) -> list[float]:
        """Learning rates to try, the middle one first; LBFGS, which has a line search, needs only one.

        They are those of SGD or of Adam, scaled by the usual ratio of the peer's learning rates to these.
        """
        if peer == LBFGS:
            return [peer.lr]
        if peer.closure:
            usual, three = 1.0, (0.5, 1.0, 2.0)
        else:
            usual, three = (0.1, self.plain) if peer.plain else (1e-3, self.adaptive)
        low, middle, high = (float(f"{rate * peer.lr / usual:.3g}") for rate in three)
        return [middle, low, high]


def usual(seed: int) -> Peer:
    """PSGD as it comes: with curvature from finite differences."""
    return Peer("PSGD", partial(fitted, seed=seed), lr=FiniteDifference.lr, closure=True)


def fitted(params: list[Tensor], hidden: list[Tensor], lr: float, **options: Any) -> Steps:
    groups: Any = params
    if isinstance(options.get("blocks"), Affine):  # weights and biases alternate in all these networks
        groups = [{"params": list(layer)} for layer in zip(params[::2], params[1::2], strict=True)]
    return PSGD(groups, lr, **options)


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
    task = recurrent.PROBLEMS["addition"]
    model, generator = task.start(seed)
    model.to(device)
    tests = next(task.batches(torch.Generator().manual_seed(2**31 + seed), length, device, recurrent.TEST))

    @torch.no_grad()
    def judge() -> float:
        return float(task.loss(model, *tests))

    data = task.batches(generator, length, device)
    return Start(list(model.parameters()), data, partial(task.loss, model), judge)


def shuffled(images: Tensor, labels: Tensor, generator: torch.Generator, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Mini-batches of endless epochs, each in another order."""
    while True:
        for picked in torch.randperm(len(images), generator=generator).to(images.device).split(size):
            yield images[picked], labels[picked]


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

    return Start(list(model.parameters()), shuffled(images, labels, generator, size), loss, judge)


#: problems; their learning rates go from small ones to the largest that are stable
PROBLEMS: dict[str, Problem] = {
    problem.name: problem
    for problem in (
        Problem(
            "zebra",
            "zebra stripes, 401 parameters",
            "cross entropy",
            0.3,
            start_zebra,
            plain=(0.3, 1.0, 3.0),
            adaptive=(3e-3, 1e-2, 3e-2),
            psgd={"lr": 0.4, "precond_lr": 0.05, "preconditioner": Dense(), "blocks": Joint()},
            every=100,
            seconds=10.0,
        ),
        Problem(
            "equalizer",
            "blind equalizer, 21 taps",
            "interference",
            0.1,
            start_equalizer,
            plain=(0.005, 0.01, 0.02),
            adaptive=(3e-3, 1e-2, 3e-2),
            psgd={"lr": 0.05, "precond_lr": 0.2},
            every=50,
        ),
        Problem(
            "addition",
            "addition by an RNN over 30 steps",
            "squared error",
            0.01,
            start_addition,
            plain=(0.03, 0.1, 0.3),
            adaptive=(3e-4, 1e-3, 3e-3),
            psgd={"lr": 0.5, "precond_lr": 0.1, "max_norm": 0.05, "momentum": 0.9, "blocks": Affine()},
            every=20,
        ),
        Problem(
            "mnist",
            "MNIST, 300 hidden nodes",
            "test error",
            0.025,
            start_mnist,
            plain=(0.1, 0.2, 0.3),
            adaptive=(3e-4, 1e-3, 2e-3),
            psgd={
                "lr": 0.002,
                "probe": Whitening(of_average=True),
                "precond_lr": 0.3,
                "precond_dtype": torch.bfloat16,
                "update_every": 20,
                "update_anneal": 100,
            },
            every=24,
            seconds=15.0,
        ),
        Problem(
            "rosenbrock2",
            "Rosenbrock in 2 dimensions",
            "loss",
            1e-8,
            start_rosenbrock,
            plain=(3e-4, 1e-3, 2e-3),
            adaptive=(1e-2, 3e-2, 1e-1),
            psgd={"lr": 0.5, "precond_lr": 0.1, "max_norm": 1.0, "preconditioner": Dense()},
            every=10,
            seconds=3.0,
        ),
        Problem(
            "rosenbrock100",
            "Rosenbrock in 100 dimensions",
            "loss",
            1e-6,
            partial(start_rosenbrock, dimensions=100),
            plain=(3e-4, 1e-3, 2e-3),
            adaptive=(3e-3, 1e-2, 3e-2),
            psgd={"lr": 0.1, "precond_lr": 0.15, "max_norm": 1.0, "momentum": 0.95},
            every=10,
            seconds=4.0,
        ),
        Problem(
            "logistic",
            "logistic regression, condition 1e6",
            "loss over the least",
            1e-4,
            start_logistic,
            plain=(3.0, 10.0, 30.0),
            adaptive=(0.1, 0.3, 1.0),
            psgd={"lr": 1.0, "precond_lr": 0.15},
            every=10,
            seconds=7.0,
        ),
        Problem(
            "tensor",
            "rank 10 of a 30 × 30 × 30 tensor",
            "relative squared error",
            1e-6,
            start_tensor,
            plain=(0.3, 1.0, 3.0),
            adaptive=(1e-2, 3e-2, 1e-1),
            psgd={"lr": 0.5, "precond_lr": 0.1, "max_norm": 10.0},
            every=10,
            seconds=4.0,
        ),
    )
}
#: problems of the paper and those of ``hard``, to be run together
GROUPS = {"paper": list(PROBLEMS)[:4], "hard": list(PROBLEMS)[4:]}
