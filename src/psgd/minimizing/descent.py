"""Minimisation without noise: preconditioned conjugate directions and a line search."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..noise import Noise
from . import result
from .line_search import search
from .metric import Metric
from .objective import Objective

Reason = tuple[int, bool, str]


@dataclass(frozen=True)
class Limits:
    """When to stop; ``ftol`` is None where only rounding is to end it."""

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


#: tells of each iteration; returns why to stop, or None
Watch = Callable[[State], "Reason | None"]


def descend(
    objective: Objective, metric: Metric, limits: Limits, probes: int, seed: int, watch: Watch
) -> tuple[State, Reason]:
    """Minimise, and say why it ended.

    A direction is ``−P g``, made conjugate to the one before it (Hager and Zhang's formula, with ``P`` for the
    identity): where ``P`` is the inverse Hessian that changes nothing, and where ``P`` has little room, as a diagonal
    one has, it makes up for much of what is missing. The pair ``(δθ, δg)`` of each step then is what ``Q`` is fitted
    to; ``probes`` more are measured in random directions.
    """
    x = objective.start
    f = objective.value(x)
    if not math.isfinite(f):
        raise ValueError(f"x0: fun is {f} there; minimize wants to start where it is finite")
    now = State(x, f, objective.gradient(x))
    if not bool(torch.isfinite(now.g).all()):
        raise ValueError("x0: the gradient is not finite there; minimize wants to start where it is")
    lowest = -math.sqrt(torch.finfo(x.dtype).max) * max(1.0, abs(f))
    eps = float(torch.finfo(x.dtype).eps)
    flatness = 0.5 if metric.descents > 1 else 0.1
    last: tuple[Tensor, Tensor] | None = None  # the direction before, and how the gradient changed along it
    small = 0
    far = 0.0  # the last step along a gradient that does not change, of which P learns nothing
    while True:
        steepest = float(now.g.abs().amax())
        if steepest <= limits.gtol or (objective.refinable and steepest <= eps ** (1 / 3)):
            if not objective.refine():
                return now, result.GRADIENT
            now.g, last = objective.gradient(now.x), None
            continue
        if now.nit >= limits.maxiter:
            return now, result.MAXITER
        if objective.nfev >= limits.maxfun:
            return now, result.MAXFUN
        found, d, slope = None, now.g, -0.0
        for d, first in _directions(metric, now.g, last, far):
            slope = float(now.g.dot(d))
            if slope < 0 and math.isfinite(slope):
                found = search(
                    objective.value, objective.gradient, now.x, now.f, d, slope, first, flatness, 4 * eps * abs(now.f)
                )
            if found is not None:
                break
        if found is None:
            if objective.refine():
                now.g, last = objective.gradient(now.x), None
                metric.reset()
                continue
            converged = small > 0 or abs(slope) <= 64 * eps * max(1.0, abs(now.f))
            return now, result.VALUE if converged else result.LINE_SEARCH
        step, change = found.x - now.x, found.gradient - now.g
        before = now.f
        now.x, now.f, now.g = found.x, found.value, found.gradient
        now.nit += 1
        if now.f <= lowest:
            return now, result.UNBOUNDED
        if (reason := watch(now)) is not None:
            return now, reason
        scale = max(abs(now.f), abs(before), 0.0 if limits.ftol is None else 1.0)
        tolerance = eps if limits.ftol is None else limits.ftol
        small = small + 1 if before - now.f <= tolerance * scale else 0
        if small >= 3 and float(now.g.abs().amax()) > limits.gtol:
            return now, result.VALUE
        if float(step.abs().amax()) <= limits.xtol * max(1.0, float(now.x.abs().amax())):
            return now, result.STEP
        noise = Noise(now.nit)
        for k in range(probes):
            metric.fit(*objective.product(now.x, now.g, noise(now.x, seed, k)))
        metric.fit(step, change)
        last = (d, change)
        far = found.alpha if metric.unit is None else 0.0


def _directions(
    metric: Metric, g: Tensor, last: tuple[Tensor, Tensor] | None, far: float
) -> Iterator[tuple[Tensor, float]]:
    """Directions to try, one after the other, each with the step to try first."""
    Pg = metric.precondition(g)
    if metric.unit is not None:
        if last is not None:
            conjugate = _conjugate(metric, g, Pg, *last)
            if conjugate is not None:
                yield conjugate, 1.0
        yield -Pg, 1.0
        metric.reset()
    yield -g, max(far, 1.0 / max(1.0, float(g.norm())))


def _conjugate(metric: Metric, g: Tensor, Pg: Tensor, d: Tensor, change: Tensor) -> Tensor | None:
    curvature = float(d.dot(change))
    if not curvature > 0:
        return None
    beta = (
        float(change.dot(Pg)) - 2 * float(change.dot(metric.precondition(change))) * float(g.dot(d)) / curvature
    ) / curvature
    new = beta * d - Pg
    return new if float(new.dot(g)) <= -0.05 * float(g.dot(Pg)) else None
