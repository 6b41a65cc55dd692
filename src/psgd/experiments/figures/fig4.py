"""Figure 4: the zebra stripes that are to be learned."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.figure import Figure as Picture

from .. import zebra
from ..claim import Claim, Verdict
from ..drawing import draw_pattern
from ..figure import Figure, Size
from ..run import Result, Results, Row, Run

PATTERN = "the pattern"
POINTS = 400


def describe(*, seed: int, device: str, points: int) -> Iterator[Row]:
    """Yield for each x₂ the share of class 1, and how often the class changes along x₁."""
    grid = zebra.grid(points)
    for x2, labels in zip(grid[:, 0, 1].tolist(), zebra.label(grid), strict=True):
        changes = int((labels[1:] != labels[:-1]).sum())
        yield {"x2": x2, "class 1": float(labels.mean()), "changes": changes}


def runs(size: Size, seed: int) -> list[Run]:
    return [Run("fig4", PATTERN, seed, describe, {"points": POINTS}, POINTS, 0.1)]


def draw(results: Results) -> Picture:
    picture = Picture(figsize=(4.5, 4.5), layout="constrained")
    draw_pattern(picture.subplots(), zebra.label(zebra.grid(800)))
    return picture


def interleaved(pattern: Result) -> Verdict:
    changes = pattern.column("changes")
    share = sum(pattern.column("class 1")) / len(pattern.rows)
    text = f"{min(changes):g} to {max(changes):g} boundaries along x₁, {share:.1%} of the square in class 1"
    return Verdict(min(changes) >= 5 and 0.3 < share < 0.7, text)


FIGURE = Figure(
    name="fig4",
    title="The zebra stripes",
    about="The class of a point (x₁, x₂) of the unit square is the remainder of round(10^x₁ − 10^x₂) after division "
    "by 2: white is class 1, black is class 0.",
    quick={"seeds": 1},
    full={"seeds": 1},
    runs=runs,
    draw=draw,
    claims=(Claim("interleaved", "Sharp, interleaved class boundaries.", (PATTERN,), interleaved),),
)
