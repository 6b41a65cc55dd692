"""Eight problems that need a long memory: solved or not, by SGD, Adam and PSGD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

from matplotlib.figure import Figure as Picture

from ..claim import Claim, Verdict
from ..drawing import COLORS
from ..figure import Figure, Size, Table
from ..recurrent import EVERY, PROBLEMS, RECOMMENDED, train
from ..run import Result, Results, Run

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"method": "SGD", "lr": 0.1},
    "Adam": {"method": "Adam", "lr": 0.001},
    "PSGD": {"method": "c3", **RECOMMENDED},
}


def _label(problem: str, optimizer: str) -> str:
    return f"{problem}: {optimizer}"


def runs(size: Size, seed: int) -> list[Run]:
    common = {"length": size["length"], "iterations": size["iterations"], "stop": True}
    return [
        Run(
            "rnn-suite",
            _label(problem, name),
            seed,
            train,
            {"problem": problem, **options, **common},
            size["iterations"] // EVERY,
            size["iterations"] * size["length"] * (3.8e-4 if name == "PSGD" else 1.7e-4),
        )
        for problem in PROBLEMS
        for name, options in OPTIMIZERS.items()
    ]


def draw(results: Results) -> Picture:
    picture = Picture(figsize=(11, 5.5), layout="constrained")
    for panel, (name, problem) in zip(picture.subplots(2, 4).flat, PROBLEMS.items(), strict=True):
        for optimizer, options in OPTIMIZERS.items():
            for by_label in results.values():
                result = by_label[_label(name, optimizer)]
                values = [max(value, 1e-3) for value in result.column("wrong")]
                color = COLORS[options["method"]]
                marker = "." if len(values) == 1 else None
                panel.semilogy(
                    result.column("iteration"), values, color=color, linewidth=1.1, marker=marker, label=optimizer
                )
        panel.axhline(problem.solved, color="grey", linewidth=0.6)
        panel.set_ylim(8e-4, 2)
        panel.set_title(name, fontsize="medium")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    picture.supxlabel("mini-batches", fontsize="medium")
    picture.supylabel("share of wrong answers (unexplained variance)", fontsize="medium")
    handles, names = picture.axes[0].get_legend_handles_labels()
    unique = dict(zip(names, handles, strict=True))
    picture.axes[0].legend(unique.values(), unique.keys(), fontsize="x-small", frameon=False)
    return picture


def solved_after(result: Result) -> float:
    """Number of mini-batches until the problem is solved."""
    return result.first_below("wrong", PROBLEMS[str(result.settings["problem"])].solved)


def tables(results: Results) -> list[Table]:
    def cell(problem: str, optimizer: str) -> str:
        runs = [by_label[_label(problem, optimizer)] for by_label in results.values()]
        times = [time for time in map(solved_after, runs) if isfinite(time)]
        if not times:
            return f"not solved ({min(min(run.column('wrong')) for run in runs):.2g} wrong)"
        return f"solved {len(times)} of {len(runs)}, {min(times):,.0f}" + (
            f" to {max(times):,.0f}" if len(times) > 1 else ""
        )

    rows = [[problem, *(cell(problem, optimizer) for optimizer in OPTIMIZERS)] for problem in PROBLEMS]
    return [
        Table("Seeds on which each problem was solved, and after how many mini-batches", ("problem", *OPTIMIZERS), rows)
    ]


def count(results: Sequence[Result]) -> int:
    return sum(isfinite(solved_after(result)) for result in results)


def solves_all(*results: Result) -> Verdict:
    missing = [str(result.settings["problem"]) for result in results if not isfinite(solved_after(result))]
    text = f"{count(results)} of {len(results)} solved" + (f", not {' and not '.join(missing)}" if missing else "")
    return Verdict(not missing, text)


def solves_more_than(other: str) -> Callable[..., Verdict]:
    def check(*results: Result) -> Verdict:
        """Decide from PSGD's results, then those of the other."""
        half = len(results) // 2
        ours, theirs = count(results[:half]), count(results[half:])
        return Verdict(ours > theirs, f"{ours} problems against {theirs} by {other}")

    return check


OURS = [_label(problem, "PSGD") for problem in PROBLEMS]

FIGURE = Figure(
    name="rnn-suite",
    title="Eight problems that need a long memory",
    about="The recurrent network and the recommended settings of Figure 6 on eight problems, with SGD and Adam beside "
    "them, each at one common step size (0.1 and 0.001), not tuned for each problem. A problem is solved when fewer "
    "than 1 % of 1,000 fresh sequences are answered wrongly anywhere or, where the answer is a number, when less than "
    "6 % of its variance is unexplained; a run ends there. The length is that of the sequences, for memorisation that "
    "of the pause.",
    quick={"length": 30, "iterations": 2_000, "seeds": 1},
    full={"length": 100, "iterations": 5_000, "seeds": 1},
    runs=runs,
    draw=draw,
    tables=tables,
    claims=(
        Claim("c3_solves_all", "Preconditioned SGD solves all eight problems.", OURS, solves_all, source="ours"),
        *(
            Claim(
                f"more_than_{other.lower()}",
                f"Preconditioned SGD solves more of the problems than {other}.",
                [*OURS, *(_label(problem, other) for problem in PROBLEMS)],
                solves_more_than(other),
                source="paper" if other == "SGD" else "ours",
            )
            for other in ("SGD", "Adam")
        ),
    ),
)
