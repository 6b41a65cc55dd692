"""Time and iterations to a target, on problems from two parameters to a quarter of a million."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from math import inf, isfinite
from statistics import median
from typing import cast

import torch
from matplotlib.figure import Figure as Picture

from ..experiments.figure import Table
from ..experiments.training import losses
from . import peers, protocol
from .benchmark import Benchmark, Plan
from .charts import OURS, THEIRS, bars
from .hard import Start
from .isolate import Outcome, Row, Task
from .objectives import DENSE, GROUPS, NEWTON, PROBLEMS, Problem
from .peers import Peer
from .protocol import Search, Setting

#: share of a problem's seconds that a quick run has
QUICK = 0.25
#: number of steps after which everything has been compiled
WARMUP = 3


def work(*, problem: Problem, peer: Peer, device: str, seconds: float, seeds: Sequence[int]) -> Iterator[Row]:
    """Yield a row for the end of each run: of those that tune the learning rate, and of those that are judged.

    Only steps are timed, without evaluations, and without what some peers compile at their first steps, which are taken
    once before. While a learning rate is tuned, it is given up when it needs longer than the best before it.
    """
    _, steps = _begin(problem, peer, peer.lr, device, protocol.TUNING_SEED)
    for _ in range(WARMUP):
        next(steps)

    def train(setting: Setting, seed: int, role: str, best: tuple[float, float] | None) -> list[Row]:
        return [run(problem, peer, setting.lr, device, seed, seconds if best is None else min(seconds, best[0]))]

    yield from protocol.runs(Search(peer.lr), seeds, train, score)


def score(rows: Sequence[Row]) -> tuple[float, float]:
    """Seconds to the target; among runs that do not reach it the lowest value."""
    (row,) = rows
    return row["seconds"] if row["reached"] else inf, row["value"] if isfinite(row["value"]) else inf


def run(problem: Problem, peer: Peer, lr: float, device: str, seed: int, seconds: float) -> Row:
    """Train until the target is reached, the time is over, or the value is not finite."""
    start, steps = _begin(problem, peer, lr, device, seed)
    iteration, taken, value = 0, 0.0, start.judge()
    lowest = value
    while taken < seconds and isfinite(value) and value >= problem.target:
        begin = time.perf_counter()
        for _ in range(problem.every):
            next(steps)
        taken += time.perf_counter() - begin
        iteration += problem.every
        value = start.judge()
        lowest = min(lowest, value) if isfinite(value) else lowest
    reached = value < problem.target
    return {"lr": lr, "seed": seed, "iteration": iteration, "seconds": taken, "value": lowest, "reached": reached}


def _begin(problem: Problem, peer: Peer, lr: float, device: str, seed: int) -> tuple[Start, Iterator[float]]:
    torch.manual_seed(seed)
    start = problem.start(device, seed)
    optimizer = peer.optimizer(start.params, lr)
    return start, losses(cast("torch.optim.Optimizer", optimizer), start.loss, start.data)


def tasks(plan: Plan) -> list[Task]:
    names = list(PROBLEMS) if plan.model is None else GROUPS.get(plan.model, [plan.model])
    found = []
    for problem in (PROBLEMS[name] for name in names):
        seconds = problem.seconds * (QUICK if plan.quick else 1.0)
        seeds = protocol.TEST_SEEDS[: 1 if plan.quick or not problem.random else None]
        ours = (NEWTON, DENSE, peers.PSGD_WHITENING) if problem.small else (NEWTON, peers.PSGD_WHITENING)
        for peer in (*ours, *plan.peers):
            settings = {"problem": problem, "peer": peer, "device": plan.device, "seconds": seconds, "seeds": seeds}
            limit = plan.limit or 30.0 + 2 * seconds * protocol.most_runs(len(seeds))
            found.append(Task(f"{problem.name}, {peer.name}", work, settings, limit))
    return found


def judged(outcome: Outcome, role: str) -> list[Row]:
    """Rows of the runs that are reported: with the tuned learning rate, or with the default."""
    return [row for row in outcome.rows if row["role"] == role]


def seconds_of(outcome: Outcome, role: str) -> float | None:
    """Median of the seconds to the target, or None unless most seeds reached it."""
    times = [row["seconds"] if row["reached"] else inf for row in judged(outcome, role)]
    return median(times) if times and median(times) < inf else None


def _by_problem(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Outcome | None]]:
    """Outcomes of all methods by name, for each problem; None if a run was interrupted before."""
    found: dict[str, dict[str, Outcome | None]] = {}
    methods = dict.fromkeys(outcome.task.settings["peer"].name for outcome in outcomes)
    for outcome in outcomes:
        settings = outcome.task.settings
        usual = methods if settings["problem"].small else [name for name in methods if name != DENSE.name]
        found.setdefault(settings["problem"].name, dict.fromkeys(usual))[settings["peer"].name] = outcome
    return found


def table(outcomes: Sequence[Outcome]) -> Table:
    """Table of the problems, and under each the methods, tuned and with defaults: when they reached the target."""
    rows = []
    for name, group in _by_problem(outcomes).items():
        problem = PROBLEMS[name]
        seconds = next(outcome.task.settings["seconds"] for outcome in group.values() if outcome is not None)
        rows.append([name, "", f"≤ {seconds:g}", "", f"< {problem.target:g}"])
        for method, outcome in group.items():
            if outcome is None:
                rows.append([f"  {method}", "", "", "", "not measured"])
                continue
            rows.append([f"  {method}", *_cells(judged(outcome, protocol.TUNED))])
            rows.append([f"  {method}, default", *_cells(judged(outcome, protocol.DEFAULT))])
    caption = (
        f"{protocol.TEXT} Seconds are those of steps, each run has at most those of its problem, and seeds that do not "
        "reach the target have a dash and the lowest value that was seen."
    )
    return Table(caption, ("", "learning rate", "seconds", "iterations", "value"), rows)


def _cells(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return ["–"] * 4
    at_target = [row for row in rows if row["reached"]]
    lr = f"{rows[0]['lr']:g}"
    if not at_target:
        return [lr, "–", "–", protocol.spread([row["value"] for row in rows])]
    count = "" if len(at_target) == len(rows) else f"{len(at_target)} of {len(rows)}: "
    missed = [row["value"] for row in rows if not row["reached"]]
    return [
        lr,
        count + protocol.spread([row["seconds"] for row in at_target]),
        protocol.spread([row["iteration"] for row in at_target], digits=4),
        protocol.spread(missed) if missed else "",
    ]


def draw(outcomes: Sequence[Outcome]) -> Picture:
    """Draw the seconds of each method at the tuned learning rate, a panel for each problem."""
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
        times = {method: None if o is None else seconds_of(o, protocol.TUNED) for method, o in group.items()}
        colors = {method: OURS if method.startswith("PSGD") else THEIRS for method in times}
        missing = {method: "failed" if o.failure else "not reached" for method, o in group.items() if o is not None}
        bars(panel, times, colors, "seconds", missing)
        panel.set_title(f"{problem.title}\n{problem.goal} < {problem.target:g}", fontsize="medium")
    return picture


BENCHMARK = Benchmark(
    "problems",
    "Time to a target",
    "Seconds of optimisation and iterations to a target loss or error. PSGD is there as it comes, with curvature from "
    "finite differences; for problems of few parameters also with one dense preconditioner for all of them; and with "
    f"whitening. {protocol.TEXT}",
    tasks,
    table,
    draw,
    models=(*PROBLEMS, *GROUPS),
)
