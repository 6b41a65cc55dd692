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
from .isolate import Outcome, Row, Task
from .objectives import PROBLEMS, Problem
from .peers import Peer

#: of everything random; the settings of PSGD for MNIST were found with others
SEED = 7
#: the share of a problem's seconds that a quick run has
QUICK = 0.25
#: about how many rows a step size gets
ROWS = 100


def work(*, problem: Problem, peer: Peer, device: str, seconds: float) -> Iterator[Row]:
    """Rows along the way to the goal, for one step size after the other; the last of each is where it ended.

    Only steps are timed, not looks. A step size is given up when it takes longer than the best before it.
    """
    best = inf
    for lr in problem.rates(peer):
        torch.manual_seed(SEED)
        start = problem.start(device, SEED)
        optimizer = peer.optimizer(start.params, lr)
        steps = losses(cast("torch.optim.Optimizer", optimizer), start.loss, start.data)
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


def tasks(plan: Plan) -> list[Task]:
    chosen = [PROBLEMS[plan.model]] if plan.model is not None else list(PROBLEMS.values())
    found = []
    for problem in chosen:
        seconds = problem.seconds * (QUICK if plan.quick else 1.0)
        for peer in (problem.fitted(), peers.PSGD_WHITENING, *plan.peers):
            settings = {"problem": problem, "peer": peer, "device": plan.device, "seconds": seconds}
            limit = plan.limit or 30.0 + 2 * seconds * len(problem.rates(peer))
            found.append(Task(f"{problem.name}, {peer.name}", work, settings, limit))
    return found


def best(outcome: Outcome) -> Row | None:
    """Where the target was reached first; else None."""
    target = outcome.task.settings["problem"].target
    reached = [row for row in outcome.rows if row["value"] is not None and row["value"] < target]
    return min(reached, key=lambda row: row["seconds"], default=None)


def closest(outcome: Outcome) -> Row | None:
    """The best look at a goal that was not reached."""
    seen = [row for row in outcome.rows if isfinite(row["value"])]
    return min(seen, key=lambda row: row["value"], default=None)


def _by_problem(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.task.settings["problem"].name, []).append(outcome)
    return found


def table(outcomes: Sequence[Outcome]) -> Table:
    """The problems, and under each the methods: where they reached the target, or how close they came."""
    rows = []
    for name, group in _by_problem(outcomes).items():
        problem = PROBLEMS[name]
        rows.append([name, "", "", "", f"< {problem.target:g}"])
        for outcome in group:
            row, cells = best(outcome), ["–"] * 4
            if row is not None:
                cells = [f"{row['lr']:g}", f"{row['seconds']:.3g}", f"{row['iteration']:,}", f"{row['value']:.3g}"]
            elif (row := closest(outcome)) is not None:
                cells = [f"{row['lr']:g}", "–", "–", f"{row['value']:.3g}"]
            rows.append([f"  {outcome.task.settings['peer'].name}", *cells])
    caption = "the best of three step sizes, of PSGD and LBFGS one; a dash where the target was not reached"
    return Table(caption, ("", "step size", "seconds", "iterations", "value"), rows)


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
        times = {o.task.settings["peer"].name: (best(o) or {}).get("seconds") for o in group}
        colors = {name: OURS if name.startswith("PSGD") else THEIRS for name in times}
        bars(panel, times, colors, "seconds", missing="not reached")
        panel.set_title(f"{problem.title}\n{problem.goal} < {problem.target:g}", fontsize="medium")
    return picture


BENCHMARK = Benchmark(
    "problems",
    "Time to a target",
    "Seconds of optimisation and iterations to a target loss or error, each method at the best of three step sizes; "
    "PSGD at one setting for each problem, and LBFGS, which has a line search.",
    tasks,
    table,
    draw,
    models=tuple(PROBLEMS),
)
