"""Interpolation in a line search."""

from __future__ import annotations

import math

import pytest

from psgd.minimizing.line_search import Point, _cubic


def on(cubic: tuple[float, ...], alpha: float) -> Point:
    a, b, c, d = cubic
    return Point(alpha, ((a * alpha + b) * alpha + c) * alpha + d, (3 * a * alpha + 2 * b) * alpha + c)


@pytest.mark.parametrize("cubic", [(1.0, 0.0, -3.0, 2.0), (-1.0, 6.0, -9.0, 5.0), (0.0, 2.0, -4.0, 1.0)], ids=str)
@pytest.mark.parametrize("at", [(0.0, 0.5), (0.0, 3.0), (0.25, 2.0)], ids=str)
def test_two_points_find_the_minimum_of_a_cubic(cubic: tuple[float, ...], at: tuple[float, float]):
    """These have it at 1, between the points or beyond them; it is never the maximum."""
    assert _cubic(*(on(cubic, alpha) for alpha in at)) == pytest.approx(1)


def test_a_cubic_may_have_no_minimum():
    assert math.isnan(_cubic(*(on((1.0, 0.0, 3.0, 0.0), alpha) for alpha in (0.0, 1.0))))
    assert math.isnan(_cubic(*(on((0.0, 0.0, -1.0, 0.0), alpha) for alpha in (0.0, 1.0))))
