"""The eight long-memory problems that the paper cites, and the recurrent network that is to learn them.

They go back to Hochreiter & Schmidhuber (1997) and Martens & Sutskever (2012). All ask for something that was near
the beginning of a long sequence, so that a network without a memory does no better than one that ignores its input.
Addition is the problem of Section VI.D.
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
#: settings of PSGD, the same for every seed and for every problem. Steps are much shorter than those of P, at first
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
    """

    name: str
    inputs: int
    outputs: int
    sample: Callable[[torch.Generator, int, int], tuple[Tensor, Tensor]]
    variance: float | None = None
    answers: int = 1

    def start(self, seed: int) -> tuple[Network, torch.Generator]:
        """New network and the generator of its mini-batches: the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        return Network(self.inputs, self.outputs, generator), generator

    def batches(
        self, generator: torch.Generator, length: int, device: str = "cpu", batch: int = BATCH
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Mini-batches that are always new, so there is nothing to overfit."""
        while True:
            x, y = self.sample(generator, length, batch)
            yield x.to(device), y.to(device)

    def loss(self, model: Network, x: Tensor, y: Tensor) -> Tensor:
        """Mean squared error of numbers, or cross entropy of classes."""
        found = model(x, self.answers)
        if self.variance is not None:
            return nn.functional.mse_loss(found[..., 0], y)
        return nn.functional.cross_entropy(found.flatten(0, 1), y.flatten())

    @torch.no_grad()
    def wrong(self, model: Network, x: Tensor, y: Tensor) -> float:
        """Share of sequences with a wrong class anywhere in the answer."""
        return float((model(x, self.answers).argmax(-1) != y).any(0).double().mean())

    @property
    def solved(self) -> float:
        """Level below which the problem counts as solved: 1 % of sequences wrong; for numbers, 6 % of their variance
        unexplained, which is a mean squared error of 0.01 for the addition problem."""
        return 0.01 if self.variance is None else 0.06


def _two_marks(generator: torch.Generator, length: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Marks ``(length, batch)`` at two different steps of the first half of each sequence, and the two steps."""
    half = max(length // 2, 2)
    first = torch.randint(half, (batch,), generator=generator)
    second = (first + torch.randint(1, half, (batch,), generator=generator)) % half
    marks = torch.zeros(length, batch, dtype=torch.float64)
    each = torch.arange(batch)
    marks[first, each] = marks[second, each] = 1
    return marks, first, second


def _pairs(
    draw: Callable[..., Tensor], combine: Callable[[Tensor, Tensor], Tensor]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Numbers, two of which are marked; the answer is a function of these two."""

    def sample(generator: torch.Generator, length: int, batch: int) -> tuple[Tensor, Tensor]:
        values = draw(generator, length, batch)
        marks, first, second = _two_marks(generator, length, batch)
        each = torch.arange(batch)
        return torch.stack([values, marks], dim=-1), combine(values[first, each], values[second, each])[None]

    return sample


def _uniform(generator: torch.Generator, length: int, batch: int) -> Tensor:
    return torch.rand(length, batch, generator=generator, dtype=torch.float64)


def _bits(generator: torch.Generator, length: int, batch: int) -> Tensor:
    return torch.randint(2, (length, batch), generator=generator).double() - 0.5


def _one_hot(symbols: Tensor, count: int) -> Tensor:
    return nn.functional.one_hot(symbols, count).double()


def _temporal_order(places: list[tuple[float, float]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Order of symbols A or B that are in the given parts of a sequence of four other symbols."""

    def sample(generator: torch.Generator, length: int, batch: int) -> tuple[Tensor, Tensor]:
        symbols = torch.randint(2, 6, (length, batch), generator=generator)
        answer = torch.zeros(batch, dtype=torch.long)
        each = torch.arange(batch)
        for begin, end in places:
            low = int(begin * length)
            at = torch.randint(low, max(int(end * length), low + 1), (batch,), generator=generator)
            which = torch.randint(2, (batch,), generator=generator)
            symbols[at, each] = which
            answer = 2 * answer + which
        return _one_hot(symbols, 6), answer[None]

    return sample


def _random_permutation(
    generator: torch.Generator, length: int, batch: int, symbols: int = 100
) -> tuple[Tensor, Tensor]:
    """First of two symbols, before others in random order, all different if the alphabet is large enough."""
    first = torch.randint(2, (1, batch), generator=generator)
    order = torch.rand(batch, -(-length // (symbols - 2)), symbols - 2, generator=generator).argsort(-1)
    others = 2 + order.flatten(1)[:, : length - 1].mT
    return _one_hot(torch.cat([first, others]), symbols), first


def _memorisation(count: int, alphabet: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """``count`` symbols, a long pause, a signal: then the symbols are to be repeated, one at each of the last steps."""

    def sample(generator: torch.Generator, length: int, batch: int) -> tuple[Tensor, Tensor]:
        blank, signal = alphabet, alphabet + 1
        symbols = torch.full((length + 2 * count, batch), blank)
        symbols[:count] = torch.randint(alphabet, (count, batch), generator=generator)
        symbols[-count - 1] = signal
        return _one_hot(symbols, alphabet + 2), symbols[:count]

    return sample


#: variances of the sum of two numbers uniform in [−½, ½], and of the product of two uniform in [0, 1]
_SUM, _PRODUCT = 1 / 6, 1 / 9 - 1 / 16

PROBLEMS = {
    problem.name: problem
    for problem in (
        Problem("addition", 2, 1, _pairs(lambda *a: _uniform(*a) - 0.5, torch.add), variance=_SUM),
        Problem("multiplication", 2, 1, _pairs(_uniform, torch.mul), variance=_PRODUCT),
        Problem("XOR", 2, 2, _pairs(_bits, lambda a, b: (a != b).long())),
        Problem("temporal order, 2 symbols", 6, 4, _temporal_order([(0.1, 0.2), (0.5, 0.6)])),
        Problem("temporal order, 3 symbols", 6, 8, _temporal_order([(0.1, 0.2), (0.3, 0.4), (0.6, 0.7)])),
        Problem("random permutation", 100, 2, _random_permutation),
        Problem("5-bit memorisation", 4, 2, _memorisation(5, 2), answers=5),
        Problem("20-bit memorisation", 7, 5, _memorisation(10, 5), answers=10),
    )
}


def train(
    *,
    seed: int,
    device: str,
    problem: str,
    length: int,
    method: str,
    lr: float,
    iterations: int,
    stop: bool,
    warmup: int = 0,
    **options: float,
) -> Iterator[Row]:
    """Yield a row every 100 mini-batches with their mean loss and the share of errors; with ``stop``, until solved.

    The learning rate grows linearly over the first ``warmup`` mini-batches.
    """
    task = PROBLEMS[problem]
    model, generator = task.start(seed)
    model.to(device)
    # No run has this seed; a generator uses 32 bits of it.
    tests = next(task.batches(torch.Generator().manual_seed(2**31 + seed), length, device, TEST))
    optimizer = training.optimizer(method, model, lr, seed=seed, blocks=Affine(), **options)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / warmup, 1.0)) if warmup else None
    batches = task.batches(generator, length, device)
    steps = training.losses(optimizer, partial(task.loss, model), batches, schedule)
    for row in training.averaged(steps, iterations, EVERY):
        wrong = task.wrong(model, *tests) if task.variance is None else row["loss"] / task.variance
        yield {**row, "wrong": wrong}
        if stop and wrong < task.solved:
            return
