"""Eight problems that need a long memory: solved or not, by SGD, Adam, RMSProp, L-BFGS and PSGD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

from matplotlib.figure import Figure as Picture

from ..claim import SHARE, Claim, Verdict
from ..drawing import COLORS
from ..figure import Figure, Size, Table
from ..long_memory import PROBLEMS, RECIPE, SOLVED, train
from ..recurrent import EVERY
from ..run import Result, Results, Run

#: settings of each optimizer; the better of two learning rates counts, and L-BFGS searches along lines instead
OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"method": "SGD", "lr": lr} for lr in (0.03, 0.1)],
    "Adam": [{"method": "Adam", "lr": lr} for lr in (3e-4, 1e-3)],
    "RMSProp": [{"method": "RMSProp", "lr": lr} for lr in (1e-4, 3e-4)],
    "L-BFGS": [{"method": "L-BFGS", "lr": 1.0}],
    "PSGD": [{"method": "PSGD", **RECIPE}],
}
#: seconds per mini-batch and time step, approximately
SECONDS = {"PSGD": 2.5e-4, "L-BFGS": 1.5e-3} | dict.fromkeys(("SGD", "Adam", "RMSProp"), 1.2e-4)
#: share of the mini-batches after which PSGD is done, approximately; 0.1 for other problems
SHARES = {"20-bit memorisation": 1.0, "addition": 0.5, "multiplication": 0.4}
COLOR = COLORS | {"PSGD": COLORS["c3"], "L-BFGS": COLORS["c1"]}


def _labels(problem: str, optimizer: str) -> list[str]:
    """Labels of the runs of an optimizer on a problem, one for each learning rate."""
    settings = OPTIMIZERS[optimizer]
    if len(settings) == 1:
        return [f"{problem}: {optimizer}"]
    return [f"{problem}: {optimizer}, {options['lr']:g}" for options in settings]


def runs(size: Size, seed: int) -> list[Run]:
    """Runs of a seed; for the seeds after the first few only those of PSGD."""
    return [
        _run(size, seed, problem, name, label, options)
        for problem in PROBLEMS
        for name, settings in OPTIMIZERS.items()
        if name == "PSGD" or (name in size["others"] and seed < size["baseline_seeds"])
        for label, options in zip(_labels(problem, name), settings, strict=True)
    ]


def _run(size: Size, seed: int, problem: str, name: str, label: str, options: dict[str, Any]) -> Run:
    # A mini-batch of L-BFGS has about a dozen gradients.
    iterations = max(size["iterations"] // 10, EVERY) if name == "L-BFGS" else size["iterations"]
    share = SHARES.get(problem, 0.1) if name == "PSGD" else 1.0
    return Run(
        "rnn-suite",
        label,
        seed,
        train,
        {"problem": problem, **options, "length": size["length"], "iterations": iterations},
        iterations // EVERY,
        iterations * size["length"] * SECONDS[name] * share,
    )


def solved_after(result: Result) -> float:
    """Number of mini-batches until the problem is solved."""
    return result.first_below("wrong", SOLVED)


def draw(results: Results) -> Picture:
    picture = Picture(figsize=(11, 5.5), layout="constrained")
    longest = max(result.column("iteration")[-1] for by_label in results.values() for result in by_label.values())
    for panel, problem in zip(picture.subplots(2, 4).flat, PROBLEMS, strict=True):
        for optimizer in OPTIMIZERS:
            for by_label in results.values():
                for label in _labels(problem, optimizer):
                    if label not in by_label:
                        continue
                    result = by_label[label]
                    values = [max(value, 1e-3) for value in result.column("wrong")]
                    color = COLOR[optimizer]
                    marker = "." if len(values) == 1 else None
                    panel.plot(
                        result.column("iteration"), values, color=color, linewidth=1.1, marker=marker, label=optimizer
                    )
        panel.axhline(SOLVED, color="grey", linewidth=0.6)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlim(0.8 * EVERY, 1.2 * max(longest, 2 * EVERY))
        panel.set_ylim(8e-4, 2)
        panel.set_title(problem, fontsize="medium")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    picture.supxlabel("mini-batches", fontsize="medium")
    picture.supylabel("share of wrong answers", fontsize="medium")
    handles, names = picture.axes[0].get_legend_handles_labels()
    unique = dict(zip(names, handles, strict=True))
    picture.axes[0].legend(unique.values(), unique.keys(), fontsize="x-small", frameon=False)
    return picture


def tables(results: Results) -> list[Table]:
    def cell(problem: str, optimizer: str) -> str:
        labels = _labels(problem, optimizer)
        found = [[by_label[label] for label in labels if label in by_label] for by_label in results.values()]
        found = [of_seed for of_seed in found if of_seed]
        if not found:
            return "not run"
        best = [min(map(solved_after, of_seed)) for of_seed in found]
        times = [time for time in best if isfinite(time)]
        if not times:
            lowest = min(min(result.column("wrong")) for of_seed in found for result in of_seed)
            return f"not solved ({lowest:.2g} wrong)"
        return f"solved {len(times)} of {len(best)}, {min(times):,.0f}" + (
            f" to {max(times):,.0f}" if max(times) > min(times) else ""
        )

    rows = [[problem, *(cell(problem, optimizer) for optimizer in OPTIMIZERS)] for problem in PROBLEMS]
    caption = (
        "Seeds on which each problem was solved, and after how many mini-batches; the better of two learning rates"
    )
    return [Table(caption, ("problem", *OPTIMIZERS), rows)]


def solves_all(*problems: Sequence[Result]) -> Verdict:
    """Decide from the results of all seeds for each problem: each is solved on at least 4 of 5 seeds."""
    counts = [sum(isfinite(solved_after(result)) for result in seeds) for seeds in problems]
    enough = [count >= SHARE * len(seeds) for count, seeds in zip(counts, problems, strict=True)]
    text = f"{sum(enough)} of {len(problems)} problems"
    exceptions = [
        f"{seeds[0].settings['problem']} on {count} of {len(seeds)} seeds"
        for count, seeds in zip(counts, problems, strict=True)
        if count < len(seeds)
    ]
    return Verdict(all(enough), text + "".join(f", {exception}" for exception in exceptions))


def count(results: Sequence[Result]) -> int:
    """Number of problems that at least one of the runs solves."""
    return len({result.settings["problem"] for result in results if isfinite(solved_after(result))})


def solves_more_than(other: str) -> Callable[..., Verdict]:
    def check(*results: Result) -> Verdict:
        """Decide from PSGD's results, then those of the other."""
        ours, theirs = count(results[: len(PROBLEMS)]), count(results[len(PROBLEMS) :])
        return Verdict(ours > theirs, f"{ours} problems against {theirs} by {other}")

    return check


OURS = [label for problem in PROBLEMS for label in _labels(problem, "PSGD")]

FIGURE = Figure(
    name="rnn-suite",
    title="Eight problems that need a long memory",
    about="A recurrent network with 100 states on eight problems, by one recipe: whitened gradients, a learning rate "
    "of 0.0002 and a feedback matrix with slow and fast rotations, found on other seeds than these. The other "
    "optimizers start from the same networks. SGD, Adam and RMSProp with momentum have the same schedule and two "
    "learning rates, of which the better counts. L-BFGS takes "
    "up to ten steps with line searches on each mini-batch, and has a tenth of the mini-batches. "
    "A problem is solved when fewer than 1 % of 1,000 fresh sequences are "
    "answered wrongly anywhere; a number is wrong if it is off by more than 0.04. A run ends there. The length is that "
    "of the sequences, for memorisation that of the pause. The short version has only SGD beside PSGD.",
    quick={"length": 30, "iterations": 4_000, "others": ["SGD"], "seeds": 1, "baseline_seeds": 1},
    full={
        "length": 100,
        "iterations": 8_000,
        "others": ["SGD", "Adam", "RMSProp", "L-BFGS"],
        "seeds": 5,
        "baseline_seeds": 1,
    },
    runs=runs,
    draw=draw,
    tables=tables,
    claims=(
        Claim(
            "psgd_solves_all",
            "Preconditioned SGD solves all eight problems, each on at least 4 of 5 seeds.",
            OURS,
            solves_all,
            together=True,
            source="ours",
        ),
        *(
            Claim(
                f"more_than_{other.lower().replace('-', '')}",
                f"Preconditioned SGD solves more of the problems than {other}.",
                [*OURS, *(label for problem in PROBLEMS for label in _labels(problem, other))],
                solves_more_than(other),
                source="paper" if other == "SGD" else "ours",
            )
            for other in OPTIMIZERS
            if other != "PSGD"
        ),
    ),
)
