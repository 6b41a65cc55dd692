"""Line search: how far to go along a direction."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: sufficient share of the decrease that the slope promises
ENOUGH = 1e-4
#: largest ratio of a step to the one tried before it
FARTHER = 10.0
MAX_TRIALS = 40
#: largest number of trials at which the function is low enough but still too steep
MAX_LOW = 8


@dataclass(frozen=True)
class Point:
    """Point at ``alpha`` along the direction, with the value and slope there."""

    alpha: float
    value: float
    slope: float


@dataclass(frozen=True)
class Found:
    """Accepted step: its length, the point it leads to, and value and gradient there."""

    alpha: float
    x: Tensor
    value: float
    gradient: Tensor


def search(
    value: Callable[[Tensor], float],
    gradient: Callable[[Tensor], Tensor],
    x: Tensor,
    start: float,
    direction: Tensor,
    slope: float,
    first: float,
    flatness: float,
    rounding: float,
) -> Found | None:
    """Find a step that satisfies the strong Wolfe conditions, by cubic interpolation.

    After it the function is lower by a share of what the slope promised, and at most ``flatness`` times as steep in
    either sense. If that is impossible, any step that makes the function lower is accepted. If values differ by
    rounding alone, the slopes decide. A function value that is not finite counts as too high.

    Args:
        value: the function
        gradient: its gradient, at the point of the last call of ``value``
        x: start of the search
        start: value of the function there
        direction: direction of the search
        slope: slope of the function along the direction, negative
        first: the step to try first
        flatness: number between 0 and 1
        rounding: largest difference of values that may be rounding
    """
    low = Point(0.0, start, slope)
    high: Point | None = None
    best: Found | None = None
    alpha = first
    lows = 0
    for _ in range(MAX_TRIALS):
        x_new = x + alpha * direction
        if not alpha > low.alpha or torch.equal(x_new, x):
            break
        f = value(x_new)
        if f == -math.inf:
            return Found(alpha, x_new, f, gradient(x_new))
        lower = f - start <= ENOUGH * alpha * slope and f <= low.value
        if not lower and not f - min(start, low.value) <= rounding:
            high = Point(alpha, f, math.nan)
            alpha = _shorter(low, high)
            continue
        g = gradient(x_new)
        s = float(g.dot(direction))
        flat = abs(s) <= flatness * abs(slope)
        if not math.isfinite(s) or not (lower or flat):
            high = Point(alpha, f if math.isfinite(s) else math.inf, math.nan)
            alpha = _shorter(low, high)
            continue
        lows += 1
        here = Point(alpha, f, s)
        if best is None or f <= best.value or flat:
            best = Found(alpha, x_new, f, g)
        if flat or lows >= MAX_LOW:
            break
        wanted = _cubic(low, here)
        if s < 0:
            width = alpha - low.alpha
            low = here
            if high is None:
                alpha = min(max(wanted if wanted > alpha else math.inf, alpha + 0.1 * width), FARTHER * alpha)
            else:
                alpha = _inside(wanted, alpha, high.alpha)
        else:
            high = here
            alpha = _inside(wanted, low.alpha, alpha)
    return best


def _shorter(low: Point, high: Point) -> float:
    """Minimum of the parabola through ``low``, with its slope, and ``high``; a tenth to a half of the way."""
    width = high.alpha - low.alpha
    if not math.isfinite(high.value):
        return low.alpha + 0.1 * width
    bend = 2 * (high.value - low.value - width * low.slope)
    wanted = -low.slope * width * width / bend if bend > 0 else 0.5 * width
    return low.alpha + min(max(wanted, 0.1 * width), 0.5 * width)


def _inside(wanted: float, a: float, b: float) -> float:
    margin = 0.05 * (b - a)
    return wanted if a + margin < wanted < b - margin else (a + b) / 2


def _cubic(p: Point, q: Point) -> float:
    """Minimum of the cubic with these values and slopes; NaN if it has none.

    >>> _cubic(Point(0.0, 4.0, -4.0), Point(1.0, 1.0, -2.0))
    2.0
    """
    width = q.alpha - p.alpha
    middle = p.slope + q.slope - 3 * (q.value - p.value) / width
    square = middle * middle - p.slope * q.slope
    if not square >= 0:
        return math.nan
    root = math.sqrt(square)
    below = q.slope - p.slope + 2 * root
    return q.alpha - width * (q.slope + root - middle) / below if below else math.nan
