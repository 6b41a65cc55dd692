"""The eight problems that need a long memory with sequences that are twice as long, by the recipe for short ones."""

from __future__ import annotations

from math import isfinite

from ..claim import Claim
from ..figure import Figure, Size, Table
from ..long_memory import PROBLEMS, RECIPE, train
from ..recurrent import EVERY
from ..run import Results, Run
from .rnn_suite import OURS, SECONDS, SHARES, draw, solved_after, solves_all

NAME = "rnn-long"


def runs(size: Size, seed: int) -> list[Run]:
    length, iterations = size["length"], size["iterations"]
    return [
        Run(
            NAME,
            label,
            seed,
            train,
            {"problem": problem, "method": "PSGD", **RECIPE, "length": length, "iterations": iterations},
            iterations // EVERY,
            iterations * length * SECONDS["PSGD"] * SHARES.get(problem, 0.1),
        )
        for problem, label in zip(PROBLEMS, OURS, strict=True)
    ]


def tables(results: Results) -> list[Table]:
    rows = []
    for problem, label in zip(PROBLEMS, OURS, strict=True):
        found = [by_label[label] for by_label in results.values()]
        times = [solved_after(result) for result in found]
        wrong = [min(result.column("wrong")) for result in found]
        memory = [min(result.column("memory")) for result in found]
        rows.append(
            [
                problem,
                ", ".join(f"{time:,.0f}" if isfinite(time) else "not solved" for time in times),
                ", ".join(f"{share:.2g}" for share in wrong),
                ", ".join(f"{length:.2g}" for length in memory),
            ]
        )
    caption = "For each seed: mini-batches until the problem was solved, least share of wrong answers, least memory"
    return [Table(caption, ("problem", "solved after", "wrong", "memory"), rows)]


FIGURE = Figure(
    name=NAME,
    title="Eight problems with twice as long sequences",
    about="The recurrent network with 100 states and the recipe of the eight problems, with sequences of 200 steps "
    "instead of 100 (60 instead of 30 in the short version). The recipe was found with 100 steps. What it says about "
    "the start follows the length: no slow plane turns by more than half a turn within a sequence, and inputs are so "
    "small that an untrained network has the same memory as with 100 steps. Nothing else is changed. A run ends when "
    "the problem is solved.",
    quick={"length": 60, "iterations": 4_000, "seeds": 1},
    full={"length": 200, "iterations": 8_000, "seeds": 2},
    runs=runs,
    draw=draw,
    tables=tables,
    claims=(
        Claim(
            "solves_twice_as_long",
            "The recipe solves all eight problems with sequences that are twice as long, each on at least 80 % of the "
            "seeds.",
            OURS,
            solves_all,
            together=True,
            source="ours",
        ),
    ),
)
