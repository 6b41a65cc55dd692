"""Optimizers as they come, on a panel of small problems: what defaults solve, and how wide good step sizes are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from statistics import median

import torch
from matplotlib.figure import Figure as Picture
from torch import nn

from .. import __version__, newton, whiten
from ..experiments.figure import Table
from . import panel
from .benchmark import Benchmark, Plan
from .charts import OURS, THEIRS, bars
from .isolate import Outcome, Row, SkippedError, Task
from .panel import PROBLEMS, PanelProblem
from .record import Record

#: PSGD as the documentation recommends it, for mini-batches and for smooth losses
WHITENING, CURVATURE = "psgd.whiten", "psgd.newton"
OURS_BY_NAME: dict[str, Callable[..., torch.optim.Optimizer]] = {
    WHITENING: whiten,
    CURVATURE: newton,
}
THEIRS_BY_NAME: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda model, **lr: torch.optim.AdamW(model.parameters(), **lr),
    "SGD, momentum 0.9": lambda model, **lr: torch.optim.SGD(model.parameters(), momentum=0.9, **lr),
}
#: all methods, in the order of the tables
METHODS = THEIRS_BY_NAME | OURS_BY_NAME
#: that of the two PSGDs that the documentation recommends for the kind of a problem
ONE_LINE = "PSGD, one line"

#: method that the others are compared with, run by run
RIVAL = "AdamW"

#: step sizes that every method is tried with, beside its own default
RATES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
#: seeds of problems in which anything is random; targets were found with others
SEEDS = (0, 1, 2)
#: problems of a quick run
QUICK = ("rosenbrock", "quadratic", "logistic", "tensor", "mlp", "cnn", "transformer", "embedding")
#: ratio to the value at the start over which a run has diverged
DIVERGED = 1000.0
#: seconds allowed for a run
SECONDS = 90.0


def make(method: str, model: nn.Module, lr: float | None) -> torch.optim.Optimizer:
    """Optimizer of a method, with its own default step size where ``lr`` is None."""
    return METHODS[method](model, **({} if lr is None else {"lr": lr}))


def recommended(problem: PanelProblem) -> str:
    return CURVATURE if problem.curvature else WHITENING


def work(
    *,
    problem: PanelProblem,
    method: str,
    rates: Sequence[float | None],
    seeds: Sequence[int],
    runs: Path | None = None,
    until: float | None = None,
) -> Iterator[Row]:
    """Yield a row for each step size and seed; None is the default step size.

    Args:
        problem: one of ``PROBLEMS``
        method: one of ``METHODS``
        rates: step sizes
        seeds: seeds of the problem
        runs: folder of finished runs, which are not repeated
        until: time after which no run starts
    """
    record = Record(runs)
    for lr in rates:
        for seed in seeds:
            place = {"lr": lr, "seed": seed}
            identity = {
                "problem": problem.name,
                "evaluations": problem.evaluations,
                "target": problem.target,
                "method": method,
                "psgd": __version__,
                "torch": torch.__version__,
                **place,
            }
            name = f"{problem.name} {method} {'default' if lr is None else f'{lr:g}'} {seed}"
            rows = record.load(name, identity)
            if rows is None:
                if until is not None and time.time() > until:
                    raise SkippedError("not finished: no time for another run; the same command continues")
                found = panel.run(problem, lambda model, lr: make(method, model, lr), lr, seed)
                rows = [asdict(found)]
                record.save(name, identity, rows)
            for row in rows:
                # A file has no None among its numbers.
                yield {**place, **row, "reached": None if row["reached"] != row["reached"] else row["reached"]}


def tasks(plan: Plan) -> list[Task]:
    names: Sequence[str] = list(PROBLEMS)
    if plan.model is not None:
        names = [plan.model]
    elif plan.quick:
        names = QUICK
    found = []
    for problem in (PROBLEMS[name] for name in names):
        seeds = SEEDS[:1] if plan.quick or not problem.random else SEEDS
        for method in METHODS:
            settings = {"problem": problem, "method": method, "rates": [None, *RATES], "seeds": list(seeds)}
            settings |= {"runs": plan.runs, "until": plan.until}
            limit = plan.limit or SECONDS * (1 + len(RATES)) * len(seeds)
            found.append(Task(f"{problem.name}, {method}", work, settings, limit))
    return found


# ---------------------------------------------------------------- what rows say


def of_defaults(outcome: Outcome) -> list[Row]:
    return [row for row in outcome.rows if row["lr"] is None]


def of_grid(outcome: Outcome) -> list[Row]:
    return [row for row in outcome.rows if row["lr"] is not None]


def reached(rows: Sequence[Row]) -> int:
    return sum(row["reached"] is not None for row in rows)


def evaluations(outcome: Outcome) -> float | None:
    """Evaluations to the target with the defaults, the median of the seeds; None unless most of them reached it."""
    rows = of_defaults(outcome)
    if 2 * reached(rows) <= len(rows):
        return None
    return median(sorted(inf if row["reached"] is None else row["reached"] for row in rows))


def won(row: Row, other: Row) -> bool:
    """Whether a run reached the target sooner than another, or reached it where the other did not."""
    mine, theirs = row["reached"], other["reached"]
    return mine is not None and (theirs is None or mine < theirs)


def lower(row: Row, other: Row) -> bool:
    """Whether neither run reached the target, and the first ended with a lower value."""
    if row["reached"] is not None or other["reached"] is not None or not row["finite"]:
        return False
    return not other["finite"] or bool(row["value"] < other["value"])


def duels(outcome: Outcome, other: Outcome) -> list[tuple[Row, Row]]:
    """Runs of two methods with the same step size of the grid and the same seed."""
    others = {(row["lr"], row["seed"]): row for row in of_grid(other)}
    return [(row, others[place]) for row in of_grid(outcome) if (place := (row["lr"], row["seed"])) in others]


Group = dict[str, Outcome | None]


def by_problem(outcomes: Sequence[Outcome]) -> dict[str, Group]:
    """Outcomes by problem and method; None where an interrupted run has none. The recommended PSGD is there twice."""
    found: dict[str, Group] = {}
    for outcome in outcomes:
        settings = outcome.task.settings
        group = found.setdefault(settings["problem"].name, dict.fromkeys([*METHODS, ONE_LINE]))
        group[settings["method"]] = outcome
        if settings["method"] == recommended(settings["problem"]):
            group[ONE_LINE] = outcome
    return found


# ---------------------------------------------------------------- table and picture


def table(outcomes: Sequence[Outcome]) -> Table:
    """Table with a row for each problem and a column for each method, and under them rows with sums."""
    groups = by_problem(outcomes)
    columns = [*METHODS, ONE_LINE]
    rows = [[name, *(_cell(group[method]) for method in columns)] for name, group in groups.items()]
    for title, summed in SUMS.items():
        found = [[one for group in groups.values() if (one := group[method]) is not None] for method in columns]
        rows.append([title, *(summed(one) for one in found)])
    for title, better in DUELS.items():
        rows.append([title, *(_against(RIVAL, method, groups.values(), better) for method in columns)])
    caption = (
        "Each problem has a target and a budget of gradient evaluations; a method that evaluates two for a step has "
        "half as many steps. First the evaluations until the target was reached with the method's defaults, the median "
        "of the seeds; if most seeds did not reach it, a dash and the median of the values at the end. Then how many "
        "runs reached it with the step sizes 1e-4, 1e-3, 1e-2, 0.1 and 1, all else at its default. 'PSGD, one line' is "
        "that of the two that the documentation recommends for this kind of problem, without looking at results. The "
        f"last two rows compare runs with the same step size of the grid and the same seed: how often a method won "
        f"against {RIVAL}, and how often it lost. A run wins if it reaches the target in fewer evaluations, or if it "
        "reaches the target and the other does not. If neither does, the last row counts which one ends lower."
    )
    return Table(caption, ("", *columns), rows)


def _cell(outcome: Outcome | None) -> str:
    if outcome is None or not outcome.rows:
        return "not measured" if outcome is None or outcome.failure is None else "failed"
    grid = of_grid(outcome)
    count = evaluations(outcome)
    if count is not None:
        first = f"{count:,.0f}"
    else:
        value = median(row["value"] if row["finite"] else inf for row in of_defaults(outcome))
        first = f"– ({value:.2g})"
    return f"{first}; {reached(grid)}/{len(grid)}"


def _solved(outcomes: Sequence[Outcome]) -> str:
    return f"{sum(evaluations(outcome) is not None for outcome in outcomes)} of {len(outcomes)}"


def _won(outcomes: Sequence[Outcome]) -> str:
    rows = [row for outcome in outcomes for row in of_grid(outcome)]
    return f"{reached(rows)} of {len(rows)}"


def _not_finite(outcomes: Sequence[Outcome]) -> str:
    rows = [row for outcome in outcomes for row in outcome.rows]
    return f"{sum(not row['finite'] for row in rows)} of {len(rows)}"


def _diverged(outcomes: Sequence[Outcome]) -> str:
    """Count runs that are lost, also of methods that skip steps that are not finite."""
    rows = [row for outcome in outcomes for row in outcome.rows]
    return f"{sum(not row['finite'] or row['value'] > DIVERGED * row['start'] for row in rows)} of {len(rows)}"


def _against(rival: str, method: str, groups: Iterable[Group], better: Callable[[Row, Row], bool]) -> str:
    """Numbers of runs of a method that were better and worse than those of its rival."""
    both = [(group[method], group[rival]) for group in groups]
    pairs = [pair for mine, theirs in both if mine and theirs for pair in duels(mine, theirs)]
    if method == rival or not pairs:
        return "–"
    return f"{sum(better(a, b) for a, b in pairs)}, {sum(better(b, a) for a, b in pairs)}"


#: rows that compare runs at the same place of the grid
DUELS: dict[str, Callable[[Row, Row], bool]] = {
    f"runs of the grid won against {RIVAL}, and lost": won,
    "runs that ended lower where neither reached it, and higher": lower,
}
SUMS: dict[str, Callable[[Sequence[Outcome]], str]] = {
    "problems solved by defaults": _solved,
    "runs of the grid at the target": _won,
    "runs that ended not finite": _not_finite,
    "runs that ended there, or over 1000 times the start": _diverged,
}


def draw(outcomes: Sequence[Outcome]) -> Picture:
    """Draw the evaluations to the target with defaults, a panel for each problem."""
    groups = by_problem(outcomes)
    columns = min(len(groups), 4) or 1
    lines = -(-len(groups) // columns) or 1
    picture = Picture(figsize=(4.2 * columns, 1.8 * lines), layout="constrained")
    panels = list(picture.subplots(lines, columns, squeeze=False).flat)
    for axes in panels[len(groups) :]:
        axes.set_axis_off()
    for axes, (name, group) in zip(panels, groups.items(), strict=False):
        measured: dict[str, Outcome] = {method: o for method in METHODS if (o := group[method]) is not None}
        counts = {method: evaluations(measured[method]) if method in measured else None for method in METHODS}
        colors = {method: OURS if method in OURS_BY_NAME else THEIRS for method in METHODS}
        missing = {method: "failed" if o.failure else "not reached" for method, o in measured.items()}
        bars(axes, counts, colors, "evaluations", missing)
        axes.set_title(f"{name} < {PROBLEMS[name].target:g}", fontsize="medium")
    return picture


BENCHMARK = Benchmark(
    "defaults",
    "A panel of problems, with defaults",
    "Sixteen small problems of different kinds on the CPU: functions of few numbers, regressions, factorisations, a "
    "differential equation, and networks with mini-batches. Every optimizer runs with its defaults, and with the same "
    "five step sizes, until it reaches a target or has spent its evaluations of the gradient. Targets come from AdamW "
    "and SGD with momentum alone, with other seeds.",
    tasks,
    table,
    draw,
    models=tuple(PROBLEMS),
    peers=(),
    parts=("total", "jobs"),
)
