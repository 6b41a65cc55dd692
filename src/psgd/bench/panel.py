"""A panel of small problems of many kinds, each with a budget and a target, for optimizers as they come.

Targets were found by ``tools/panel_targets.py`` from AdamW and SGD with momentum 0.9 alone, with seeds that the
benchmark does not use. PSGD had no part in them. The rule:

* functions of few numbers and factorisations, whose least value is zero: 1e-6 of the loss at the start, or 1e-4 of it
  where neither of the two comes to 1e-6 within the budget at any step size of the grid below
* all others: the value that AdamW has after 60 % of the budget, at the best of nine constant step sizes from 1e-4 to 1,
  two for each decade; the median of three seeds, rounded up to two digits

The budget counts gradients: a method that evaluates two for each step has half as many steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from . import nets, smooth
from .smooth import Batch, Instance

#: makes an optimizer for a model, with a learning rate or, for None, with the optimizer's own default
MakeOptimizer = Callable[[nn.Module, float | None], torch.optim.Optimizer]

#: share of the budget from one look at the value to the next
EVERY = 0.02
#: kinds for which the documentation recommends curvature; whitening for all others
CURVATURE = ("function", "regression", "factorisation", "physics")


@dataclass(frozen=True)
class PanelProblem:
    """A problem with a budget and a target.

    Args:
        name: name in tables and for ``--model``
        kind: ``function``, ``regression``, ``factorisation``, ``physics`` or ``network``
        make: makes the problem from a seed; a function at the top of a module
        evaluations: budget in evaluations of the gradient
        target: value below which the problem counts as solved
        random: whether anything depends on the seed
    """

    name: str
    kind: str
    make: Callable[[int], Instance]
    evaluations: int
    target: float
    random: bool = True

    @property
    def curvature(self) -> bool:
        """Whether the documentation recommends curvature for problems of this kind, and not whitening."""
        return self.kind in CURVATURE


@dataclass(frozen=True)
class Run:
    """End of a run.

    Args:
        reached: evaluations after which the value was seen below the target, or None
        evaluations: evaluations in all
        seconds: seconds of the steps, without looks at the value
        start: value before the first step
        value: value at the end
        finite: whether that is a finite number
    """

    reached: int | None
    evaluations: int
    seconds: float
    start: float
    value: float
    finite: bool


def look(instance: Instance, optimizer: torch.optim.Optimizer, every: int) -> Iterator[tuple[int, float, float]]:
    """Train without end, and yield evaluations, seconds and value about every ``every`` evaluations."""
    batches: Iterator[Batch] = repeat(()) if instance.batches is None else instance.batches
    count = 0

    def closure(batch: Batch) -> Tensor:
        nonlocal count
        count += 1
        optimizer.zero_grad()
        loss = instance.loss(batch)
        loss.backward()
        return loss.detach()

    seconds = 0.0
    while True:
        begin, until = time.perf_counter(), count + every
        while count < until:
            batch = next(batches)
            step: Any = optimizer.step
            step(lambda batch=batch: closure(batch))
        seconds += time.perf_counter() - begin
        yield count, seconds, instance.value()


def run(
    problem: PanelProblem,
    make_optimizer: MakeOptimizer,
    lr: float | None = None,
    seed: int = 0,
    *,
    target: float | None = None,
) -> Run:
    """Train until the target is reached, the budget is spent, or the value is not finite.

    Args:
        problem: one of ``PROBLEMS``
        make_optimizer: makes the optimizer from the model and ``lr``
        lr: step size, or None for the optimizer's own
        seed: seed of the problem, also for what the model draws while it is trained
        target: a target instead of the problem's
    """
    goal = problem.target if target is None else target
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        instance = problem.make(seed)
        optimizer = make_optimizer(instance.model, lr)
        start = instance.value()
        looks = look(instance, optimizer, max(round(EVERY * problem.evaluations), 1))
        count, seconds, value = next(looks)
        while value >= goal and isfinite(value) and count < problem.evaluations:
            count, seconds, value = next(looks)
    return Run(count if value < goal else None, count, seconds, start, value, isfinite(value))


def _function(name: str, make: Callable[[int], Instance], evaluations: int, target: float) -> PanelProblem:
    return PanelProblem(name, "function", make, evaluations, target, random=False)


#: the panel, in the order of the tables
PROBLEMS: dict[str, PanelProblem] = {
    problem.name: problem
    for problem in (
        _function("rosenbrock", smooth.rosenbrock, 3000, 2.5e-5),
        _function("beale", smooth.beale, 2000, 1.5e-5),
        _function("chain", smooth.chain, 5000, 1.9e-5),
        PanelProblem("quadratic", "function", smooth.quadratic, 2000, 2.1e-6),
        PanelProblem("regression", "regression", smooth.regression, 3000, 0.097),
        PanelProblem("logistic", "regression", smooth.logistic, 2000, 0.13),
        PanelProblem("tensor", "factorisation", smooth.tensor, 2000, 1.1e-6),
        PanelProblem("sensing", "factorisation", smooth.sensing, 2000, 1.1e-6),
        PanelProblem("physics", "physics", nets.physics, 1500, 8.3e-5),
        PanelProblem("mlp", "network", nets.mlp, 2000, 0.0068),
        PanelProblem("spirals", "network", nets.spirals, 3000, 0.073),
        PanelProblem("cnn", "network", nets.cnn, 800, 0.45),
        PanelProblem("transformer", "network", nets.transformer, 500, 0.11),
        PanelProblem("recurrent", "network", nets.recurrent, 600, 0.00048),
        PanelProblem("autoencoder", "network", nets.autoencoder, 2000, 0.0041),
        PanelProblem("embedding", "network", nets.embedding, 2000, 0.39),
    )
}
