"""The paper's recurrent network, what it learns, and the addition problem of Section VI.D.

``long_memory.py`` has the eight problems that the paper cites, and the recipe that solves all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from .. import Affine
from . import training
from .run import Row

BATCH = 100
STATES = 50
#: number of sequences on which wrong answers are counted
TEST = 1000
#: number of mini-batches between two points of a curve
EVERY = 100
#: settings of PSGD for the addition problem, the same for every seed. Steps are much shorter than those of P, at first
#: almost zero, and gradients are averaged: on the plateau they are mostly noise, and a random walk of the feedback
#: matrix would end the memory before there is anything to learn from it. The settings were found on the addition
#: problem, with seeds from 100 to 123.
RECOMMENDED = {"lr": 0.5, "precond_lr": 0.1, "max_norm": 0.05, "momentum": 0.9, "warmup": 500}


class Network(nn.Module):
    """``h ← tanh(W [x, h] + b)`` along the sequence, and a linear layer on the last states.

    Input and feedback weights are one matrix beside their bias, 50 × 53 for two inputs, as in the paper: the layer is
    an ordinary ``Linear``, which is one block of ``Affine``. Feedforward weights have variance 0.01, biases are
    zero, and the feedback matrix is orthogonal, so that at first nothing is forgotten.
    """

    def __init__(self, inputs: int, outputs: int, generator: torch.Generator, states: int = STATES) -> None:
        super().__init__()
        self.inputs = inputs
        self.cell: nn.Linear = nn.utils.skip_init(nn.Linear, inputs + states, states, dtype=torch.float64)
        self.output: nn.Linear = nn.utils.skip_init(nn.Linear, states, outputs, dtype=torch.float64)
        with torch.no_grad():
            normal = torch.randn(states, inputs, generator=generator, dtype=torch.float64)
            Q, R = torch.linalg.qr(torch.randn(states, states, generator=generator, dtype=torch.float64))
            # Without the signs of R, Q would not be uniformly distributed.
            self.cell.weight.copy_(torch.cat([0.1 * normal, Q * R.diagonal().sign()], dim=1))
            self.output.weight.normal_(std=0.1, generator=generator)
            self.cell.bias.zero_()
            self.output.bias.zero_()

    def forward(self, x: Tensor, answers: int = 1) -> Tensor:
        """Outputs of the last ``answers`` steps of sequences ``(length, batch, inputs)``."""
        forward, feedback = self.cell.weight.split([self.inputs, self.cell.out_features], dim=1)
        # All inputs at once, and unbound rather than indexed: the gradient of an index is as large as all of them.
        driven = (x @ forward.mT + self.cell.bias).unbind(0)
        states = [torch.tanh(driven[0])]
        for drive in driven[1:]:
            states.append(torch.tanh(torch.addmm(drive, states[-1], feedback.mT)))
        return self.output(torch.stack(states[-answers:]))


#: error up to which a number counts as right, as in Martens & Sutskever (2011)
TOLERANCE = 0.04


@dataclass(frozen=True)
class Problem:
    """A kind of sequences with a right answer.

    Args:
        name: name of the problem
        inputs: width of the sequences
        outputs: width of the answers
        sample: ``(generator, length, batch)`` → sequences ``(length, batch, inputs)`` and answers, numbers
            ``(1, batch)`` or classes ``(answers, batch)``
        variance: variance of the answers, if they are numbers
        answers: number of steps at the end at which an answer is given
        varying: whether the length of a mini-batch is random, up to a tenth more than the given length
    """

    name: str
    inputs: int
    outputs: int
    sample: Callable[[torch.Generator, int, int], tuple[Tensor, Tensor]]
    variance: float | None = None
    answers: int = 1
    varying: bool = False

    def start(self, seed: int) -> tuple[Network, torch.Generator]:
        """New network and the generator of its mini-batches: the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        return Network(self.inputs, self.outputs, generator), generator

    def batches(
        self,
        generator: torch.Generator,
        length: int,
        device: str = "cpu",
        batch: int = BATCH,
        dtype: torch.dtype = torch.float64,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Mini-batches that are always new, so there is nothing to overfit."""
        while True:
            more = int(torch.randint(length // 10 + 1, (), generator=generator)) if self.varying else 0
            x, y = self.sample(generator, length + more, batch)
            yield x.to(device, dtype), y.to(device, dtype if self.variance is not None else y.dtype)

    def loss(self, model: Network, x: Tensor, y: Tensor) -> Tensor:
        """Mean squared error of numbers, or cross entropy of classes."""
        found = model(x, self.answers)
        if self.variance is not None:
            return nn.functional.mse_loss(found[..., 0], y)
        return nn.functional.cross_entropy(found.flatten(0, 1), y.flatten())

    @torch.no_grad()
    def wrong(self, model: Network, x: Tensor, y: Tensor) -> int:
        """Number of sequences with a wrong class anywhere in the answer, or a number that is off by more than 0.04.

        An answer that is not finite is wrong.
        """
        found = model(x, self.answers)
        right = found.argmax(-1) == y if self.variance is None else (found[..., 0] - y).abs() <= TOLERANCE
        right &= found.isfinite().all(-1)
        return int((~right).any(0).sum())


#: ``(generator, length, batch)`` → the two steps of each sequence that are marked, ``(batch,)`` each
Places = Callable[[torch.Generator, int, int], tuple[Tensor, Tensor]]


def first_half(generator: torch.Generator, length: int, batch: int) -> tuple[Tensor, Tensor]:
    """Draw two different steps of the first half of each sequence."""
    half = max(length // 2, 2)
    first = torch.randint(half, (batch,), generator=generator)
    return first, (first + torch.randint(1, half, (batch,), generator=generator)) % half


def early_marks(generator: torch.Generator, length: int, batch: int) -> tuple[Tensor, Tensor]:
    """Draw a step of the first tenth of each sequence, and a later one of its first half."""
    tenth = max(length // 10, 1)
    first = torch.randint(tenth, (batch,), generator=generator)
    return first, torch.randint(tenth, max(length // 2, tenth + 1), (batch,), generator=generator)


def marked_pairs(
    draw: Callable[[torch.Generator, int, int], Tensor], combine: Callable[[Tensor, Tensor], Tensor], places: Places
) -> Callable[[torch.Generator, int, int], tuple[Tensor, Tensor]]:
    """Sequences of numbers, two of which are marked; the answer is a function of these two."""

    def sample(generator: torch.Generator, length: int, batch: int) -> tuple[Tensor, Tensor]:
        values = draw(generator, length, batch)
        first, second = places(generator, length, batch)
        each = torch.arange(batch)
        marks = torch.zeros(length, batch, dtype=torch.float64)
        marks[first, each] = marks[second, each] = 1
        return torch.stack([values, marks], dim=-1), combine(values[first, each], values[second, each])[None]

    return sample


def uniform(generator: torch.Generator, length: int, batch: int) -> Tensor:
    return torch.rand(length, batch, generator=generator, dtype=torch.float64)


def centred(generator: torch.Generator, length: int, batch: int) -> Tensor:
    """Numbers that are uniform in [−½, ½]."""
    return uniform(generator, length, batch) - 0.5


#: variance of the sum of two numbers uniform in [−½, ½]
SUM = 1 / 6


def addition(width: float = 0.5, early: bool = False) -> Problem:
    """The addition problem, in the paper's words or as the author's later public code has it.

    Args:
        width: numbers are uniform in [−width, width], and the answer is their sum, scaled to have the variance ``SUM``;
            0.5 in the paper, 1 in the later code
        early: whether the first mark is in the first tenth, as in Hochreiter & Schmidhuber (1997), and not anywhere in
            the first half, as in the later code
    """

    def draw(generator: torch.Generator, length: int, batch: int) -> Tensor:
        return centred(generator, length, batch) * (2 * width)

    def combine(first: Tensor, second: Tensor) -> Tensor:
        return (first + second) / (2 * width)

    places = early_marks if early else first_half
    return Problem("addition", 2, 1, marked_pairs(draw, combine, places), variance=SUM)


ADDITION = addition()
#: share of the variance left unexplained below which the addition problem counts as solved: a loss of 0.01
SOLVED = 0.06


def train(
    *,
    seed: int,
    device: str,
    length: int,
    method: str,
    lr: float,
    iterations: int,
    stop: bool,
    warmup: int = 0,
    width: float = 0.5,
    early: bool = False,
    **options: float,
) -> Iterator[Row]:
    """Train on the addition problem; yield a row every 100 mini-batches with their mean loss and the share of variance
    that is left unexplained; with ``stop``, until solved.

    The learning rate grows linearly over the first ``warmup`` mini-batches. ``width`` and ``early`` are those of
    ``addition``.
    """
    problem = addition(width, early)
    model, generator = problem.start(seed)
    model.to(device)
    optimizer = training.optimizer(method, model, lr, seed=seed, blocks=Affine(), **options)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / warmup, 1.0)) if warmup else None
    batches = problem.batches(generator, length, device)
    steps = training.losses(optimizer, partial(problem.loss, model), batches, schedule)
    for row in training.averaged(steps, iterations, EVERY):
        unexplained = row["loss"] / SUM
        yield {**row, "unexplained": unexplained}
        if stop and unexplained < SOLVED:
            return
