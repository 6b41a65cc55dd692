"""Figure 7: MNIST with a linear classifier."""

from __future__ import annotations

from math import isfinite

from ..claim import Claim, Verdict, when
from ..figure import Figure
from ..run import Result
from . import classifiers
from .classifiers import C1, C2, C3, SGD, SMALL_C1, SMALL_C2, SMALL_C3, SMALL_SGD, settled_error

GOOD = (SMALL_SGD, SGD, SMALL_C1, C2, SMALL_C3, C3)


def diverges(result: Result) -> Verdict:
    """Whether it becomes worse than a guess, and stays so."""
    loss = result.last("loss", 3)
    return Verdict(not isfinite(loss) or loss > 2.3, f"training loss {loss:.3g} at the end")


def slow(c2: Result, *good: Result) -> Verdict:
    """Whether its loss is the last to reach 0.5."""
    times = {result.label: result.first_below("loss", 0.5, "epoch") for result in (c2, *good)}
    others = [time for name, time in times.items() if name != c2.label]
    text = ", ".join(f"{name}: {when(time)}" for name, time in times.items())
    return Verdict(times[c2.label] > max(others), f"epochs to a loss of 0.5: {text}")


def reasonable(*results: Result) -> Verdict:
    text = classifiers.errors(results, settled_error)
    return Verdict(max(map(settled_error, results)) < 0.13, f"test error {text}")


def best(c3: Result, *others: Result) -> Verdict:
    text = classifiers.errors((c3, *others), settled_error)
    return Verdict(settled_error(c3) < min(map(settled_error, others)), f"test error {text}")


FIGURE = Figure(
    name="fig7",
    title="MNIST, linear classifier",
    about="Logistic regression on handwritten digits, a convex problem: mean training loss and test error at every "
    "tenth of an epoch. The preconditioner is the Kronecker product of one for 785 inputs and one for 10 outputs. In "
    "float32.",
    quick={"epochs": 4, "short_epochs": 1, "update_every": 1, "seeds": 1, "baseline_seeds": 1},
    full={"epochs": 4, "short_epochs": 4, "update_every": 1, "seeds": 5, "baseline_seeds": 5},
    runs=classifiers.runs_of("fig7", 0.01, (SMALL_SGD, SGD, SMALL_C3, C3), hidden=[], loss="cross entropy"),
    draw=classifiers.draw_of("cross entropy", (0.2, 3), (0.07, 0.5)),
    claims=(
        Claim("c1_diverges", "Preconditioner 1 with step size 0.1 diverges.", (C1,), diverges),
        Claim(
            "c2_slow",
            "Preconditioner 2 with step size 0.01 converges slowly.",
            (SMALL_C2, *GOOD),
            slow,
        ),
        Claim("others_reasonable", "All other settings perform reasonably well.", GOOD, reasonable),
        Claim(
            "c3_error",
            "Preconditioner 3 with step size 0.01 converges to a test error slightly under 0.08.",
            (SMALL_C3,),
            classifiers.error_under(0.08, settled_error),
        ),
        Claim(
            "c3_best",
            "Preconditioner 3 with step size 0.01 performs best.",
            (SMALL_C3, SMALL_SGD, SGD, SMALL_C1, SMALL_C2, C2, C3),
            best,
        ),
    ),
    digits=True,
)
