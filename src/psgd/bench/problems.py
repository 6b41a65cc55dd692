"""Time and iterations to a target, on problems from two parameters to a quarter of a million."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from math import inf, isfinite
from typing import cast

import torch
from matplotlib.figure import Figure as Picture

from ..experiments.figure import Table
from ..experiments.training import losses
from . import peers
from .benchmark import Benchmark, Plan
from .charts import OURS, THEIRS, bars
from .hard import Start
from .isolate import Outcome, Row, Task
from .objectives import GROUPS, PROBLEMS, Problem, usual
from .peers import Peer

#: seed of everything random; settings of PSGD were tuned with others
SEED = 7
#: share of a problem's seconds that a quick run has
QUICK = 0.25
#: number of steps after which everything has been compiled
WARMUP = 3
#: approximate number of rows for a learning rate
ROWS = 25


def work(*, problem: Problem, peer: Peer, device: str, seconds: float) -> Iterator[Row]:
    """Yield rows on the way to the goal, for one learning rate after the other; the last row of each is its end.

    Only steps are timed, without evaluations, and without what some peers compile at their first steps, which are taken
    once before. A learning rate is given up when it needs longer than the best before it.
    """
    rates = problem.rates(peer)
    _, steps = _begin(problem, peer, rates[0], device)
    for _ in range(WARMUP):
        next(steps)
    best = inf
    for lr in rates:
        start, steps = _begin(problem, peer, lr, device)
        iteration, taken, told, value = 0, 0.0, 0.0, start.judge()
        yield {"lr": lr, "iteration": iteration, "seconds": taken, "value": value}
        while taken < min(seconds, best) and isfinite(value) and value >= problem.target:
            if taken - told > seconds / ROWS:
                told = taken
                yield {"lr": lr, "iteration": iteration, "seconds": taken, "value": value}
            begin = time.perf_counter()
            for _ in range(problem.every):
                next(steps)
            taken += time.perf_counter() - begin
            iteration += problem.every
            value = start.judge()
        yield {"lr": lr, "iteration": iteration, "seconds": taken, "value": value}
        if value < problem.target:
            best = min(best, taken)


def _begin(problem: Problem, peer: Peer, lr: float, device: str) -> tuple[Start, Iterator[float]]:
    torch.manual_seed(SEED)
    start = problem.start(device, SEED)
    optimizer = peer.optimizer(start.params, lr)
    return start, losses(cast("torch.optim.Optimizer", optimizer), start.loss, start.data)


def tasks(plan: Plan) -> list[Task]:
    names = list(PROBLEMS) if plan.model is None else GROUPS.get(plan.model, [plan.model])
    found = []
    for problem in (PROBLEMS[name] for name in names):
        seconds = problem.seconds * (QUICK if plan.quick else 1.0)
        for peer in (usual(SEED), peers.PSGD_WHITENING, problem.by_hand(SEED), *plan.peers):
            settings = {"problem": problem, "peer": peer, "device": plan.device, "seconds": seconds}
            limit = plan.limit or 30.0 + 2 * seconds * len(problem.rates(peer))
            found.append(Task(f"{problem.name}, {peer.name}", work, settings, limit))
    return found


def best(outcome: Outcome) -> Row | None:
    """Row at which the target was reached first, or None."""
    target = outcome.task.settings["problem"].target
    reached = [row for row in outcome.rows if row["value"] is not None and row["value"] < target]
    return min(reached, key=lambda row: row["seconds"], default=None)


def closest(outcome: Outcome) -> Row | None:
    """Best row, if the target was not reached."""
    seen = [row for row in outcome.rows if isfinite(row["value"])]
    return min(seen, key=lambda row: row["value"], default=None)


def _by_problem(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Outcome | None]]:
    """Outcomes of all methods by name, for each problem; None if a run was interrupted before."""
    methods = dict.fromkeys(outcome.task.settings["peer"].name for outcome in outcomes)
    found: dict[str, dict[str, Outcome | None]] = {}
    for outcome in outcomes:
        settings = outcome.task.settings
        found.setdefault(settings["problem"].name, dict.fromkeys(methods))[settings["peer"].name] = outcome
    return found


def table(outcomes: Sequence[Outcome]) -> Table:
    """Table of the problems, and under each the methods: when they reached the target, or how close they came."""
    rows = []
    for name, group in _by_problem(outcomes).items():
        problem = PROBLEMS[name]
        seconds = next(outcome.task.settings["seconds"] for outcome in group.values() if outcome is not None)
        rows.append([name, "", f"≤ {seconds:g}", "", f"< {problem.target:g}"])
        rows += [[f"  {method}", *_cells(outcome)] for method, outcome in group.items()]
    caption = (
        "the best of three step sizes, of LBFGS one, with the seconds that each of them had; a dash where the target "
        "was not reached, and there the lowest value that was seen"
    )
    return Table(caption, ("", "step size", "seconds", "iterations", "value"), rows)


def _cells(outcome: Outcome | None) -> list[str]:
    if outcome is None:
        return ["", "", "", "not measured"]
    if (row := best(outcome)) is not None:
        return [f"{row['lr']:g}", f"{row['seconds']:.3g}", f"{row['iteration']:,}", f"{row['value']:.3g}"]
    if (row := closest(outcome)) is not None:
        return [f"{row['lr']:g}", "–", "–", f"{row['value']:.3g}"]
    return ["–"] * 4


def draw(outcomes: Sequence[Outcome]) -> Picture:
    groups = _by_problem(outcomes)
    most = max((len(group) for group in groups.values()), default=1)
    columns = min(len(groups), 2) or 1
    lines = -(-len(groups) // columns) or 1
    picture = Picture(figsize=(6 * columns, (1.2 + 0.25 * most) * lines), layout="constrained")
    panels = list(picture.subplots(lines, columns, squeeze=False).flat)
    for panel in panels[len(groups) :]:
        panel.set_axis_off()
    for panel, (name, group) in zip(panels, groups.items(), strict=False):
        problem = PROBLEMS[name]
        times = {method: None if o is None else (best(o) or {}).get("seconds") for method, o in group.items()}
        colors = {method: OURS if method.startswith("PSGD") else THEIRS for method in times}
        missing = {method: "failed" if o.failure else "not reached" for method, o in group.items() if o is not None}
        bars(panel, times, colors, "seconds", missing)
        panel.set_title(f"{problem.title}\n{problem.goal} < {problem.target:g}", fontsize="medium")
    return picture


BENCHMARK = Benchmark(
    "problems",
    "Time to a target",
    "Seconds of optimisation and iterations to a target loss or error, each method at the best of three step sizes, "
    "but LBFGS, which has a line search, and otherwise as it comes. 'PSGD, tuned by hand' is the exception: it has a "
    "structure and other numbers for each problem, the best of ten to forty settings that were tried with other seeds.",
    tasks,
    table,
    draw,
    models=(*PROBLEMS, *GROUPS),
)
