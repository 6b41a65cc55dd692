"""Figure 2: the three criteria on random Hessians: definite or not, huge or tiny, with noise or without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
from matplotlib.figure import Figure as Picture

from ... import Dense, MaxAbs
from ...diagnostics import properties
from ..claim import Claim, Verdict
from ..drawing import COLORS
from ..figure import Figure, Size
from ..hessians import SCENARIOS, N, hessian, pairs
from ..run import Result, Results, Row, Run, of_first_seed
from ..training import CRITERIA, NAMES

MEASURES = ("spread gain", "mean |λ|", "noise gain")
C1, C2, C3 = (NAMES[criterion] for criterion in CRITERIA)
NOISE_FREE = [number for number, scenario in enumerate(SCENARIOS, 1) if not scenario.noisy]
NOISY = [number for number, scenario in enumerate(SCENARIOS, 1) if scenario.noisy]
INDEFINITE = [number for number, scenario in enumerate(SCENARIOS, 1) if not scenario.definite]
POINTS = 100


def fit(*, seed: int, device: str, method: str, samples: int, precond_lr: float) -> Iterator[Row]:
    """Fit all eight scenarios at once, as one stack of preconditioners."""
    generator = torch.Generator().manual_seed(seed)
    H = torch.stack([hessian(scenario, generator) for scenario in SCENARIOS])
    noisy = torch.tensor([scenario.noisy for scenario in SCENARIOS])
    Q = Dense().init((N,), batch=len(SCENARIOS), dtype=torch.float64, device=device)
    stream = pairs(H.to(device), noisy.to(device), generator)
    every = max(samples // POINTS, 1)
    for seen in range(every, samples + 1, every):
        for dtheta, dgrad in islice(stream, every):
            Q.descend_(CRITERIA[method](Q, dtheta, dgrad), precond_lr, MaxAbs())
        factors = Q.dense().cpu()
        row: Row = {"pairs": seen}
        for number, (q, h) in enumerate(zip(factors, H, strict=True), 1):
            found = properties(q.mT @ q, h)
            values = (found.eigenvalue_spread_gain, found.mean_abs_eigenvalue, found.noise_suppression_gain)
            row |= {f"{number}: {measure}": value for measure, value in zip(MEASURES, values, strict=True)}
        yield row


def runs(size: Size, seed: int) -> list[Run]:
    settings = {"samples": size["pairs"], "precond_lr": 0.01}
    return [
        Run("fig2", NAMES[criterion], seed, fit, {"method": criterion, **settings}, POINTS, size["pairs"] * 6e-4)
        for criterion in CRITERIA
    ]


def draw(results: Results) -> Picture:
    picture = Picture(figsize=(9, 15), layout="constrained")
    panels = picture.subplots(len(SCENARIOS), len(MEASURES), sharex=True)
    for number, (scenario, row) in enumerate(zip(SCENARIOS, panels, strict=True), 1):
        for measure, panel in zip(MEASURES, row, strict=True):
            for result in of_first_seed(results).values():
                values = result.column(f"{number}: {measure}")
                color = COLORS[str(result.settings["method"])]
                panel.semilogy(result.column("pairs"), values, color=color, linewidth=1.2, label=result.label)
            panel.axhline(1, color="black", linewidth=0.5)
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
        row[1].set_title(f"{number}: {scenario}", fontsize="small")
    for measure, top, bottom in zip(
        ("eigenvalue spread gain", "mean absolute eigenvalue", "noise suppression gain"),
        panels[0],
        panels[-1],
        strict=True,
    ):
        bottom.set_xlabel("pairs")
        top.annotate(measure, (0.5, 1.25), xycoords="axes fraction", ha="center", weight="bold")
    picture.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    return picture


def _at_end(result: Result, measure: str, rows: Sequence[int]) -> list[float]:
    return [result.last(f"{number}: {measure}", 5) for number in rows]


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g}"


Limits = tuple[float, float]


def within(rows: Sequence[int], spread: Limits, size: Limits, noise: Limits) -> Callable[[Result], Verdict]:
    """Check that all three measures are between their limits in all the given rows."""

    def check(result: Result) -> Verdict:
        holds, texts = True, []
        for measure, (low, high) in zip(MEASURES, (spread, size, noise), strict=True):
            values = _at_end(result, measure, rows)
            holds = holds and low <= min(values) and max(values) <= high
            texts.append(f"{measure} {_range(values)}")
        return Verdict(holds, ", ".join(texts))

    return check


def similar_rates(result: Result) -> Verdict:
    """Compare pairs until mean |λ| is between ½ and 2, for the tiny and the huge noise-free Hessian of each kind."""
    times = [
        next((row["pairs"] for row in result.rows if 0.5 <= row[f"{number}: mean |λ|"] <= 2), float("inf"))
        for number in NOISE_FREE
    ]
    ratios = [max(a, b) / min(a, b) for a, b in zip(times[::2], times[1::2], strict=True)]
    holds = max(times) < float("inf") and max(ratios) <= 2
    return Verdict(holds, f"{_range(times)} pairs; the slower takes up to {max(ratios):.2g} times as long")


def fails(result: Result) -> Verdict:
    """Whether no preconditioner is useful: eigenvalues both closer together and of size about one."""
    gains = _at_end(result, "spread gain", INDEFINITE)
    sizes = _at_end(result, "mean |λ|", INDEFINITE)
    useful = [gain > 1.5 and 0.5 < size < 2 for gain, size in zip(gains, sizes, strict=True)]
    return Verdict(not any(useful), f"spread gain {_range(gains)}, mean |λ| {_range(sizes)}")


def limited(c1: Result, c2: Result, c3: Result) -> Verdict:
    """Whether neither brings the eigenvalues of both definite noise-free Hessians as close together as criterion 3."""
    rows = NOISE_FREE[:2]
    sizes = {r.label: _at_end(r, "mean |λ|", rows) for r in (c1, c2, c3)}
    gains = {r.label: min(_at_end(r, "spread gain", rows)) for r in (c1, c2, c3)}
    holds = gains[c3.label] > max(gains[c1.label], gains[c2.label])
    parts = [f"{name}: spread gain ≥ {gains[name]:.3g}, mean |λ| {_range(sizes[name])}" for name in gains]
    return Verdict(holds, "; ".join(parts))


def price_of_spread(c1: Result, c3: Result) -> Verdict:
    gains = [r.last("3: spread gain", 5) for r in (c1, c3)]
    noise = [r.last("3: noise gain", 5) for r in (c1, c3)]
    text = f"spread gain {gains[0]:.3g} against {gains[1]:.3g}, noise gain {noise[0]:.3g} against {noise[1]:.3g}"
    return Verdict(gains[0] > gains[1] and noise[0] < noise[1], text)


FIGURE = Figure(
    name="fig2",
    title="Three criteria on random Hessians",
    about="10×10 Hessians with normal elements of variance σ², known only by pairs (δθ, δg); the definite "
    "ones have the absolute eigenvalues of such a matrix. Rows: positive definite "
    "or indefinite; noise-free or with a signal-to-noise ratio of −20 dB; tiny or huge. Columns: the three desirable "
    "properties, all measured against the true Hessian. From P = I with a normalised step size of 0.01.",
    quick={"pairs": 10_000, "seeds": 5},
    full={"pairs": 20_000, "seeds": 5},
    runs=runs,
    draw=draw,
    claims=(
        Claim(
            "c3_normalises",
            "Criterion 3, noise-free: large spread gains, eigenvalues normalised to about 1, gradient noise not "
            "amplified over that of Newton's method.",
            (C3,),
            within(NOISE_FREE, spread=(3, float("inf")), size=(0.8, 1.25), noise=(0.8, float("inf"))),
        ),
        Claim(
            "c3_damps_noise",
            "Criterion 3, noisy: the spread neither improves nor worsens; eigenvalues under 1 and noise suppression "
            "over 1 instead.",
            (C3,),
            within(NOISY, spread=(0.7, 1.5), size=(0, 1), noise=(1, float("inf"))),
        ),
        Claim(
            "c3_equivariant",
            "Criterion 3 converges at similar rates for tiny and huge Hessians.",
            (C3,),
            similar_rates,
        ),
        Claim("c1_fails_indefinite", "Criterion 1 fails on indefinite Hessians.", (C1,), fails),
        Claim("c2_fails_indefinite", "Criterion 2 fails on indefinite Hessians.", (C2,), fails),
        Claim(
            "c1_c2_limited",
            "On positive definite Hessians without noise, criteria 1 and 2 do less than criterion 3.",
            (C1, C2, C3),
            limited,
        ),
        Claim(
            "c1_amplifies_noise",
            "In row 3 criterion 1 has a larger spread gain than criterion 3, and pays with less noise suppression.",
            (C1, C3),
            price_of_spread,
        ),
    ),
)
