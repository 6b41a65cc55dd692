"""Minimisation without noise: preconditioned conjugate directions and a line search."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..probes.noise import Noise
from . import result
from .line_search import search
from .metric import Metric
from .objective import Objective

Reason = tuple[int, bool, str]


@dataclass(frozen=True)
class Limits:
    """Limits at which to stop; ``ftol`` is None if only rounding is to stop the minimisation."""

    gtol: float
    ftol: float | None
    xtol: float
    maxiter: int
    maxfun: float


@dataclass
class State:
    x: Tensor
    f: float
    g: Tensor
    nit: int = 0


#: function that is called after each iteration; returns a reason to stop, or None
Watch = Callable[[State], "Reason | None"]


def descend(
    objective: Objective, metric: Metric, limits: Limits, probes: int, seed: int, watch: Watch
) -> tuple[State, Reason]:
    """Minimise, and return why it stopped.

    A direction is ``−P g``, made conjugate to the one before it (Hager and Zhang's formula, with ``P`` for the
    identity): if ``P`` is the inverse Hessian, this changes nothing, and if ``P`` can represent little of it, as a
    diagonal one, this makes up for much of what is missing. ``Q`` is then fitted to the pair ``(δθ, δg)`` of each step,
    and to ``probes`` more in random directions.
    """
    x = objective.start
    f = objective.value(x)
    if not math.isfinite(f):
        raise ValueError(f"x0: fun is {f} there; minimize wants to start where it is finite")
    now = State(x, f, objective.gradient(x))
    if not bool(torch.isfinite(now.g).all()):
        raise ValueError("x0: the gradient is not finite there; minimize wants to start where it is")
    ends = Ends(limits, now)
    directions = Directions(metric)
    eps = float(torch.finfo(x.dtype).eps)
    flatness = 0.5 if metric.descents > 1 else 0.1
    while True:
        reason = ends.reason(now, coarse=objective.refinable)
        if reason is None and objective.nfev >= limits.maxfun:
            reason = result.MAXFUN
        found = None
        if reason is None:
            for d, slope, first in directions.to_try(now.g):
                rounding = 4 * eps * abs(now.f)
                found = search(objective.value, objective.gradient, now.x, now.f, d, slope, first, flatness, rounding)
                if found is not None:
                    break
            else:
                lowered = 0.5 * directions.decrement
                reason = result.VALUE if ends.is_rounding(lowered, now.f) else result.LINE_SEARCH
        if found is None:
            assert reason is not None
            if reason not in REFINED or not objective.refine():
                return now, reason
            now.g = objective.gradient(now.x)
            directions.last = None
            ends.small, ends.step, ends.slow = 0, math.inf, False
            continue
        step, change, before = found.x - now.x, found.gradient - now.g, now.f
        now.x, now.f, now.g = found.x, found.value, found.gradient
        now.nit += 1
        if (reason := watch(now)) is not None:
            return now, reason
        ends.saw(step, before, now)
        noise = Noise(now.nit)
        for k in range(probes):
            metric.fit(*objective.product(now.x, now.g, noise(now.x, seed, k)))
        metric.fit(step, change)
        directions.last = (d, change)
        directions.far = found.alpha if metric.unit is None else 0.0


#: reasons to stop that a gradient by forward differences may give too early
REFINED = (result.GRADIENT, result.VALUE, result.STEP, result.LINE_SEARCH)


#: number of iterations in a row with too small a change: for ``ftol``, and if only rounding is to stop it
SMALL, ROUNDED = 3, 10


class Ends:
    """Decides when to stop."""

    def __init__(self, limits: Limits, start: State) -> None:
        self.limits = limits
        kind = torch.finfo(start.x.dtype)
        self.eps = float(kind.eps)
        self.lowest = -math.sqrt(kind.max) * max(1.0, abs(start.f))
        #: number of iterations in a row that changed the function by no more than ``ftol``
        self.small = 0
        #: whether the last iteration changed the function by no more than the square root of eps
        self.slow = False
        #: the last step, relative to ``xtol``
        self.step = math.inf

    def saw(self, step: Tensor, before: float, now: State) -> None:
        """Take note of an iteration."""
        ftol = self.limits.ftol
        scale = max(abs(now.f), abs(before), 0.0 if ftol is None else 1.0)
        self.small = self.small + 1 if before - now.f <= (self.eps if ftol is None else ftol) * scale else 0
        self.slow = before - now.f <= math.sqrt(self.eps) * max(abs(now.f), abs(before), 1.0)
        self.step = float(step.abs().amax()) / max(1.0, float(now.x.abs().amax()))

    def reason(self, now: State, coarse: bool) -> Reason | None:
        """Reason to stop, or None.

        Args:
            now: the present state
            coarse: whether the gradient is too coarse for strict limits, and can be made finer
        """
        limits = self.limits
        if now.f <= self.lowest:
            return result.UNBOUNDED
        if float(now.g.abs().amax()) <= (max(limits.gtol, self.eps ** (1 / 3)) if coarse else limits.gtol):
            return result.GRADIENT
        if self.small >= (ROUNDED if limits.ftol is None else SMALL) or (coarse and self.slow):
            return result.VALUE
        if self.step <= limits.xtol:
            return result.STEP
        return result.MAXITER if now.nit >= limits.maxiter else None

    def is_rounding(self, lowered: float, f: float) -> bool:
        return lowered <= 64 * self.eps * max(1.0, abs(f))


class Directions:
    """Directions of descent, in the order in which they are to be tried."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        #: last direction, and how the gradient changed along it
        self.last: tuple[Tensor, Tensor] | None = None
        #: length of the last step along a gradient that does not change, from which ``P`` learns nothing
        self.far = 0.0
        #: ``gᵀ P g``, twice what a quadratic function would still fall
        self.decrement = math.inf

    def to_try(self, g: Tensor) -> Iterator[tuple[Tensor, float, float]]:
        """Directions of descent, each with the slope along it and the step to try first.

        If even ``−P g`` fails, ``P`` is reset, and the gradient itself is tried last.
        """
        if self.metric.unit is not None:
            Pg = self.metric.precondition(g)
            self.decrement = float(g.dot(Pg))
            if 0 < self.decrement < math.inf:
                if self.last is not None:
                    d = Pg.neg().add_(self.last[0], alpha=self._beta(g, Pg, *self.last))
                    if (slope := float(g.dot(d))) <= -0.05 * self.decrement:
                        yield d, slope, 1.0
                yield -Pg, -self.decrement, 1.0
            self.metric.reset()
        largest = float(g.abs().amax())
        size = largest * float((g / largest).norm())  # also if squares overflow
        if size * size < torch.finfo(g.dtype).max:
            yield -g, -size * size, max(self.far, 1.0 / max(1.0, size))
        else:
            yield g / -size, -size, 1.0

    def _beta(self, g: Tensor, Pg: Tensor, d: Tensor, change: Tensor) -> float:
        curvature = float(d.dot(change))
        if not curvature > 0:
            return 0.0
        stretch = float(change.dot(self.metric.precondition(change))) / curvature
        beta = (float(change.dot(Pg)) - 2 * stretch * float(g.dot(d))) / curvature
        return beta if math.isfinite(beta) else 0.0
